"""Models of the papers' algorithms in NumPy."""
