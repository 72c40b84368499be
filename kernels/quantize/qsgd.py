"""QSGD's rule for a plane: rounds to equal levels under a scale, and decodes them."""

import dataclasses
import functools
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.common import fixed_point
from gradcomp._src.kernels.common.fixed_point import Lane
from gradcomp._src.kernels.common.planes import unpack_planes
from gradcomp._src.kernels.gpu.tiles import Operand
from gradcomp._src.kernels.quantize import reference

Levels = Literal["sign_magnitude", "uniform"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(reference.ScaledForm):
  """The options of QSGD."""

  levels: Levels = "sign_magnitude"

  name: ClassVar[str] = "qsgd"

  @property
  def intervals(self) -> int:
    """``s``: equal intervals on [0, norm], or on [-norm, norm] for ``uniform``."""
    signs = self.levels == "sign_magnitude"
    return 2 ** (self.bits - 1) - 1 if signs else 2**self.bits - 1

  @property
  def top(self) -> int:
    """The largest distance from zero in fixed point: ``s``; ``s / 2`` on two sides."""
    return self.intervals << (fixed_point.FRACTION - (self.levels == "uniform"))

  @functools.partial(jax.jit, static_argnums=0, inline=True)
  def code(self, x: Array, factor: Array, lane: Lane, limit: Operand = None) -> Array:
    """Returns the codes of one plane; the clamp keeps a NaN's inside its own bits."""
    del limit
    top = np.uint32(self.top)
    fixed = (lax.abs(x) * factor).astype(jnp.int32).astype(jnp.uint32)
    fixed = lax.min(fixed, top)
    if self.levels == "sign_magnitude":
      return fixed_point.rounded_with_sign(fixed, lane, x, self.bits)
    return fixed_point.rounded(jnp.where(x < 0, top - fixed, top + fixed), lane)

  @functools.partial(jax.jit, static_argnums=0, inline=True)
  def value(self, codes: Array, scale: Array) -> Array:
    """Returns the values of codes; the top level has the scale itself."""
    s = self.intervals
    if self.levels == "sign_magnitude":
      magnitude = lax.bitwise_and(codes, np.uint32(s)).astype(jnp.int32)
      sign = (codes >> np.uint32(self.bits - 1)) << np.uint32(31)
    else:
      code = 2 * codes.astype(jnp.int32) - s
      magnitude = jnp.abs(code)
      sign = fixed_point.sign_bit(code)
    step = lax.mul(scale, np.float32(1 / s))
    is_top = lax.eq(magnitude, np.int32(s))
    length = jnp.where(is_top, scale, magnitude.astype(jnp.float32) * step)
    return fixed_point.signed(length, sign)


def signed_codes(rows: Array, form: Form) -> Array:
  """Unpacks rows to integers from ``-s`` to ``s``: ``int32[..., rows, P, B]``."""
  s = form.intervals
  codes = unpack_planes(rows[..., : form.bucket_size], form.bits).astype(jnp.int32)
  if form.levels == "uniform":
    return 2 * codes - s
  magnitude = codes & s
  return jnp.where(codes > s, -magnitude, magnitude)


def from_signed_codes(codes: Array, scale: Array, s: int) -> Array:
  """Returns the values of sums of codes; whole multiples of the scale are exact."""
  magnitude = jnp.abs(codes)
  scale = scale[..., None]
  inverse = np.float32(1 / s)
  # The number of whole scales, without an integer division. It is off by less than a
  # half as long as there are fewer than 2**21 of them, that is workers.
  as_float = magnitude.astype(jnp.float32)
  whole = jnp.round(as_float * inverse)
  is_whole = whole.astype(jnp.int32) * s == magnitude
  value = jnp.where(is_whole, whole * scale, as_float * (scale * inverse))
  return fixed_point.signed(value, fixed_point.sign_bit(codes))
