"""Benchmarks and studies, which run as ``python -m benchmarks.room.name``."""
