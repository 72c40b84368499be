"""Trainings that compare codecs on small data."""
