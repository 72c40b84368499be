"""Dettmers' trainings in data and in model parallelism."""
