"""Measurements of compression errors, and comparisons of replicas."""
