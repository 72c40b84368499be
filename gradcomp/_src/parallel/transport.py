"""Transport of encoded arrays between workers, without derivatives."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from gradcomp._src.codecs.sums.order import sum_in_order
from gradcomp._src.exchange.collectives import as_floats, gather, permute, scatter
from gradcomp._src.floats.dtypes import narrowed
from gradcomp._src.parallel.encode_lines import draws, from_lines, to_lines
from gradcomp._src.parallel.options import Wire


def gathered(
  x: jax.Array, wire: Wire, key: jax.Array | None, name: str | None = None
) -> jax.Array:
  """Sends an array to all workers; returns all of them, ``float32[N, *x.shape]``.

  ``key`` is ``uint32[2]``, or None. The collective's ``name`` has by default the number
  of floats.
  """
  worker = lax.axis_index(wire.axis_name)
  line = to_lines(x[None], wire.codec, draws(wire.codec, key, 1, worker))[0]
  name = as_floats(x.size, wire.axis_name) if name is None else name
  arrays = from_lines(gather(line, wire.axis_name, name), x.shape, wire.codec)
  if wire.own == "exact":
    arrays = jnp.where(mine(worker, arrays), x.astype(jnp.float32), arrays)
  return arrays


def exchanged(
  parts: jax.Array, wire: Wire, key: jax.Array | None, *, stage: bool = False
) -> jax.Array:
  """Sends part d of ``[N, ...]`` to worker d; returns the parts from all, ``float32``.

  ``key`` is ``uint32[2]``, or None. With ``stage`` a later collective completes it, and
  counts for both.
  """
  worker = lax.axis_index(wire.axis_name)
  lines = to_lines(parts, wire.codec, draws(wire.codec, key, wire.size, worker))
  received = scatter(lines, wire.axis_name, None if stage else parts.size)
  arrays = from_lines(received, parts.shape[1:], wire.codec)
  if wire.own == "exact":
    arrays = jnp.where(mine(worker, arrays), parts.astype(jnp.float32), arrays)
  return arrays


def reduced(
  parts: jax.Array, wire: Wire, key: jax.Array | None, *, stage: bool = False
) -> jax.Array:
  """Adds part d of all workers at worker d, in float32 and in the order of workers.

  The arguments are those of :func:`exchanged`; the sum is ``float32[...]``.
  """
  return sum_in_order(lambda part: part, exchanged(parts, wire, key, stage=stage))


def lost(parts: jax.Array, wire: Wire, key: jax.Array | None) -> jax.Array:
  """Returns the rounding errors of sent parts, ``[K, ...]``.

  The arguments are those of :func:`exchanged`, or an array that is gathered, as
  ``[1, ...]``.
  """
  # Encoded as for sending: XLA sees that, and encodes once.
  worker = lax.axis_index(wire.axis_name)
  lines = to_lines(parts, wire.codec, draws(wire.codec, key, parts.shape[0], worker))
  arrived = from_lines(lines, parts.shape[1:], wire.codec)
  if wire.own == "exact":
    arrived = jnp.where(mine(worker, arrived), parts, arrived)
  return parts - arrived


def narrowed_parts(
  result: jax.Array, unsent: jax.Array, dtype: DTypeLike, wire: Wire
) -> tuple[jax.Array, jax.Array]:
  """Casts the sum of a worker's own part, and adds the error to its unsent part.

  ``result`` is ``float32[...]``, and ``unsent`` the errors of all parts, ``[N, ...]``.
  """
  narrow, rest = narrowed(result, dtype)
  own = mine(lax.axis_index(wire.axis_name), unsent)
  return narrow, unsent + jnp.where(own, rest, 0.0)


def sent(
  x: jax.Array,
  wire: Wire,
  pairs: Sequence[tuple[int, int]],
  key: jax.Array | None,
) -> jax.Array:
  """Sends an array along pairs of workers, ``float32``; zeros where none comes."""
  worker = lax.axis_index(wire.axis_name)
  line = to_lines(x[None], wire.codec, draws(wire.codec, key, 1, worker))
  name = as_floats(x.size, wire.axis_name)
  arrived = permute(line[0], wire.axis_name, pairs, name)
  receivers = jnp.array([receiver for _, receiver in pairs], jnp.int32)
  value = from_lines(arrived[None], x.shape, wire.codec)[0]
  return jnp.where(jnp.any(receivers == worker), value, 0.0)


def cut(x: jax.Array, axis: int, count: int) -> jax.Array:
  """Splits an array into equal parts along an axis: ``[count, ...]``."""
  shape = (*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
  return jnp.moveaxis(x.reshape(shape), axis, 0)


def joined(parts: jax.Array, axis: int) -> jax.Array:
  """Concatenates parts ``[count, ...]`` along an axis: the inverse of :func:`cut`."""
  count, *shape = parts.shape
  shape[axis] *= count
  return jnp.moveaxis(parts, 0, axis).reshape(shape)


def mine(worker: jax.Array, arrays: jax.Array) -> jax.Array:
  """Masks the array of this worker: ``bool[N, 1, ...]``."""
  lines = jnp.arange(arrays.shape[0]) == worker
  return lines.reshape(-1, *[1] * (arrays.ndim - 1))
