"""``all_gather`` and ``psum_scatter``: each of the two is the other's gradient."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.checks import one_of
from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.mesh.types import mark_varying
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
  gather_encoded,
  reduce_encoded,
  split_parts,
)

To = Literal["varying", "invarying"]


def all_gather(  # noqa: PLR0913 - options of users, by keyword
  x: jax.Array,
  *,
  axis_name: AxisName,
  codec: LeafCodec,
  backward: Backward = "same",
  axis: int = 0,
  own: Own = "exact",
  to: To = "varying",
  key: jax.Array | None = None,
) -> jax.Array:
  r"""Concatenates the arrays of all workers, as ``lax.all_gather(tiled=True)``.

  .. math:: y = [Q(x_0), Q(x_1), \ldots, Q(x_{N-1})]

  Each worker sends the payload of its array to all others, ``(N-1) c`` bytes if c is
  the bytes of a payload. The gradient is :func:`psum_scatter` of the cotangent.
  Rounding counts as the identity.

  Args:
    x: ``[..., n, ...]``, floats, of one shape on all workers. A scalar counts as
      ``[1]``.
    axis_name: the axis of the enclosing map, or a tuple of axes.
    codec: the codec of the values.
    backward: the codec of the cotangents; ``"same"`` for that of the values, None for
      ``float32``.
    axis: the array axis along which the arrays are put, n elements each.
    own: ``"exact"`` leaves a worker's own array as it is. Then the results of the
      workers differ by the rounding, and so do gradients of replicated weights behind
      it. ``"coded"`` rounds it, too, so that all workers have the same bits.
    to: ``"varying"`` types the result as differing between workers, so that cotangents
      stay per worker until they are sent here. ``"invarying"``, with ``own="coded"``,
      types it as equal on all workers, and takes it that cotangents are equal, too: the
      backward pass sends nothing. Where types are checked and the workers go on with
      numbers of their own, JAX adds up their cotangents first, in full precision.
    key: a key that all workers share, if a codec draws random numbers. The backward
      pass folds in 1.

  Returns:
    ``[..., N n, ...]``, of the dtype of ``x``. Decoding is done in ``float32``.

  Raises:
    ValueError: the axis is not bound; the codec is sparse, or needs a memory or error
      feedback; a codec needs a key, and there is none; or another argument is not as
      above.
    TypeError: ``x`` has no float dtype, or ``codec`` is no codec.

  Example:
    >>> codec = gradcomp.codecs.EightBit(dtype="linear")
    >>> x = jnp.array([[127.0, 0.4], [1.0, 0.25]])
    >>> gather = lambda x: gradcomp.parallel.all_gather(
    ...   x, axis_name="model", codec=codec)
    >>> jax.vmap(gather, axis_name="model")(x)[1]  # its own numbers are as they were
    Array([127.  ,   0.  ,   1.  ,   0.25], dtype=float32)

  References:
    Dettmers, `8-Bit Approximations for Parallelism in Deep Learning
    <https://arxiv.org/abs/1511.04561>`_, 2016, section 2
  """
  own_wire = wire(axis_name, codec, backward, own)
  one_of("to", To, to)
  if to == "invarying" and own != "coded":
    raise ValueError(
      '`to` must be "varying" with own="exact", with which the results of workers '
      'differ, got "invarying"; choose own="coded".'
    )
  x, key = inputs(x, own_wire, key)
  x = jnp.atleast_1d(x)
  axis = checked_axis("axis", axis, x.ndim)
  send = lambda x: _gather_shards(own_wire, axis, to == "invarying", x, key)
  return over_real_parts(send, x)


def psum_scatter(  # noqa: PLR0913 - options of users, by keyword
  x: jax.Array,
  *,
  axis_name: AxisName,
  codec: LeafCodec,
  backward: Backward = "same",
  axis: int = 0,
  own: Own = "exact",
  key: jax.Array | None = None,
) -> jax.Array:
  r"""Adds the arrays of all workers; each worker gets one part of the sum.

  As in ``lax.psum_scatter(tiled=True)``, worker d gets

  .. math:: y_d = \sum_{i=0}^{N-1} Q(x_i[d])

  where :math:`x_i[d]` is part d of worker i's array. Each part is encoded by itself and
  sent to its owner, which decodes it and adds in ``float32``, in the order of workers.
  A worker sends ``(N-1)/N c`` bytes, where c is the bytes of the payloads of its parts.
  The gradient is :func:`all_gather` of the cotangent.

  Args:
    x: ``[..., N n, ...]``, floats, of one shape on all workers.
    axis_name: the axis of the enclosing map, or a tuple of axes.
    codec: the codec of the values.
    backward: the codec of the cotangents; ``"same"`` for that of the values, None for
      ``float32``.
    axis: the array axis that is split into N parts.
    own: ``"exact"`` adds a worker's own part as it is, ``"coded"`` rounds it, too.
    key: a key that all workers share, if a codec draws random numbers. The rounding
      errors of the workers then cancel in part. The backward pass folds in 1.

  Returns:
    ``[..., n, ...]``, of the dtype of ``x``.

  Raises:
    ValueError: as :func:`all_gather`; or N does not divide the axis.
    TypeError: as :func:`all_gather`.

  Example:
    >>> scatter = lambda x: gradcomp.parallel.psum_scatter(
    ...   x, axis_name="model", codec=gradcomp.codecs.Dense())
    >>> jax.vmap(scatter, axis_name="model")(jnp.array([[1.0, 2.0], [30.0, 40.0]]))
    Array([[31.],
           [42.]], dtype=float32)
  """
  own_wire = wire(axis_name, codec, backward, own)
  x, key = inputs(x, own_wire, key)
  axis = checked_axis("axis", axis, x.ndim)
  check_divides("axis", x.shape, axis, own_wire.size)
  return over_real_parts(lambda x: _scatter_sums(own_wire, axis, x, key), x)


def _gather_shards(
  wire: Wire, axis: int, equal: bool, x: jax.Array, key: jax.Array | None
) -> jax.Array:
  """Concatenates all workers' arrays; ``equal`` types the result as replicated."""

  def gather(x: jax.Array, key: jax.Array | None) -> jax.Array:
    result = concat(gather_encoded(x, wire, key), axis).astype(x.dtype)
    return result if equal else mark_varying(result, wire.axis_name)

  def back(cotangent: jax.Array, key: jax.Array | None) -> tuple[jax.Array, None]:
    if equal:  # and so is the cotangent, of all workers together
      parts = split_parts(cotangent, axis, wire.size)
      return parts[lax.axis_index(wire.axis_name)], None
    return _scatter_sums(wire.reversed, axis, cotangent, folded(key, 1)), None

  return transposed(gather, back, x, key)


def _scatter_sums(
  wire: Wire, axis: int, x: jax.Array, key: jax.Array | None
) -> jax.Array:
  """Returns this worker's part of the sum, ``[..., n, ...]`` of ``[..., N n, ...]``."""

  def scatter(x: jax.Array, key: jax.Array | None) -> jax.Array:
    return reduce_encoded(split_parts(x, axis, wire.size), wire, key).astype(x.dtype)

  def back(cotangent: jax.Array, key: jax.Array | None) -> tuple[jax.Array, None]:
    return _gather_shards(wire.reversed, axis, False, cotangent, folded(key, 1)), None

  return transposed(scatter, back, x, key)
