"""Wrappers of transformations and of train steps."""

from gradcomp._src.core.specs import replicable
from gradcomp._src.training.whole_step import whole_step
from gradcomp._src.transforms.each_worker import clip_by_local_norm, on_each_worker
from gradcomp._src.transforms.freeze import allow_frozen
from gradcomp._src.transforms.switch import switch

__all__ = ["allow_frozen", "clip_by_local_norm", "on_each_worker", "replicable"]
__all__ += ["switch", "whole_step"]
