"""Quantization levels that all workers fit to their gradients, kept as codec state."""

from typing import ClassVar

import jax

from gradcomp._src.codecs.leaf import Leaf
from gradcomp._src.codecs.memory import Memory
from gradcomp._src.codecs.scaling import bucket_words
from gradcomp._src.codecs.tiles import as_float32
from gradcomp._src.kernels.common import fitted_levels
from gradcomp._src.kernels.common.scales import scales, tensor_norm


class FittedLevels:
  """A base of codecs that may fit their levels: see :class:`FittedCodec`."""

  bits: int
  bucket_size: int | None

  most_counted: ClassVar[int] = fitted_levels.MOST_COUNTED

  @property
  def fitted(self) -> bool:
    """True if levels are fitted."""
    raise NotImplementedError

  def init(self, leaf: Leaf | None = None, key: jax.Array | None = None) -> Memory:
    """Returns equally spaced levels above zero, or no state if none are fitted."""
    del leaf, key
    return Memory(fitted_levels.first_levels(self.bits)) if self.fitted else Memory()

  def measure(self, x: jax.Array) -> jax.Array:
    """Counts normalised magnitudes in a sample of buckets: ``int32[256]``."""
    flat = as_float32(x)
    return fitted_levels.histogram(
      flat,
      bucket_size=bucket_words(self.bucket_size),
      scale=None if self.bucket_size else scales(tensor_norm(flat, "max")),
      norm="max",
    )

  def fit(self, counts: jax.Array, memory: jax.Array) -> jax.Array:
    """Returns the levels with the least variance; ``memory`` if nothing was counted."""
    return fitted_levels.fit(counts, memory)
