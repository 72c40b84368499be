"""The five papers' models, whose names the expressions of numbers.csv have."""
