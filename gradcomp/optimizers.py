"""Optimizers that exchange compressed momenta in place of gradients."""

from gradcomp._src.optimizers.adam import adam
from gradcomp._src.optimizers.local_adam import DoublingGaps, LocalMomentsState
from gradcomp._src.optimizers.moments import MomentsState, Stable

__all__ = ["DoublingGaps", "LocalMomentsState", "MomentsState", "Stable", "adam"]
