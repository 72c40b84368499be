"""Statistical tests of the random bits."""
