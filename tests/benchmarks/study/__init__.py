"""Tests of the study of the papers' claims."""
