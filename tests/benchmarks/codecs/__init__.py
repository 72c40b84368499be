"""Tests of the programs in benchmarks/training."""
