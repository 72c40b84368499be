"""Tests of what judges the claims of the papers."""
