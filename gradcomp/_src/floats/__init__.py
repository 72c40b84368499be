"""Arithmetic in floating-point formats of few bits, each result rounded correctly."""
