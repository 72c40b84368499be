"""QSGD's rule for a plane: rounds to equal levels under a scale, and decodes them.

See docs/inside/wire-format.md for the rule.
"""

import dataclasses
import functools
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.kernels.common.fixed_point import (
  FRACTION,
  Divide,
  Lane,
  divide,
  rounded,
  rounded_with_sign,
  sign_bit,
  signed,
  top_multiplier,
)
from gradcomp._src.kernels.common.planes import unpack_planes
from gradcomp._src.kernels.gpu import dispatch
from gradcomp._src.kernels.quantize import mosaic, pallas, reference
from gradcomp._src.kernels.quantize.form import ScaledForm

Levels = Literal["sign_magnitude", "uniform"]

encode_rows = dispatch.encoder(reference, pallas, mosaic)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(ScaledForm):
  """The options of QSGD."""

  levels: Levels = "sign_magnitude"

  name: ClassVar[str] = "qsgd"

  @property
  def intervals(self) -> int:
    """``s``: equal intervals on [0, norm], or on [-norm, norm] for ``uniform``.

    Example:
      >>> [Form(bits=4, bucket_size=32, levels=x).intervals for x in Levels.__args__]
      [7, 15]
    """
    signs = self.levels == "sign_magnitude"
    return 2 ** (self.bits - 1) - 1 if signs else 2**self.bits - 1

  @property
  def top(self) -> int:
    """The largest distance from zero in fixed point: ``s``, or ``s / 2``.

    ``uniform`` has intervals on both sides of zero.
    """
    return self.intervals << (FRACTION - (self.levels == "uniform"))

  def factor(self, scale: jax.Array, divide: Divide = divide) -> jax.Array:
    """Returns :func:`top_multiplier`."""
    return top_multiplier(self.top, scale, divide)

  @functools.partial(jax.jit, static_argnums=0, inline=True)
  def code(
    self, x: jax.Array, factor: jax.Array, lane: Lane, limit: jax.Array | None = None
  ) -> jax.Array:
    """Returns the codes of one plane; the clamp keeps a NaN's inside its own bits."""
    del limit
    top = jnp.uint32(self.top)
    fixed = (jnp.abs(x) * factor).astype(jnp.int32).astype(jnp.uint32)
    fixed = jnp.minimum(fixed, top)
    if self.levels == "sign_magnitude":
      return rounded_with_sign(fixed, lane, x, self.bits)
    return rounded(jnp.where(x < 0, top - fixed, top + fixed), lane)

  @functools.partial(jax.jit, static_argnums=0, inline=True)
  def value(self, codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the values of codes; the top level has the scale itself."""
    s = self.intervals
    if self.levels == "sign_magnitude":
      magnitude = (codes & jnp.uint32(s)).astype(jnp.int32)
      sign = (codes >> (self.bits - 1)) << 31
    else:
      code = 2 * codes.astype(jnp.int32) - s
      magnitude = jnp.abs(code)
      sign = sign_bit(code)
    step = scale * np.float32(1 / s)
    length = jnp.where(magnitude == s, scale, magnitude.astype(jnp.float32) * step)
    return signed(length, sign)


def signed_codes(rows: jax.Array, form: Form) -> jax.Array:
  """Unpacks the codes of rows to integers from ``-s`` to ``s``, which add up.

  ``uint32[..., rows, words]`` become ``int32[..., rows, P, B]``.
  """
  s = form.intervals
  codes = unpack_planes(rows[..., : form.bucket_size], form.bits).astype(jnp.int32)
  if form.levels == "uniform":
    return 2 * codes - s
  magnitude = codes & s
  return jnp.where(codes > s, -magnitude, magnitude)


def from_signed_codes(codes: jax.Array, scale: jax.Array, s: int) -> jax.Array:
  """Returns the values of sums of codes; whole multiples of the scale are exact.

  Sums are ``int32[..., rows, P, B]``, scales ``float32[rows, P]`` or ``[rows, 1]``, and
  ``s`` is the code of the scale.
  """
  magnitude = jnp.abs(codes)
  scale = scale[..., None]
  inverse = np.float32(1 / s)
  # The number of whole scales, without an integer division. It is off by less than a
  # half as long as there are fewer than 2**21 of them, that is workers.
  as_float = magnitude.astype(jnp.float32)
  whole = jnp.round(as_float * inverse)
  is_whole = whole.astype(jnp.int32) * s == magnitude
  value = jnp.where(is_whole, whole * scale, as_float * (scale * inverse))
  return signed(value, sign_bit(codes))
