"""Sharded models."""
