"""Wrappers of transformations: clipping, skipping, switching, freezing."""

from gradcomp._src import public as _public
from gradcomp._src.transforms.clip import clip_by_local_norm
from gradcomp._src.transforms.freeze import allow_frozen
from gradcomp._src.transforms.skip import skip_nonfinite
from gradcomp._src.transforms.switch import switch

__all__ = [
  "allow_frozen",
  "clip_by_local_norm",
  "skip_nonfinite",
  "switch",
]

_public.publish(globals())
