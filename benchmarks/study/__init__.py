"""The papers' studies: trainings, times, claims and the verdicts on them."""
