"""Sums: how the payloads of each codec are added, and how their sums travel."""
