"""Collectives of a model's layers, each JAX's own, with a codec for each direction."""

import functools
from collections.abc import Sequence
from typing import Literal, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src import checks
from gradcomp._src.exchange import collectives
from gradcomp._src.mesh import axes, types
from gradcomp._src.parallel import options, transport
from gradcomp._src.parallel.options import CollectiveOptions, Key, Wire

To = Literal["varying", "invarying"]


@options.collective
def all_gather(
  x: jax.Array,
  *,
  axis: int = 0,
  to: To = "varying",
  **given: Unpack[CollectiveOptions],
) -> jax.Array:
  r"""Concatenates the arrays of all workers, as ``lax.all_gather(tiled=True)``.

  .. math:: y = [Q(x_0), Q(x_1), \ldots, Q(x_{N-1})]

  Each worker sends the payload of its array to all others, ``(N-1) c`` bytes if c is
  the bytes of a payload. The gradient is :func:`psum_scatter` of the cotangent.
  Rounding counts as the identity.

  Args:
    x: ``[..., n, ...]``, floats, of one shape on all workers. A scalar counts as
      ``[1]``.
    axis: the array axis along which the arrays are put, n elements each.
    to: ``"varying"`` types the result as differing between workers, so that cotangents
      stay per worker until they are sent here. ``"invarying"``, with ``own="coded"``,
      types it and its cotangent as equal on all workers: the backward pass sends
      nothing. Where the workers go on with numbers of their own, JAX adds up their
      cotangents first, in full precision.

  Returns:
    ``[..., N n, ...]``, of the dtype of ``x``.

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
  x, wire, key = options.opened(all_gather, x, given)
  checks.one_of("to", To, to)
  if to == "invarying" and wire.own != "coded":
    raise ValueError(
      '`to` must be "varying" with own="exact", with which the results of workers '
      'differ, got "invarying"; choose own="coded".'
    )
  x = jnp.atleast_1d(x)
  axis = options.checked_axis("axis", axis, x.ndim)

  def part(cotangent: jax.Array, wire: Wire, _: Key) -> jax.Array:
    # It is equal on all workers, and that of all of them together.
    parts = transport.split_parts(cotangent, axis, wire.size)
    return parts[lax.axis_index(wire.axis_name)]

  gather = functools.partial(_gathered, axis=axis, to=to)
  back = functools.partial(_scattered, axis=axis) if to == "varying" else part
  return options.paired(gather, back, x, wire, key)


@options.collective
def psum_scatter(
  x: jax.Array, *, axis: int = 0, **given: Unpack[CollectiveOptions]
) -> jax.Array:
  r"""Adds the arrays of all workers; each worker gets one part of the sum.

  As in ``lax.psum_scatter(tiled=True)``, worker d gets

  .. math:: y_d = \sum_{i=0}^{N-1} Q(x_i[d])

  where :math:`x_i[d]` is part d of worker i's array, which is encoded by itself. Its
  owner adds in ``float32``, in the order of workers. A worker sends ``(N-1)/N c``
  bytes, where c is the bytes of the payloads of its parts. The gradient is
  :func:`all_gather` of the cotangent. With a key, the rounding errors of the workers
  cancel in part.

  Args:
    x: ``[..., N n, ...]``, floats, of one shape on all workers.
    axis: the array axis that is split into N parts, whose length N divides.

  Returns:
    ``[..., n, ...]``, of the dtype of ``x``.

  Example:
    >>> scatter = lambda x: gradcomp.parallel.psum_scatter(
    ...   x, axis_name="model", codec=gradcomp.codecs.Dense())
    >>> x = jnp.array([[1.0, 2.0], [30.0, 40.0]])
    >>> jax.jit(jax.vmap(scatter, axis_name="model"))(x)
    Array([[31.],
           [42.]], dtype=float32)
  """
  x, wire, key = options.opened(psum_scatter, x, given)
  axis = _cut_axis("axis", axis, x, wire.size)
  scatter, gather = (functools.partial(f, axis=axis) for f in (_scattered, _gathered))
  return options.paired(scatter, gather, x, wire, key)


@options.collective
def all_to_all(
  x: jax.Array,
  *,
  split_axis: int,
  concat_axis: int,
  **given: Unpack[CollectiveOptions],
) -> jax.Array:
  """Sends part d of an array to worker d, as ``lax.all_to_all(tiled=True)``.

  Each part is encoded by itself. A worker sends ``(N-1)/N c`` bytes, where c is the
  bytes of the payloads of its parts. The gradient sends cotangents back in the same
  way. Rounding counts as the identity.

  Args:
    x: floats, of one shape on all workers.
    split_axis: the array axis that is split into N parts, whose length N divides.
    concat_axis: the array axis along which the parts from all workers are put.

  Returns:
    An array of the dtype of ``x``, in which ``split_axis`` is N times shorter and
    ``concat_axis`` N times longer.

  Example:
    >>> codec = gradcomp.codecs.Dense()
    >>> swap = lambda x: gradcomp.parallel.all_to_all(
    ...   x, axis_name="expert", split_axis=0, concat_axis=0, codec=codec)
    >>> jax.jit(jax.vmap(swap, axis_name="expert"))(jnp.array([[1.0, 2.0], [3.0, 4.0]]))
    Array([[1., 3.],
           [2., 4.]], dtype=float32)
  """
  x, wire, key = options.opened(all_to_all, x, given)
  cut = _cut_axis("split_axis", split_axis, x, wire.size)
  along = options.checked_axis("concat_axis", concat_axis, x.ndim)
  there = functools.partial(_sent, cut=cut, along=along)
  back = functools.partial(_sent, cut=along, along=cut)
  return options.paired(there, back, x, wire, key)


@options.collective
def ppermute(
  x: jax.Array,
  *,
  perm: Sequence[tuple[int, int]],
  **given: Unpack[options.PairOptions],
) -> jax.Array:
  """Sends arrays along pairs of workers, as ``lax.ppermute``.

  A worker that sends has ``c`` bytes to send, the bytes of its payload. The gradient
  sends cotangents back along the same pairs. Rounding counts as the identity. Under
  ``jax.vmap`` JAX needs a pair for every worker.

  Args:
    x: floats, of one shape on all workers.
    perm: pairs ``(sender, receiver)`` of workers' numbers, in which no worker sends or
      receives twice.

  Returns:
    An array like ``x``: the sender's, rounded; zeros without a sender.

  Example:
    >>> send = lambda x: gradcomp.parallel.ppermute(
    ...   x, axis_name="stage", perm=[(0, 1), (1, 0)], codec=gradcomp.codecs.Dense())
    >>> jax.jit(jax.vmap(send, axis_name="stage"))(jnp.array([1.0, 2.0]))
    Array([2., 1.], dtype=float32)
  """
  x, wire, key = options.opened(ppermute, x, given)
  pairs = tuple((int(sender), int(receiver)) for sender, receiver in perm)
  for side in zip(*pairs, strict=True):
    numbers = set(side)
    if len(numbers) < len(side) or not numbers.issubset(range(wire.size)):
      raise ValueError(
        f"`perm` must have pairs (sender, receiver) of the workers 0 to "
        f"{wire.size - 1}, none of whom sends or receives twice, got {list(pairs)}."
      )
  back = tuple((receiver, sender) for sender, receiver in pairs)
  along, against = (
    functools.partial(transport.send_along, pairs=to) for to in (pairs, back)
  )
  return options.paired(along, against, x, wire, key)


@options.collective
def psum(x: jax.Array, **given: Unpack[options.SumOptions]) -> jax.Array:
  r"""Returns the sum over the workers, with the same bits on all of them.

  Each worker owns an Nth of the elements. It adds these in ``float32``, in the order of
  workers, and sends the encoded sum to all:

  .. math:: y = Q(\sum_i Q(x_i))

  A worker sends ``2 (N-1)/N c`` bytes, where c is the bytes of a payload. The result is
  typed as equal on all workers, and so is its cotangent, which is that of each ``x``,
  as ``lax.psum`` has it where ``jax.shard_map`` checks types: the backward pass sends
  nothing. Use it at the end of a layer that is sharded by its inputs, and
  :func:`sum_gradients` at its entry.

  Args:
    x: an array of any shape, floats, of one shape on all workers.

  Returns:
    An array like ``x``.

  Example:
    >>> total = lambda x: gradcomp.parallel.psum(
    ...   x, axis_name="model", codec=gradcomp.codecs.Dense())
    >>> jax.jit(jax.vmap(total, axis_name="model"))(jnp.array([1.0, 2.0]))
    Array([3., 3.], dtype=float32)

  References:
    Grubic et al., `Synchronous Multi-GPU Deep Learning with Low-Precision
    Communication <https://doi.org/10.3929/ethz-b-000319485>`_, 2018, section 2.4.1
  """
  x, wire, key = options.opened(psum, x, given, own="coded")
  back = lambda cotangent, *_: types.mark_varying(cotangent, wire.axis_name)
  return options.paired(total, back, x, wire, key)


@options.collective
def sum_gradients(x: jax.Array, **given: Unpack[options.SumOptions]) -> jax.Array:
  """Returns ``x``; its cotangent is the :func:`psum` of the workers' cotangents.

  It is the entry of a layer that is sharded by its outputs. The codec is that of the
  cotangents and of their sum.

  Args:
    x: an array of any shape, floats, equal on all workers.

  Returns:
    The same values, typed as differing between workers, where types are checked.

  Example:
    >>> def loss(x, w):
    ...   x = gradcomp.parallel.sum_gradients(
    ...     x, axis_name="model", codec=gradcomp.codecs.Dense())
    ...   return x * w
    >>> w = jnp.array([3.0, 5.0])
    >>> jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0), axis_name="model"))(1.0, w)
    Array([8., 8.], dtype=float32)
  """
  _, wire, key = options.opened(sum_gradients, x, given, own="coded")
  x = jnp.asarray(x)
  names = axes.axis_names(wire.axis_name)
  varying = tuple(name for name in names if name in types.varying_axes(x))

  def back(cotangent: jax.Array, wire: Wire, key: Key) -> jax.Array:
    summed = total(cotangent, wire, key)
    # The cotangent has the type of x.
    return types.mark_varying(summed, varying) if varying else summed

  keep = lambda x, wire, _: types.mark_varying(x, wire.axis_name)
  return options.paired(keep, back, x, wire, key)


def total(x: jax.Array, wire: Wire, key: Key) -> jax.Array:
  """Returns the sum of all workers' arrays, equal on all of them, ``float32``."""
  return total_by_owners(x, wire, key)[0]


