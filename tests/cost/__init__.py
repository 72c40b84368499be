"""Tests of cost."""
