"""Tests of meshes, workers and trees."""
