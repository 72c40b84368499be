"""``all_to_all``: exchanges the parts of an array between all pairs of workers."""

import functools

import jax

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.mesh.types import mark_varying
from gradcomp._src.parallel.options import (
  Backward,
  Own,
  Wire,
  check_divides,
  checked_axis,
  checked_floats,
  checked_key,
  folded,
  over_real_parts,
  wire,
)
from gradcomp._src.parallel.transport import concat, exchange_encoded, split_parts


def all_to_all(
  x: jax.Array,
  *,
  axis_name: AxisName,
  split_axis: int,
  concat_axis: int,
  codec: LeafCodec,
  backward: Backward = "same",
  own: Own = "exact",
  key: jax.Array | None = None,
) -> jax.Array:
  """Sends part d of an array to worker d, as ``lax.all_to_all(tiled=True)``.

  Each part is encoded by itself. A worker sends ``(N-1)/N c`` bytes, where c is the
  bytes of the payloads of its parts. The gradient sends cotangents back in the same
  way. Rounding counts as the identity.

  Args:
    x: an array of floats, of one shape on all workers.
    axis_name: the axis of the enclosing map, or a tuple of axes.
    split_axis: the array axis that is split into N parts.
    concat_axis: the array axis along which the parts from all workers are put.
    codec: the codec of the values.
    backward: the codec of the cotangents; ``"same"`` for that of the values, None for
      ``float32``.
    own: ``"exact"`` leaves the part that stays with its worker as it is, ``"coded"``
      rounds it, too.
    key: a key that all workers share, if a codec draws random numbers. The backward
      pass folds in 1.

  Returns:
    An array of the dtype of ``x``, in which ``split_axis`` is N times shorter and
    ``concat_axis`` N times longer.

  Raises:
    ValueError: the axis is not bound; N does not divide ``split_axis``; the codec is
      sparse, or needs a memory or error feedback; a codec needs a key, and there is
      none; or another argument is not as above.
    TypeError: ``x`` has no float dtype, or ``codec`` is no codec.

  Example:
    >>> codec = gradcomp.codecs.Dense()
    >>> swap = lambda x: gradcomp.parallel.all_to_all(
    ...   x, axis_name="expert", split_axis=0, concat_axis=0, codec=codec)
    >>> jax.vmap(swap, axis_name="expert")(jnp.array([[1.0, 2.0], [3.0, 4.0]]))
    Array([[1., 3.],
           [2., 4.]], dtype=float32)
  """
  own_wire = wire(axis_name, codec, backward, own)
  key = checked_key(key, own_wire.codec, own_wire.backward)
  x = checked_floats(x)
  cut_axis = checked_axis("split_axis", split_axis, x.ndim)
  along = checked_axis("concat_axis", concat_axis, x.ndim)
  check_divides("split_axis", x.shape, cut_axis, own_wire.size)
  x = mark_varying(x, axis_name)
  return over_real_parts(lambda x: _all_to_all(own_wire, cut_axis, along, x, key), x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _all_to_all(
  wire: Wire, cut_axis: int, along: int, x: jax.Array, key: jax.Array | None
) -> jax.Array:
  parts = exchange_encoded(split_parts(x, cut_axis, wire.size), wire, key)
  return concat(parts, along).astype(x.dtype)


def _all_to_all_forward(
  wire: Wire, cut_axis: int, along: int, x: jax.Array, key: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
  return _all_to_all(wire, cut_axis, along, x, key), key


def _all_to_all_backward(
  wire: Wire, cut_axis: int, along: int, key: jax.Array | None, cotangent: jax.Array
) -> tuple[jax.Array, None]:
  return _all_to_all(wire.reversed, along, cut_axis, cotangent, folded(key, 1)), None


_all_to_all.defvjp(_all_to_all_forward, _all_to_all_backward)