def total_by_owners(x: jax.Array, wire: Wire, key: Key) -> tuple[jax.Array, ...]:
  """Returns this sum, the array's padded parts, ``[N, share]``, and the own sum."""
  flat = x.reshape(-1)
  parts = jnp.pad(flat, (0, -flat.size % wire.size)).reshape(wire.size, -1)
  own = transport.reduce_encoded(parts, wire, key, stage=True)
  workers = collectives.Workers(wire.axis_name, wire.size, 1.0)
  name = collectives.final_stage(x.size, workers)
  every = transport.gather_encoded(own, wire, owner_key(wire, key), name)
  return every.reshape(-1)[: x.size].reshape(x.shape), parts, own


def owner_key(wire: Wire, key: Key) -> Key:
  """Returns an owner's key for rounding its sum, different on each worker."""
  return options.folded(options.folded(key, 2), lax.axis_index(wire.axis_name))


def _gathered(
  x: jax.Array, wire: Wire, key: Key, *, axis: int, to: To = "varying"
) -> jax.Array:
  """Concatenates all workers' arrays along an axis."""
  whole = transport.concat(transport.gather_encoded(x, wire, key), axis)
  return types.mark_varying(whole, wire.axis_name) if to == "varying" else whole


def _scattered(x: jax.Array, wire: Wire, key: Key, *, axis: int) -> jax.Array:
  """Returns this worker's part of the sum, ``[..., n, ...]`` of ``[..., N n, ...]``."""
  return transport.reduce_parts(x, None, wire, key, axis)[0]


def _sent(x: jax.Array, wire: Wire, key: Key, *, cut: int, along: int) -> jax.Array:
  """Sends part d to worker d; concatenates the parts from all workers."""
  parts = transport.split_parts(x, cut, wire.size)
  return transport.concat(transport.exchange_encoded(parts, wire, key), along)


def _cut_axis(name: str, axis: int, x: jax.Array, workers: int) -> int:
  """Returns an axis that is split; ValueError unless the workers get equal parts."""
  axis = options.checked_axis(name, axis, x.ndim)
  if x.shape[axis] % workers:
    raise ValueError(
      f"`{name}` must be one whose length the {workers} workers divide, got {axis} of "
      f"the shape {x.shape}; pad it with zeros."
    )
  return axis
