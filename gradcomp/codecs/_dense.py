"""Dense sends every element as it is, in 32 or 16 bits."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from gradcomp._checks import float_dtype
from gradcomp.codecs._codec import Payload, as_float32, decode_payload
from gradcomp.kernels import planes

_ROW_SIZE = 128  # words in a row: few, because small leaves fill rows badly


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense:
  r"""Sends all elements as floats, bitcast to words: the baseline.

  .. math:: Q(v_i) = \mathrm{cast}(v_i)

  16-bit floats travel as ``uint16`` bit patterns, two to a word, because XLA widens
  ``bfloat16`` collectives to ``float32`` on CPU: a bfloat16 ``psum`` saves nothing.

  A payload has 32 or 16 bits an element, in whole rows of 128 words. ``float32`` is
  exact. 16 bits are rounded to nearest even, which is biased: use error feedback. NaN
  and infinities stay what and where they are.

  ``encode`` rounds float64 to these. In an exchange ``Dense()`` need not encode: there
  float64 gradients are added as they are, see :func:`gradcomp.dense`.

  Attributes:
    dtype: ``float32``, ``bfloat16`` or ``float16``.

  Raises:
    ValueError: ``dtype`` is another one.
    TypeError: ``encode`` is given integers or complex numbers.

  Example:
    >>> codec = Dense(dtype=jnp.bfloat16)
    >>> x = jnp.array([1.0, 1.001])
    >>> codec.decode(codec.encode(x), like=x)
    Array([1., 1.], dtype=float32)
  """

  dtype: DTypeLike = jnp.float32

  needs_key: ClassVar[bool] = False
  shares_stats: ClassVar[bool] = False
  by_column: ClassVar[bool] = False
  fitted: ClassVar[bool] = False
  adds: ClassVar[bool] = False

  def __post_init__(self) -> None:
    object.__setattr__(self, "dtype", float_dtype("dtype", self.dtype))

  @property
  def unbiased(self) -> bool:
    return self._bits == 32

  @property
  def summable(self) -> bool:
    return self._bits == 32

  @property
  def tile_size(self) -> int:
    return _ROW_SIZE * planes.planes_per_word(self._bits)

  @property
  def row_words(self) -> int:
    return _ROW_SIZE

  @property
  def _bits(self) -> int:
    return 8 * np.dtype(self.dtype).itemsize

  def encode(
    self,
    x: jax.Array,
    *,
    key: jax.Array | None = None,
    stats: jax.Array | None = None,
  ) -> Payload:
    """Encodes an array: ``uint32[rows, 128]``."""
    del key, stats
    return Payload(self._encode(as_float32(x)))

  def decode(self, payload: Payload, *, like: jax.Array) -> jax.Array:
    """Decodes a payload to the shape and dtype of ``like``."""
    return decode_payload(payload, like, self)

  def encode_rows(
    self,
    tiles: jax.Array,
    *,
    key: jax.Array | None = None,
    stats: jax.Array | None = None,
  ) -> jax.Array:
    del key, stats
    return self._encode(tiles.reshape(-1))

  def decode_rows(self, rows: jax.Array) -> jax.Array:
    codes = planes.unpack_planes(rows, self._bits)
    if self._bits == 16:
      codes = codes.astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(codes, self.dtype).astype(jnp.float32)

  def _encode(self, flat: jax.Array) -> jax.Array:
    count = planes.planes_per_word(self._bits)
    parts = [
      planes.pack_planes([self._code(plane) for plane in segment.planes], self._bits)
      for segment in planes.tile_segments(flat, count, _ROW_SIZE)
    ]
    return jnp.concatenate([jnp.zeros((0, _ROW_SIZE), jnp.uint32), *parts])

  def _code(self, plane: jax.Array) -> jax.Array:
    unsigned = jnp.uint32 if self._bits == 32 else jnp.uint16
    code = jax.lax.bitcast_convert_type(plane.astype(self.dtype), unsigned)
    return code.astype(jnp.uint32)


def working_dtype(codec: Any, dtype: DTypeLike) -> np.dtype:
  """Returns the dtype that an exchange adds gradients of a dtype in.

  It is float32. But float64 stays what it is with ``Dense()``, which shall lose
  nothing.

  Example:
    >>> working_dtype(Dense(), jnp.float16), working_dtype(Dense(), jnp.float64)
    (dtype('float32'), dtype('float64'))
  """
  wide = dtype == jnp.float64 and codec == Dense()
  return np.dtype(np.float64 if wide else np.float32)
