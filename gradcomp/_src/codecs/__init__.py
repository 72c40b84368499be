"""Codecs: how rows of float32 become the words of a payload, and back."""
