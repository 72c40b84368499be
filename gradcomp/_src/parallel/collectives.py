"""Collectives of a model's layers, each JAX's own, with a codec for each direction."""

import functools
from collections.abc import Sequence
from typing import Literal, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src import checks
from gradcomp._src.codecs.sums import tiles
from gradcomp._src.exchange import collectives
from gradcomp._src.mesh import types
from gradcomp._src.parallel import wires
from gradcomp._src.parallel.wires import CollectiveOptions, Key, Wire

To = Literal["varying", "invarying"]


@wires.collective
def all_gather(
  x: jax.Array, *, axis: int = 0, to: To = "varying", **given: Unpack[CollectiveOptions]
) -> jax.Array:
  r"""Returns the arrays of all workers side by side, as ``lax.all_gather(tiled=True)``.

  .. math:: y = [Q(x_0), Q(x_1), \ldots, Q(x_{N-1})]

  A worker sends ``(N-1) c`` bytes, with c bytes a payload. The gradient is
  :func:`psum_scatter` of the cotangent; rounding counts as the identity. The result is
  ``[..., N n, ...]``, of the dtype of ``x``.

  Args:
    x: ``[..., n, ...]``, floats, of one shape on all workers. A scalar counts as
      ``[1]``.
    axis: the array axis along which the arrays are put, n elements each.
    to: ``"varying"`` types the result as differing between workers, so that cotangents
      are sent here. ``"invarying"``, with ``own="coded"``, types it and its cotangent
      as equal on all workers: the backward pass sends nothing, and JAX adds up
      cotangents that differ, in full precision.

  Example:
    >>> codec = gradcomp.codecs.EightBit(dtype="linear")
    >>> x = jnp.array([[127.0, 0.4], [1.0, 0.25]])
    >>> gather = lambda x: gradcomp.parallel.all_gather(
    ...   x, axis_name="model", codec=codec)
    >>> both = jax.jit(jax.vmap(gather, axis_name="model"))(x)
    >>> both[1]  # its own numbers are as they were
    Array([127.  ,   0.  ,   1.  ,   0.25], dtype=float32)

  References:
    Dettmers, `2016 <https://arxiv.org/abs/1511.04561>`_, section 2
  """
  x, wire, key = wires.opened(all_gather, x, given)
  checks.one_of("to", To, to)
  if to == "invarying" and wire.own != "coded":
    raise ValueError(
      '`to` must be "varying" with own="exact", whose results differ between workers, '
      'got "invarying"; choose own="coded".'
    )
  x = jnp.atleast_1d(x)
  axis = wires.checked_axis("axis", axis, x.ndim)

  def part(cotangent: jax.Array, wire: Wire, _: Key) -> jax.Array:
    # It is equal on all workers, and that of all of them together.
    parts = wires.split_parts(cotangent, axis, wire.size)
    return parts[lax.axis_index(wire.axis_name)]

  gather, scatter = _along(axis, to)
  return wires.paired(gather, scatter if to == "varying" else part, x, wire, key)


@wires.collective
def psum_scatter(
  x: jax.Array, *, axis: int = 0, **given: Unpack[CollectiveOptions]
) -> jax.Array:
  r"""Returns this worker's part of the sum, as ``lax.psum_scatter(tiled=True)``.

  .. math:: y_d = \sum_{i=0}^{N-1} Q(x_i[d])

  Each part :math:`x_i[d]` is encoded by itself. Worker d adds in ``float32``, in the
  order of workers, and gets ``[..., n, ...]``, of the dtype of ``x``. A worker sends
  ``(N-1)/N c`` bytes, with c bytes for the payloads of all parts. The gradient is
  :func:`all_gather` of the cotangent. With a key, the rounding errors of the workers
  cancel in part.

  Args:
    x: ``[..., N n, ...]``, floats, of one shape on all workers.
    axis: the array axis that is split into N equal parts.

  Example:
    >>> scatter = lambda x: gradcomp.parallel.psum_scatter(
    ...   x, axis_name="model", codec=gradcomp.codecs.Dense())
    >>> x = jnp.array([[1.0, 2.0], [30.0, 40.0]])
    >>> jax.jit(jax.vmap(scatter, axis_name="model"))(x).tolist()
    [[31.0], [42.0]]
  """
  x, wire, key = wires.opened(psum_scatter, x, given)
  gather, scatter = _along(_cut_axis("axis", axis, x, wire.size))
  return wires.paired(scatter, gather, x, wire, key)


