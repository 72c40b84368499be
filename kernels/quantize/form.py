"""Options of the encoders that round elements under a scale for each bucket."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax

from gradcomp._src.kernels.common.fixed_point import Divide, Lane, divide
from gradcomp._src.kernels.common.planes import pack_planes, planes_per_word


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledForm(abc.ABC):
  """The static options of an encoder, and the rule for one plane of a tile."""

  bits: int  # the width of a code
  bucket_size: int  # elements a bucket, B
  inline: bool = True  # whether the scales follow the words of a row
  keep: bool = False  # whether to return the residual; scales are then inline

  name: ClassVar[str]

  @property
  def planes(self) -> int:
    """The number of codes in a word, and of buckets in a tile."""
    return planes_per_word(self.bits)

  def unit(self, scale: jax.Array) -> jax.Array:
    """Returns the scale that travels, from the largest magnitude of a bucket."""
    return scale

  @abc.abstractmethod
  def factor(self, scale: jax.Array, divide: Divide = divide) -> jax.Array:
    """Returns the factor from values to fixed point."""

  @abc.abstractmethod
  def code(
    self, x: jax.Array, factor: jax.Array, lane: Lane, limit: jax.Array | None = None
  ) -> jax.Array:
    """Returns the codes of one plane, ``uint32`` like ``x``; ``limit`` clips it."""

  def pack(self, codes: Sequence[jax.Array]) -> jax.Array:
    """Packs one array of codes a plane into words: ``uint32[rows, B]``."""
    return pack_planes(codes, self.bits)

  def value(self, codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the values of codes; forms without it keep no residual."""
    raise NotImplementedError
