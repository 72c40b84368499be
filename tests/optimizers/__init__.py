"""Tests of optimizers that exchange momenta in place of gradients."""
