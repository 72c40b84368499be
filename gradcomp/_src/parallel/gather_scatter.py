"""``all_gather`` and ``psum_scatter``: each of the two is the other's gradient."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.checks import one_of
from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.floats.dtypes import fitted
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.mesh.types import mark_varying
from gradcomp._src.parallel import options, transport

To = Literal["varying", "invarying"]


def all_gather(  # noqa: PLR0913 - options of users, by keyword
  x: jax.Array,
  *,
  axis_name: AxisName,
  codec: LeafCodec,
  backward: options.Backward = "same",
  axis: int = 0,
  own: options.Own = "exact",
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
      types it and its cotangent as equal on all workers: the backward pass sends
      nothing. Where the workers go on with numbers of their own, JAX adds up their
      cotangents first, in full precision.
    key: a key that all workers share, if a codec draws random numbers. The backward
      pass folds in 1.

  Returns:
    ``[..., N n, ...]``, of the dtype of ``x``.

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
    >>> both = jax.jit(jax.vmap(gather, axis_name="model"))(x)
    >>> both[1]  # its own numbers are as they were
    Array([127.  ,   0.  ,   1.  ,   0.25], dtype=float32)

  References:
    Dettmers, `8-Bit Approximations for Parallelism in Deep Learning
    <https://arxiv.org/abs/1511.04561>`_, 2016, section 2
  """
  wire = options.wire(axis_name, codec, backward, own)
  one_of("to", To, to)
  if to == "invarying" and own != "coded":
    raise ValueError(
      '`to` must be "varying" with own="exact", with which the results of workers '
      'differ, got "invarying"; choose own="coded".'
    )
  x, key = options.inputs(x, wire, key)
  x = jnp.atleast_1d(x)
  axis = options.checked_axis("axis", axis, x.ndim)
  if to == "varying":
    send, back = (functools.partial(way, axis) for way in (_gathered, _scattered))
    return options.paired(send, back, wire, x, key)

  def gather(x: jax.Array, key: options.Key) -> jax.Array:
    whole = transport.concat(transport.gather_encoded(x, wire, key), axis)
    return fitted(whole, x.dtype)

  def part(cotangent: jax.Array, _: options.Key) -> tuple[jax.Array, None]:
    # It is equal on all workers, and that of all of them together.
    parts = transport.split_parts(cotangent, axis, wire.size)
    return parts[lax.axis_index(wire.axis_name)], None

  run = lambda x: options.transposed(gather, part, x, key)
  return options.over_real_parts(run, x)


def psum_scatter(  # noqa: PLR0913 - options of users, by keyword
  x: jax.Array,
  *,
  axis_name: AxisName,
  codec: LeafCodec,
  backward: options.Backward = "same",
  axis: int = 0,
  own: options.Own = "exact",
  key: jax.Array | None = None,
) -> jax.Array:
  r"""Adds the arrays of all workers; each worker gets one part of the sum.

  As in ``lax.psum_scatter(tiled=True)``, worker d gets

  .. math:: y_d = \sum_{i=0}^{N-1} Q(x_i[d])

  where :math:`x_i[d]` is part d of worker i's array, which is encoded by itself. Its
  owner adds in ``float32``, in the order of workers. A worker sends ``(N-1)/N c``
  bytes, where c is the bytes of the payloads of its parts. The gradient is
  :func:`all_gather` of the cotangent.

  Args:
    x: ``[..., N n, ...]``, floats, of one shape on all workers.
    axis_name, codec, backward: as for :func:`all_gather`.
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
    >>> x = jnp.array([[1.0, 2.0], [30.0, 40.0]])
    >>> jax.jit(jax.vmap(scatter, axis_name="model"))(x)
    Array([[31.],
           [42.]], dtype=float32)
  """
  wire = options.wire(axis_name, codec, backward, own)
  x, key = options.inputs(x, wire, key)
  axis = options.checked_axis("axis", axis, x.ndim)
  options.check_divides("axis", x.shape, axis, wire.size)
  send, back = (functools.partial(way, axis) for way in (_scattered, _gathered))
  return options.paired(send, back, wire, x, key)


def _gathered(
  axis: int, x: jax.Array, wire: options.Wire, key: options.Key
) -> jax.Array:
  """Concatenates all workers' arrays along an axis, typed as varying over them."""
  whole = transport.concat(transport.gather_encoded(x, wire, key), axis)
  return mark_varying(fitted(whole, x.dtype), wire.axis_name)


def _scattered(
  axis: int, x: jax.Array, wire: options.Wire, key: options.Key
) -> jax.Array:
  """Returns this worker's part of the sum, ``[..., n, ...]`` of ``[..., N n, ...]``."""
  parts = transport.split_parts(x, axis, wire.size)
  return fitted(transport.reduce_encoded(parts, wire, key), x.dtype)
