"""Judges of claims: of accuracy, of speed, and of records outside the study."""
