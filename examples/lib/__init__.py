"""Code that the trainers share."""
