"""Local steps: workers train for some steps between two exchanges."""
