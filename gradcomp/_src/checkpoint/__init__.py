"""Specs, shapes and records of optimizer states, and resharding to N workers."""
