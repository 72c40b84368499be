"""Optimizers that exchange compressed momenta in place of gradients."""
