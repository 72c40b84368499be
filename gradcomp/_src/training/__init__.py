"""Gradients per worker, and train steps."""