@wires.collective
def all_to_all(
  x: jax.Array, *, split_axis: int, concat_axis: int, **given: Unpack[CollectiveOptions]
) -> jax.Array:
  """Returns part d of all workers' arrays at worker d, ``lax.all_to_all(tiled=True)``.

  Each part is encoded by itself. A worker sends ``(N-1)/N c`` bytes, with c bytes for
  the payloads of all parts. The gradient sends cotangents back in the same way;
  rounding counts as the identity. In the result ``split_axis`` is N times shorter and
  ``concat_axis`` N times longer.

  Args:
    x: floats, of one shape on all workers.
    split_axis: the array axis that is split into N equal parts.
    concat_axis: the array axis along which the parts from all workers are put.

  Example:
    >>> swap = lambda x: gradcomp.parallel.all_to_all(
    ...   x, axis_name="expert", split_axis=0, concat_axis=0,
    ...   codec=gradcomp.codecs.Dense())
    >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    >>> jax.jit(jax.vmap(swap, axis_name="expert"))(x).tolist()
    [[1.0, 3.0], [2.0, 4.0]]
  """
  x, wire, key = wires.opened(all_to_all, x, given)
  cut = _cut_axis("split_axis", split_axis, x, wire.size)
  along = wires.checked_axis("concat_axis", concat_axis, x.ndim)

  def sent(x: jax.Array, wire: Wire, key: Key, cut: int, along: int) -> jax.Array:
    parts = wires.split_parts(x, cut, wire.size)
    return wires.concat(wires.exchange_encoded(parts, wire, key), along)

  there = functools.partial(sent, cut=cut, along=along)
  back = functools.partial(sent, cut=along, along=cut)
  return wires.paired(there, back, x, wire, key)


@wires.collective
def ppermute(
  x: jax.Array, *, perm: Sequence[tuple[int, int]], **given: Unpack[wires.PairOptions]
) -> jax.Array:
  """Returns the array of this worker's sender, as ``lax.ppermute``; zeros without one.

  A sender sends the bytes of its payload. The gradient sends cotangents back along the
  same pairs; rounding counts as the identity. Under ``jax.vmap`` JAX needs a pair for
  every worker.

  Args:
    x: floats, of one shape on all workers.
    perm: pairs ``(sender, receiver)`` of workers' numbers; a worker sends and receives
      at most once.

  Example:
    >>> send = lambda x: gradcomp.parallel.ppermute(
    ...   x, axis_name="stage", perm=[(0, 1), (1, 0)], codec=gradcomp.codecs.Dense())
    >>> jax.jit(jax.vmap(send, axis_name="stage"))(jnp.array([1.0, 2.0]))
    Array([2., 1.], dtype=float32)
  """
  x, wire, key = wires.opened(ppermute, x, given)
  pairs = tuple((int(sender), int(receiver)) for sender, receiver in perm)
  for side in zip(*pairs, strict=True):
    numbers = set(side)
    if len(numbers) < len(side) or not numbers.issubset(range(wire.size)):
      raise ValueError(
        f"`perm` must have pairs (sender, receiver) of the workers 0 to "
        f"{wire.size - 1}, each at most once on a side, got {list(pairs)}."
      )
  send = lambda pairs: functools.partial(wires.send_along, pairs=pairs)
  return wires.paired(send(pairs), send([pair[::-1] for pair in pairs]), x, wire, key)


