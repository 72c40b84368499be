"""The rule of 8-bit types for a plane: a sign and a level of a table."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gradcomp._src.kernels.common import fixed_point
from gradcomp._src.kernels.common.fixed_point import Divide, Lane, divide
from gradcomp._src.kernels.common.piecewise_linear import Line, coordinate, to_units
from gradcomp._src.kernels.common.planes import floats, planes_per_word, unpack_planes
from gradcomp._src.kernels.gpu import dispatch
from gradcomp._src.kernels.gpu.tiles import Operand
from gradcomp._src.kernels.quantize import pallas, reference
from gradcomp._src.kernels.tpu import codes as tpu

_SIGN = 1 << 7
_LARGEST = np.finfo(np.float32).max
PLANES = planes_per_word(8)

encode_rows = dispatch.encoder(reference, pallas)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(reference.ScaledForm):
  """The options of 8-bit types."""

  bits: int = 8
  lines: tuple[Line, ...]  # between the levels, see common.piecewise_linear
  table: tuple[float, ...]  # the values of 128 magnitudes, exact in float32
  last: float = 0.0  # the value of the code of minus zero
  tops: tuple[int, int]  # the largest magnitude of a positive and of a negative code
  up: float = 1.0  # the value of a level of 1, in largest magnitudes

  name: ClassVar[str] = "eight_bit"

  def unit(self, scale: Array) -> Array:
    """Returns ``scale * up``, the value of a level of 1, at most the largest float."""
    large = scale * np.float32(self.up)
    return jnp.where(large > _LARGEST, _LARGEST, large)

  def factor(self, scale: Array, divide: Divide = divide) -> Array:
    """Returns :func:`to_units`."""
    return to_units(scale, divide)

  @functools.partial(jax.jit, static_argnums=0, inline=True)
  def code(self, x: Array, factor: Array, lane: Lane, limit: Operand = None) -> Array:
    """Returns a sign bit above seven bits of magnitude, but never minus zero."""
    del limit
    positive, negative = (jnp.uint32(top << fixed_point.FRACTION) for top in self.tops)
    same = self.tops[0] == self.tops[1]
    top = positive if same else jnp.where(x < 0, negative, positive)
    fixed = jnp.minimum(coordinate(jnp.abs(x) * factor, self.lines), top)
    magnitude = fixed_point.rounded(fixed, lane, x)
    negative = (x < 0) & (magnitude > 0)
    return jnp.where(negative, magnitude | jnp.uint32(_SIGN), magnitude)


def _value(codes: Array, scale: Array, level: Array, form: Form) -> Array:
  """Returns the values of codes, ``int32``, with the levels of their magnitudes."""
  level = jnp.where(codes == _SIGN, np.float32(form.last), level)
  sign = jnp.where(codes > _SIGN, jnp.uint32(1 << 31), jnp.uint32(0))
  return fixed_point.signed(level * scale, sign)


def decode_by_lookup(rows: Array, *, form: Form, interpret: Any = False) -> Array:
  """Decodes as :func:`decode_rows` does, by a kernel for TPUs."""
  flat = rows.reshape(-1, rows.shape[-1])
  row = tpu.Row(form.bits, form.bucket_size)
  if not row.fits(len(flat)):
    return reference_decode_rows(rows, form=form)
  table = np.array(form.table, np.float32)
  value = functools.partial(_value, form=form)
  found = tpu.decode(value, flat, row, table, interpret)
  return found.reshape(*rows.shape[:-1], *found.shape[1:])


def reference_decode_rows(rows: Array, *, form: Form) -> Array:
  """Decodes ``uint32[..., rows, words]`` to values, ``float32[..., rows, 4, B]``."""
  codes = unpack_planes(rows[..., : form.bucket_size], 8).astype(jnp.int32)
  level = jnp.asarray(form.table, jnp.float32)[codes & (_SIGN - 1)]
  scale = floats(rows[..., form.bucket_size :])[..., None]
  return _value(codes, scale, level, form)


decode_rows = dispatch.on_tpu(decode_by_lookup, mosaic=True)(reference_decode_rows)
