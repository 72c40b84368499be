"""The options of collectives, and encoded arrays on their way between workers."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, Required, TypedDict, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from gradcomp._src import checks, public
from gradcomp._src.codecs import dense, policy, protocol
from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.sums.records import Context, Payload
from gradcomp._src.codecs.sums.tiles import sum_in_order
from gradcomp._src.core import border
from gradcomp._src.core.transform import by_fallbacks, otherwise
from gradcomp._src.exchange import collectives
from gradcomp._src.exchange.collectives import join, split
from gradcomp._src.floats.dtypes import fitted, narrowed
from gradcomp._src.kernels.common import dithers
from gradcomp._src.kernels.materialize import materialized
from gradcomp._src.mesh import axes, types

Own = Literal["exact", "coded"]
Backward = protocol.LeafCodec | Literal["same"] | None
Key = jax.Array | None
Function = TypeVar("Function", bound=Callable[..., Any])
Send = Callable[[jax.Array, "Wire", Key], jax.Array]


class SumOptions(TypedDict, total=False):
  """The options of sums: each part is rounded that a worker sends, in one direction."""

  axis_name: Required[axes.AxisName]
  codec: Required[protocol.LeafCodec]
  key: Key


class PairOptions(SumOptions, total=False):
  """The options of collectives in which all that workers have travels."""

  backward: Backward


class CollectiveOptions(PairOptions, total=False):
  """The options of collectives of a model's layers, by keyword.

  Attributes:
    axis_name: the axis of the enclosing map, or a tuple of axes. Required.
    codec: the codec of the values. Required.
    backward: the codec of the cotangents; ``"same"`` for that of the values, None for
      ``float32``. Default: ``"same"``.
    own: ``"exact"`` leaves a worker's own part unrounded, so that results differ
      between workers, and so do later gradients of replicated weights. ``"coded"``
      rounds it, too: all have the same bits. Default: ``"exact"``.
    key: a key that all workers share, another one for each call, if a codec draws
      random numbers. The backward pass folds in 1. Default: None.

  Raises:
    ValueError: the axis is not bound; the codec is sparse, or needs a memory or error
      feedback; a codec lacks a key; or another argument is not as above.
    TypeError: ``x`` has no float dtype, ``codec`` is no codec, or there is no such
      option.
  """

  own: Own


@dataclasses.dataclass(frozen=True)
class Wire:
  """The axes and codecs of a collective."""

  axis_name: axes.AxisName
  codec: Codec  # of values, in the forward pass
  backward: Codec  # of their cotangents
  own: Own  # "coded": a worker also encodes its own part, which is not sent
  size: int

  @property
  def reversed(self) -> "Wire":
    """The wire of the backward pass."""
    return dataclasses.replace(self, codec=self.backward, backward=self.codec)


def wire(
  *,
  axis_name: axes.AxisName,
  codec: protocol.LeafCodec,
  backward: Backward = "same",
  own: Own = "exact",
  key: Key = None,
) -> tuple[Wire, Key]:
  """Validates the options of a call; returns the words of the key, ``uint32[2]``."""
  size = axes.require_size(axis_name)
  checks.one_of("own", Own, own)
  forward = back = policy.stateless("codec", codec)
  if not (isinstance(backward, str) and backward == "same"):
    back = codec_of("backward", backward)
  return Wire(axis_name, forward, back, own, size), checked_key(key, forward, back)


def shard_wires(
  axis_name: axes.AxisName, params: Any, grads: Any, residual: Any
) -> tuple[Wire, Wire]:
  """Returns the wires of a weight that is gathered, and of its gradient."""
  size = axes.require_size(axis_name)
  forward = codec_of("params", params)
  back = codec_of("grads", grads, corrected=residual is not None)
  of_weight = Wire(axis_name, forward, back, "coded", size)
  return of_weight, dataclasses.replace(of_weight.reversed, own="exact")


def codec_of(name: str, codec: Any, *, corrected: bool | None = None) -> Codec:
  """Returns a codec that carries nothing from call to call; ``float32`` for None."""
  if codec is None:
    return dense.Dense()
  return policy.stateless(name, codec, corrected=corrected)


def collective(function: Function) -> Function:
  """Shows :class:`CollectiveOptions` in the help of a function of some of them."""
  return public.shows_options(function, wire, CollectiveOptions.__doc__ or "")


def opened(
  function: Callable[..., Any], x: Any, given: Any, **own: Any
) -> tuple[jax.Array, Wire, Key]:
  """Returns a function's array, typed as varying over the workers, and its options."""
  of_call, key = wire(**public.checked(function, given), **own)
  return types.mark_varying(checked_floats(x), of_call.axis_name), of_call, key


