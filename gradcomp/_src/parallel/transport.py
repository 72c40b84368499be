"""Transport of encoded arrays: lines of words, gathered and exchanged."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from gradcomp._src.codecs import protocol
from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.sums.records import Context, Payload
from gradcomp._src.codecs.sums.tiles import sum_in_order
from gradcomp._src.core.step import by_fallbacks, otherwise
from gradcomp._src.exchange import collectives
from gradcomp._src.exchange.lines import join, split
from gradcomp._src.floats.dtypes import fitted, narrowed
from gradcomp._src.kernels.common import dithers, threefry
from gradcomp._src.kernels.materialize import materialized
from gradcomp._src.mesh.types import mark_varying
from gradcomp._src.parallel import options
from gradcomp._src.parallel.options import Key, Wire


def to_lines(arrays: jax.Array, wire: Wire, key: Key) -> jax.Array:
  """Encodes ``[K, ...]`` arrays to ``uint32[K, M]``; ``key`` is ``uint32[2]``."""
  codec, worker = wire.codec, lax.axis_index(wire.axis_name)
  fold = jax.vmap(lambda i: options.folded(key, i))
  keys = fold(jnp.arange(len(arrays))) if codec.needs_key else None
  with jax.named_scope("gradcomp_encode"):
    payload = jax.vmap(lambda x, key: _encode(codec, x, key, worker))(arrays, keys)
  # Materialized, however few rows: XLA would compute them anew for every slice or
  # reshape, word by word: ten times slower where one scale serves an array.
  rows = materialized(lambda rows: rows, payload.rows)
  agreed = payload.agreed
  return join([rows] if agreed is None else [rows, _cast(agreed, jnp.uint32)])


def from_lines(lines: jax.Array, shape: tuple[int, ...], codec: Codec) -> jax.Array:
  """Decodes ``uint32[K, M]`` to arrays of a shape, ``float32[K, *shape]``."""
  like = jnp.zeros(shape, jnp.float32)  # only its shape and dtype count
  key, worker = (jax.ShapeDtypeStruct(x, jnp.uint32) for x in ((2,), ()))
  form = jax.eval_shape(functools.partial(_encode, codec), like, key, worker)
  with jax.named_scope("gradcomp_decode"):
    rows, *words = split(lines, [x.shape for x in form if x is not None])
    decode = jax.vmap(codec.decode_rows)
    if words:
      agreed = _cast(words[0], form.agreed.dtype)
      each = jax.vmap(lambda *payload: protocol.decoded(codec, Payload(*payload)))
      decode = lambda rows: each(rows, agreed)
    # Materialized row by row: XLA would compute the row of every element of the result,
    # and its place there, which takes longer than decoding.
    found = decode(rows) if codec.facts.plain else materialized(decode, rows)
    return jax.vmap(lambda own: protocol.from_tiles(own, like, codec))(found)


def _cast(x: jax.Array, dtype: DTypeLike) -> jax.Array:
  """Casts words from or to the bits of ``float32``, or the values of bytes."""
  bits = jnp.float32 in (x.dtype, dtype)
  return lax.bitcast_convert_type(x, dtype) if bits else x.astype(dtype)


def _encode(codec: Codec, x: jax.Array, key: Any, worker: jax.Array) -> Payload:
  """Encodes an array by a key that all workers share, ``uint32[2]``."""
  context = Context()
  if codec.needs_key:
    context = Context(threefry.fold_key(key, worker), dithers.dither(key, worker))
  return protocol.payload_of(codec, x.astype(jnp.float32), context)


def arrived(lines: jax.Array, wire: Wire, own: jax.Array) -> jax.Array:
  """Decodes parts, ``[K, ...]``, among them this worker's own, of ``own``."""
  arrays = from_lines(lines, own.shape[1:], wire.codec)
  if wire.own == "coded":
    return arrays
  return jnp.where(mine(wire, arrays), own.astype(jnp.float32), arrays)


def once_more(
  first: jax.Array, wire: Wire, send: Callable[[Wire], jax.Array]
) -> jax.Array:
  """Returns ``first``, or ``send`` by the codec's fallback, if a worker's has NaN."""
  again = lambda codec: (send(dataclasses.replace(wire, codec=codec)),)
  # Workers receive different parts.
  return otherwise((first,), again, wire.codec, wire.axis_name, alike=False)[0]


def gathered(lines: jax.Array, wire: Wire, own: jax.Array) -> jax.Array:
  """Decodes the lines of all workers' arrays like their own, ``[N, *own.shape]``."""
  send = lambda wire: arrived(gather_lines(own, wire, None), wire, own[None])
  return once_more(arrived(lines, wire, own[None]), wire, send)


