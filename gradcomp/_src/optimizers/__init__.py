"""Optimizers whose workers exchange compressed momenta in place of gradients."""
