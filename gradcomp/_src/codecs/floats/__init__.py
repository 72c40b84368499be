"""Codecs of floating-point numbers of few bits."""