def gather_lines(x: jax.Array, wire: Wire, key: Key) -> jax.Array:
  """Sends an array to all workers; returns all of them still encoded, ``[N, M]``."""
  line = to_lines(x[None], wire, key)[0]
  name = collectives.as_floats(x.size, wire.axis_name)
  return collectives.gather(line, wire.axis_name, name)


def joined(lines: jax.Array, wire: Wire, shard: jax.Array, axis: int) -> jax.Array:
  """Decodes shards that were gathered, and concatenates them along an axis."""
  whole = concat(gathered(lines, wire, shard), axis)
  # Typed as differing between workers, so that its gradient is each one's.
  return mark_varying(fitted(whole, shard.dtype), wire.axis_name)


def exchange_encoded(
  parts: jax.Array, wire: Wire, key: Key, *, stage: bool = False
) -> jax.Array:
  """Sends part d of ``[N, ...]`` to worker d; returns the parts from all, float32."""
  elements = None if stage else parts.size  # a later collective counts for both

  def send(wire: Wire) -> jax.Array:
    lines = to_lines(parts, wire, key)
    return arrived(collectives.scatter(lines, wire.axis_name, elements), wire, parts)

  return once_more(send(wire), wire, send)


def reduce_parts(
  x: jax.Array, residual: Any, wire: Wire, key: Key, axis: int
) -> tuple[jax.Array, Any]:
  """Returns a worker's part of the sum of ``[..., N n, ...]``, and a new residual."""
  sent = x.astype(jnp.float32)
  old = None if residual is None else residual.astype(jnp.float32)
  parts = split_parts(sent if old is None else sent + old, axis, wire.size)
  total = sum_in_order(lambda part: part, exchange_encoded(parts, wire, key))
  unsent = None if old is None else loss_of(parts, wire, key)
  own, new = own_part(total, unsent, old, x.dtype, wire, axis)
  return own, None if new is None else new.astype(residual.dtype)


def loss_of(parts: jax.Array, wire: Wire, key: Key) -> jax.Array:
  """Returns the rounding errors of sent parts, ``[K, ...]``; K is 1 for a gather."""
  # A repeat loses as much: what a first step lost that held NaN, it has sent.
  wire = dataclasses.replace(wire, codec=by_fallbacks(wire.codec))
  # Encoded as for sending: XLA sees that, and encodes once.
  return parts - arrived(to_lines(parts, wire, key), wire, parts)


def own_part(
  total: jax.Array, unsent: Any, old: Any, dtype: DTypeLike, wire: Wire, axis: int
) -> tuple[jax.Array, Any]:
  """Casts a worker's sum ``[...]``; its error joins the unsent parts, ``[N, ...]``."""
  if old is None:
    return fitted(total, dtype), None
  narrow, rest = narrowed(total, dtype)
  new = concat(unsent + jnp.where(mine(wire, unsent), rest, 0.0), axis)
  return narrow, jnp.where(jnp.isfinite(new), new, old)


def send_along(
  x: jax.Array, wire: Wire, key: Key, pairs: Sequence[tuple[int, int]]
) -> jax.Array:
  """Sends an array along pairs of workers, ``float32``; zeros where none comes."""
  name = collectives.as_floats(x.size, wire.axis_name)
  receivers = jnp.array([receiver for _, receiver in pairs], jnp.int32)
  receives = jnp.any(receivers == lax.axis_index(wire.axis_name))

  def send(wire: Wire) -> jax.Array:
    line = to_lines(x[None], wire, key)[0]
    came = collectives.permute(line, wire.axis_name, pairs, name)
    return jnp.where(receives, from_lines(came[None], x.shape, wire.codec)[0], 0.0)

  return once_more(send(wire), wire, send)


def split_parts(x: jax.Array, axis: int, count: int) -> jax.Array:
  """Splits an array into equal parts along an axis: ``[count, ...]``."""
  shape = (*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
  return jnp.moveaxis(x.reshape(shape), axis, 0)


def concat(parts: jax.Array, axis: int) -> jax.Array:
  """Concatenates parts ``[count, ...]`` along an axis; inverts :func:`split_parts`."""
  count, *shape = parts.shape
  shape[axis] *= count
  return jnp.moveaxis(parts, 0, axis).reshape(shape)


def mine(wire: Wire, arrays: jax.Array) -> jax.Array:
  """Masks the array of this worker: ``bool[N, 1, ...]``."""
  own = jnp.arange(arrays.shape[0]) == lax.axis_index(wire.axis_name)
  return own.reshape(-1, *[1] * (arrays.ndim - 1))
