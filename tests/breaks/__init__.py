"""Deliberate breaks of the library, and the command that tries them."""
