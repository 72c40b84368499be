"""Trainers, and the library that they share."""
