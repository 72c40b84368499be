"""Optimizers that exchange compressed momenta in place of gradients."""

from gradcomp._src.optimizers.adam import adam
from gradcomp._src.optimizers.local_adam import DoublingGaps
from gradcomp._src.optimizers.moments import Stable

__all__ = ["DoublingGaps", "Stable", "adam"]
