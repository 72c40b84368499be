"""Tests of floats."""
