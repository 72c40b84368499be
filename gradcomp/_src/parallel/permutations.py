"""``all_to_all`` and ``ppermute``: arrays between pairs of workers, and back."""

from collections.abc import Sequence

import jax

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.parallel.options import (
  Backward,
  Own,
  Wire,
  check_divides,
  checked_axis,
  folded,
  inputs,
  over_real_parts,
  transposed,
  wire,
)
from gradcomp._src.parallel.transport import (
  concat,
  exchange_encoded,
  send_along,
  split_parts,
)

Pairs = tuple[tuple[int, int], ...]


def all_to_all(  # noqa: PLR0913 - options of users, by keyword
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
  x, key = inputs(x, own_wire, key)
  cut_axis = checked_axis("split_axis", split_axis, x.ndim)
  along = checked_axis("concat_axis", concat_axis, x.ndim)
  check_divides("split_axis", x.shape, cut_axis, own_wire.size)
  return over_real_parts(lambda x: _all_to_all(own_wire, cut_axis, along, x, key), x)


def ppermute(
  x: jax.Array,
  *,
  axis_name: AxisName,
  perm: Sequence[tuple[int, int]],
  codec: LeafCodec,
  backward: Backward = "same",
  key: jax.Array | None = None,
) -> jax.Array:
  """Sends arrays along pairs of workers, as ``lax.ppermute``.

  A worker that sends has ``c`` bytes to send, the bytes of its payload. The gradient
  sends cotangents back along the same pairs. Rounding counts as the identity. Under
  ``jax.vmap`` JAX needs a pair for every worker.

  Args:
    x: an array of any shape, floats, of one shape on all workers.
    axis_name: the axis of the enclosing map, or a tuple of axes.
    perm: pairs ``(sender, receiver)`` of workers' numbers, in which no worker sends or
      receives twice.
    codec: the codec of the values.
    backward: the codec of the cotangents; ``"same"`` for that of the values, None for
      ``float32``.
    key: a key that all workers share, if a codec draws random numbers. The backward
      pass folds in 1.

  Returns:
    An array like ``x``: the sender's, rounded; zeros without a sender.

  Raises:
    ValueError: the axis is not bound; the codec is sparse, or needs a memory or error
      feedback; a codec needs a key, and there is none; or ``perm`` has other pairs.
    TypeError: ``x`` has no float dtype, or ``codec`` is no codec.

  Example:
    >>> send = lambda x: gradcomp.parallel.ppermute(
    ...   x, axis_name="stage", perm=[(0, 1), (1, 0)], codec=gradcomp.codecs.Dense())
    >>> jax.vmap(send, axis_name="stage")(jnp.array([1.0, 2.0]))
    Array([2., 1.], dtype=float32)
  """
  own_wire = wire(axis_name, codec, backward)
  x, key = inputs(x, own_wire, key)
  pairs = _checked_pairs(perm, own_wire.size)
  return over_real_parts(lambda x: _ppermute(own_wire, pairs, x, key), x)


def _all_to_all(
  wire: Wire, cut_axis: int, along: int, x: jax.Array, key: jax.Array | None
) -> jax.Array:
  def send(x: jax.Array, key: jax.Array | None) -> jax.Array:
    parts = exchange_encoded(split_parts(x, cut_axis, wire.size), wire, key)
    return concat(parts, along).astype(x.dtype)

  def back(cotangent: jax.Array, key: jax.Array | None) -> tuple[jax.Array, None]:
    return _all_to_all(wire.reversed, along, cut_axis, cotangent, folded(key, 1)), None

  return transposed(send, back, x, key)


def _ppermute(
  wire: Wire, pairs: Pairs, x: jax.Array, key: jax.Array | None
) -> jax.Array:
  def send(x: jax.Array, key: jax.Array | None) -> jax.Array:
    return send_along(x, wire, pairs, key).astype(x.dtype)

  def back(cotangent: jax.Array, key: jax.Array | None) -> tuple[jax.Array, None]:
    way = tuple((receiver, sender) for sender, receiver in pairs)
    return _ppermute(wire.reversed, way, cotangent, folded(key, 1)), None

  return transposed(send, back, x, key)


def _checked_pairs(perm: Sequence[tuple[int, int]], workers: int) -> Pairs:
  pairs = tuple((int(sender), int(receiver)) for sender, receiver in perm)
  for side in zip(*pairs, strict=True):
    numbers = set(side)
    if len(numbers) < len(side) or not numbers.issubset(range(workers)):
      raise ValueError(
        f"`perm` must have pairs (sender, receiver) of the workers 0 to {workers - 1}, "
        f"none of whom sends or receives twice, got {list(pairs)}."
      )
  return pairs
