"""A decoder of payloads, written from docs/inside/wire-format.md alone."""
