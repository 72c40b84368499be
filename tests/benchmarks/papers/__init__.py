"""Tests of the five papers' performance models."""