@wires.collective
def psum(x: jax.Array, **given: Unpack[wires.SumOptions]) -> jax.Array:
  r"""Returns the sum over the workers, with the same bits on all of them.

  .. math:: y = Q(\sum_i Q(x_i))

  Each worker adds an Nth of the elements in ``float32``, in the order of workers, and
  sends the encoded sum to all: ``2 (N-1)/N c`` bytes, with c bytes a payload. The
  result and its cotangent are typed as equal on all workers: the backward pass sends
  nothing. Use it at the end of a layer that is sharded by its inputs, and
  :func:`sum_gradients` at its entry.

  Args:
    x: an array of any shape, floats, of one shape on all workers.

  Example:
    >>> total = lambda x: gradcomp.parallel.psum(
    ...   x, axis_name="model", codec=gradcomp.codecs.Dense())
    >>> jax.jit(jax.vmap(total, axis_name="model"))(jnp.array([1.0, 2.0]))
    Array([3., 3.], dtype=float32)

  References:
    Grubic et al., `2018 <https://doi.org/10.3929/ethz-b-000319485>`_, section 2.4.1
  """
  x, wire, key = wires.opened(psum, x, given, own="coded")
  total = lambda *given: total_by_owners(*given)[0]
  back = lambda cotangent, *_: types.mark_varying(cotangent, wire.axis_name)
  return wires.paired(total, back, x, wire, key)


@wires.collective
def sum_gradients(x: jax.Array, **given: Unpack[wires.SumOptions]) -> jax.Array:
  """Returns ``x``; its cotangent is the :func:`psum` of the workers' cotangents.

  Use it at the entry of a layer that is sharded by its outputs. ``codec`` encodes the
  cotangents and their sum. Where types are checked, the result is typed as varying.

  Args:
    x: an array of any shape, floats, equal on all workers.

  Example:
    >>> def loss(x, w):
    ...   return w * gradcomp.parallel.sum_gradients(
    ...     x, axis_name="model", codec=gradcomp.codecs.Dense())
    >>> w = jnp.array([3.0, 5.0])
    >>> jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0), axis_name="model"))(1.0, w)
    Array([8., 8.], dtype=float32)
  """
  _, wire, key = wires.opened(sum_gradients, x, given, own="coded")
  x = jnp.asarray(x)
  varying = tuple(sorted(types.varying_axes(x)))

  def back(cotangent: jax.Array, wire: Wire, key: Key) -> jax.Array:
    # The cotangent has the type of x.
    return types.mark_varying(total_by_owners(cotangent, wire, key)[0], varying)

  keep = lambda x, wire, _: types.mark_varying(x, wire.axis_name)
  return wires.paired(keep, back, x, wire, key)


def total_by_owners(x: jax.Array, wire: Wire, key: Key) -> tuple[jax.Array, ...]:
  """Returns the sum, equal on all workers, own parts, ``[N, share]``, and own sum."""
  parts = jnp.pad(x.reshape(-1), (0, -x.size % wire.size)).reshape(wire.size, -1)
  received = wires.exchange_encoded(parts, wire, key, stage=True)
  own = tiles.sum_in_order(lambda part: part, received)
  workers = collectives.Workers(wire.axis_name, wire.size, 1.0)
  name = collectives.final_stage(x.size, workers)
  line = wires.to_lines(own[None], wire, owner_key(wire, key))[0]
  lines = collectives.gather(line, wire.axis_name, name)
  every = wires.gathered(lines, wire, own)
  return every.reshape(-1)[: x.size].reshape(x.shape), parts, own


def owner_key(wire: Wire, key: Key) -> Key:
  """Returns an owner's key for rounding its sum, different on each worker."""
  return wires.folded(wires.folded(key, 2), lax.axis_index(wire.axis_name))


def _along(axis: int, to: To = "varying") -> tuple[wires.Send, wires.Send]:
  """Returns the gather of all workers' arrays along an axis, and the sum of parts."""

  def gather(x: jax.Array, wire: Wire, key: Key) -> jax.Array:
    lines = wires.gather_lines(x, wire, key)
    whole = wires.concat(wires.gathered(lines, wire, x), axis)
    return types.mark_varying(whole, wire.axis_name) if to == "varying" else whole

  def scatter(x: jax.Array, wire: Wire, key: Key) -> jax.Array:
    return wires.reduce_parts(x, None, wire, key, axis)[0]

  return gather, scatter


def _cut_axis(name: str, axis: int, x: jax.Array, workers: int) -> int:
  """Returns an axis that is split; ValueError unless the workers get equal parts."""
  axis = wires.checked_axis(name, axis, x.ndim)
  if x.shape[axis] % workers:
    raise ValueError(
      f"`{name}` must have a length that the {workers} workers divide, got {axis} of "
      f"the shape {x.shape}; pad it with zeros."
    )
  return axis
