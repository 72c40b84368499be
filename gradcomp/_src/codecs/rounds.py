"""Rounds: averages leaves, or other arrays in their place, one after the other."""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array

from gradcomp._src.codecs.sums.records import Context, Leaf, Payload
from gradcomp._src.codecs.tiles import decode_payload
from gradcomp._src.floats.dtypes import fitted

if TYPE_CHECKING:
  from gradcomp._src.codecs.protocol import Codec

Arrays = dict[int, Array]  # by the numbers of leaves


def in_rounds(
  codecs: Sequence["Codec"], leaves: Sequence[Array], shared: Sequence[Any]
) -> Generator[Arrays, Mapping[int, Array], tuple[Arrays, list[Any]]]:
  """Averages all leaves, round by round, until the codec with the most rounds is done.

  Yields the arrays of a round, by leaf, and gets the means of all workers. Returns the
  means of leaves that are averaged by other arrays, and all shared codec states.
  """
  # Leaves with fewer rounds take part in the last ones, so that most travel together.
  alike: dict[Codec, list[int]] = {}
  counts: dict[Codec, int] = {}
  plain = dict(enumerate(leaves))
  for i, (codec, leaf) in enumerate(zip(codecs, leaves, strict=True)):
    rounds = codec.rounds(leaf.shape)
    if not rounds[-1].of_leaf:
      alike.setdefault(codec, []).append(i)
      counts[codec] = len(rounds)
      del plain[i]
  last = max(counts.values(), default=1)
  means: Arrays = {}
  memory = list(shared)
  of = lambda values, own: [values[i] for i in own]
  talks = {x: x.in_rounds(of(leaves, y), of(shared, y)) for x, y in alike.items()}
  received: Mapping[int, Array] = {}
  for number in range(last + 1):
    arrays = dict(plain) if number == last - 1 else {}
    for codec, own in alike.items():
      first = last - counts[codec]
      if number < first:
        continue
      try:
        talk = talks[codec]
        sent = next(talk) if number == first else talk.send(of(received, own))
      except StopIteration as end:
        found, remembered = end.value
        means |= zip(own, found, strict=True)
        for i, kept in zip(own, remembered, strict=True):
          memory[i] = kept
      else:
        arrays |= zip(own, sent, strict=True)
    if number < last:
      received = yield arrays
  return means, memory


def encoded_alone(codec: "Codec", x: Array, context: Context) -> Payload:
  """Encodes a leaf as a single worker does; rows of rounds follow one another."""
  rounds = codec.rounds(x.shape)
  if rounds[-1].of_leaf:
    return payload_of(rounds[-1].codec, x, context)
  rows = []

  def send(codec: "Codec", array: Array) -> Array:
    payload = payload_of(codec, array, context)
    rows.append(payload.rows)
    return decode_payload(payload, array, codec)

  _mean(codec, x, context, send)
  return Payload(jnp.concatenate(rows))


def decoded_alone(codec: "Codec", payload: Payload, like: Array) -> Array:
  """Decodes the payload of :func:`encoded_alone` to the shape and dtype of ``like``."""
  rounds = codec.rounds(like.shape)
  if rounds[-1].of_leaf:
    return decode_payload(payload, like, rounds[-1].codec)
  start = 0

  def receive(codec: "Codec", array: Array) -> Array:
    nonlocal start
    first, start = start, start + -(-array.size // codec.tile_size)
    return decode_payload(Payload(payload.rows[first:start]), array, codec)

  mean = _mean(codec, jnp.zeros(like.shape), Context(), receive)
  return fitted(mean, like.dtype)


def payload_of(codec: "Codec", x: Array, context: Context) -> Payload:
  """Encodes a leaf by its bound codec of one round, with statistics of its own."""
  agreed = codec.agree(x) if context.agreed is None else context.agreed
  encoded = codec.encode_leaf(x, context._replace(agreed=agreed), keep=False)
  return Payload(encoded.rows, agreed)


def _mean(
  codec: "Codec", x: Array, context: Context, average: Callable[["Codec", Array], Array]
) -> Array:
  """Returns the mean of a leaf; ``average`` averages the arrays of its rounds."""
  memory = context.memory or codec.init(Leaf(x.shape), jnp.zeros(2, jnp.uint32))
  talk = codec.in_rounds([x], [memory.shared])
  arrays = next(talk)
  for part in codec.rounds(x.shape):
    try:
      arrays = talk.send([average(part.codec, arrays[0])])
    except StopIteration as end:
      arrays, _ = end.value
  return arrays[0]
