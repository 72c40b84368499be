"""Sums over workers, at the entry and at the end of a sharded layer."""

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.exchange.collectives import Workers, final_stage
from gradcomp._src.floats.dtypes import fitted
from gradcomp._src.mesh.axes import AxisName, axis_names
from gradcomp._src.mesh.types import mark_varying, varying_axes
from gradcomp._src.parallel import options
from gradcomp._src.parallel.options import Key, Wire, folded
from gradcomp._src.parallel.transport import gather_encoded, reduce_encoded


def psum(
  x: jax.Array, *, axis_name: AxisName, codec: LeafCodec, key: jax.Array | None = None
) -> jax.Array:
  r"""Returns the sum over the workers, with the same bits on all of them.

  Each worker owns an Nth of the elements. It adds these in ``float32``, in the order of
  workers, and sends the encoded sum to all:

  .. math:: y = Q(\sum_i Q(x_i))

  A worker sends ``2 (N-1)/N c`` bytes, where c is the bytes of a payload. The result is
  typed as equal on all workers, and so is its cotangent, which each worker takes as the
  cotangent of its own ``x``: the backward pass sends nothing. It is the gradient that
  ``jax.shard_map`` gives ``lax.psum`` where it checks types. Use it at the end of a
  layer that is sharded by its inputs, and :func:`sum_gradients` at its entry.

  Args:
    x: an array of any shape, floats, of one shape on all workers.
    axis_name: the axis of the enclosing map, or a tuple of axes.
    codec: the codec of the addends and of the sum.
    key: a key that all workers share, if the codec draws random numbers.

  Returns:
    An array like ``x``.

  Raises:
    ValueError, TypeError: as :func:`all_gather`.

  Example:
    >>> total = lambda x: gradcomp.parallel.psum(
    ...   x, axis_name="model", codec=gradcomp.codecs.Dense())
    >>> jax.jit(jax.vmap(total, axis_name="model"))(jnp.array([1.0, 2.0]))
    Array([3., 3.], dtype=float32)

  References:
    Grubic et al., `Synchronous Multi-GPU Deep Learning with Low-Precision
    Communication <https://doi.org/10.3929/ethz-b-000319485>`_, 2018, section 2.4.1
  """
  own_wire = options.wire(axis_name, codec, own="coded")
  x, key = options.inputs(x, own_wire, key)

  def add(x: jax.Array, key: Key) -> jax.Array:
    return fitted(total(x, own_wire, key), x.dtype)

  back = lambda cotangent, _: (mark_varying(cotangent, axis_name), None)
  send = lambda x: options.transposed(add, back, x, key)
  return options.over_real_parts(send, x)


def sum_gradients(
  x: jax.Array, *, axis_name: AxisName, codec: LeafCodec, key: jax.Array | None = None
) -> jax.Array:
  """Returns ``x``; its cotangent is the :func:`psum` of the workers' cotangents.

  It is the entry of a layer that is sharded by its outputs.

  Args:
    x: an array of any shape, floats, equal on all workers.
    axis_name, codec: as for :func:`psum`; cotangents and their sum are encoded.
    key: as for :func:`psum`. The backward pass folds in 1.

  Returns:
    The same values, typed as differing between workers, where types are checked.

  Raises:
    ValueError, TypeError: as :func:`all_gather`.

  Example:
    >>> def loss(x, w):
    ...   x = gradcomp.parallel.sum_gradients(
    ...     x, axis_name="model", codec=gradcomp.codecs.Dense())
    ...   return x * w
    >>> w = jnp.array([3.0, 5.0])
    >>> jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0), axis_name="model"))(1.0, w)
    Array([8., 8.], dtype=float32)
  """
  own_wire = options.wire(axis_name, codec, own="coded")
  key = options.checked_key(key, own_wire.codec)
  x = options.checked_floats(x)
  varying = tuple(name for name in axis_names(axis_name) if name in varying_axes(x))

  def keep(x: jax.Array, _: Key) -> jax.Array:
    return mark_varying(x, axis_name)

  def back(cotangent: jax.Array, key: Key) -> tuple[jax.Array, None]:
    summed = total(cotangent, own_wire, folded(key, 1))
    summed = fitted(summed, cotangent.dtype)
    # The cotangent has the type of x.
    return mark_varying(summed, varying) if varying else summed, None

  send = lambda x: options.transposed(keep, back, x, key)
  return options.over_real_parts(send, x)


def total(x: jax.Array, wire: Wire, key: Key) -> jax.Array:
  """Returns the sum of all workers' arrays, equal on all of them, ``float32``."""
  own = by_owners(x, wire, key)[1]
  name = final_stage(x.size, Workers(wire.axis_name, wire.size, 1.0))
  every = gather_encoded(own, wire, owner_key(wire, key), name)
  return every.reshape(-1)[: x.size].reshape(x.shape)


def by_owners(x: jax.Array, wire: Wire, key: Key) -> tuple[jax.Array, jax.Array]:
  """Returns padded parts ``[N, share]`` of an array, and the sum of the own ones."""
  flat = x.reshape(-1)
  parts = jnp.pad(flat, (0, -flat.size % wire.size)).reshape(wire.size, -1)
  return parts, reduce_encoded(parts, wire, key, stage=True)


def owner_key(wire: Wire, key: Key) -> Key:
  """Returns an owner's key for rounding its sum, different on each worker."""
  return folded(folded(key, 2), lax.axis_index(wire.axis_name))