def checked_key(key: Key, *codecs: Any, each: str = "call") -> Key:
  """Returns ``uint32[2]``, or None if no codec needs one; ValueError if missing."""
  for codec in codecs:
    if codec.needs_key and key is not None:
      return dithers.key_words(key)
    if codec.needs_key:
      raise ValueError(
        f"`key` must be given for {codec}, which draws random numbers: pass a "
        "jax.random.key that all workers share, another one for each "
        f"{each}{getattr(codec, 'without_key', '')}."
      )
  return None


def folded(key: Key, number: jax.Array | int) -> Key:
  """Returns the key of a later stage; None without a key."""
  return None if key is None else dithers.fold_key(key, number)


def checked_floats(x: Any, name: str = "x", *, real: bool = False) -> jax.Array:
  """Returns an array of floats; TypeError for other numbers."""
  x = jnp.asarray(x)
  if not jnp.issubdtype(x.dtype, jnp.floating if real else jnp.inexact):
    kind = "real float" if real else "float or complex"
    raise TypeError(f"`{name}` must have a {kind} dtype, got {x.dtype}.")
  return x


def checked_axis(name: str, axis: Any, ndim: int) -> int:
  """Returns the number of an array axis, 0 or more; ValueError otherwise."""
  rule = f"an axis of an array with {ndim} axes"
  return checks.static_integer(name, rule, axis, least=-ndim, most=ndim - 1) % ndim


# The bits of a message have no derivative: JAX would take zeros for it in silence.
@border.raises_under_derivatives(
  "A collective of gradcomp.parallel must be differentiated once, got a derivative of "
  "its derivative, which encoded arrays do not have; use jax.lax's collectives there."
)
def differentiated_once(tree: Any) -> Any:
  """Returns the argument of a rule; raises TypeError if JAX differentiates it."""
  return tree


def transposed(
  forward: Callable[..., tuple[jax.Array, Any]],
  backward: Callable[[Any, jax.Array], tuple[Any, ...]],
  *given: Any,
) -> jax.Array:
  """Returns ``forward(*given)[0]``; ``backward(saved, cotangent)`` is its gradient."""
  # `saved` is what else forward returns. Both functions must close over no array.
  function = jax.custom_vjp(lambda *given: forward(*given)[0])
  function.defvjp(
    lambda *given: forward(*differentiated_once(given)),
    lambda saved, cotangent: backward(saved, differentiated_once(cotangent)),
  )
  return function(*given)


def paired(send: Send, back: Send, x: jax.Array, wire: Wire, key: Key) -> jax.Array:
  """Returns ``send(x, wire, key)`` in x's dtype; ``back`` is its gradient."""

  def forward(x: jax.Array, key: Key) -> tuple[jax.Array, Key]:
    return fitted(send(x, wire, key), x.dtype), key

  def pull(key: Key, cotangent: jax.Array) -> tuple[jax.Array, None]:
    return fitted(back(cotangent, wire.reversed, folded(key, 1)), cotangent.dtype), None

  return border.like_complex(transposed(forward, pull, border.pairs(x), key), x)


def to_lines(arrays: jax.Array, wire: Wire, key: Key) -> jax.Array:
  """Encodes ``[K, ...]`` arrays to ``uint32[K, M]``; ``key`` is ``uint32[2]``."""
  codec, worker = wire.codec, lax.axis_index(wire.axis_name)
  fold = jax.vmap(lambda i: folded(key, i))
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
    context = Context(dithers.fold_key(key, worker), dithers.dither(key, worker))
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
  return types.mark_varying(fitted(whole, shard.dtype), wire.axis_name)


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
