"""Measures a codec on a device of this program. Only the functions need JAX."""

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gradcomp._src.cost.cluster import CodecSpeed
from gradcomp._src.cost.rules import count

if TYPE_CHECKING:  # at run time this would import JAX
  from gradcomp._src.codecs.protocol import LeafCodec

_PAYLOADS = 4  # that are added at a time


def measured_speed(codec: "LeafCodec", elements: int, repeats: int) -> CodecSpeed:
  """Measures a codec; see :meth:`CodecSpeed.measure`."""
  count("elements", elements)
  count("repeats", repeats)
  width = 1 << (elements.bit_length() // 2)
  shape = (-(-elements // width), width)
  calls = [*_calls(codec, shape), *updates(codec, shape)]
  medians = (_median(call, repeats) / math.prod(shape) for call in calls)
  encode, decode, add, forget, keep = medians
  return CodecSpeed(
    encode=encode, decode=decode, add=add / _PAYLOADS, keep=max(0.0, keep - forget)
  )


def _median(call: Callable[[], Any], repeats: int) -> float:
  import jax

  jax.block_until_ready(call())
  seconds = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(call())
    seconds.append(time.perf_counter() - start)
  return statistics.median(seconds)


def _calls(codec: "LeafCodec", shape: tuple[int, int]) -> list[Callable[[], Any]]:
  """Returns functions that encode, decode, and add payloads, without arguments."""
  import jax
  import jax.numpy as jnp

  from gradcomp._src.codecs.rounds import encoded_alone
  from gradcomp._src.codecs.sums.records import Context, Leaf

  x = jax.random.normal(jax.random.key(0), shape)
  key = jnp.array([1, 2], jnp.uint32)
  leaf = Leaf(shape, addends=_PAYLOADS)
  bound: Any = codec.bind(leaf)
  memory = bound.init(leaf, key)
  context = Context(key, memory=memory, step=jnp.int32(0))

  def encode(x: jax.Array) -> Any:
    return encoded_alone(bound, x, context)

  def decode(payload: Any) -> jax.Array:
    return bound.decode(payload, like=x)

  def add(payload: Any, received: jax.Array) -> jax.Array:
    rows, agreed = payload.rows.shape[0], payload.agreed
    if agreed is not None:
      agreed = jnp.broadcast_to(agreed, (rows, agreed.shape[1]))
    return bound.sums.gathered(received, agreed, 1 / _PAYLOADS)(0, rows)

  encoded = jax.jit(encode)
  payload = encoded(x)
  received = jnp.stack([payload.rows] * _PAYLOADS)
  return [
    functools.partial(encoded, x),
    functools.partial(jax.jit(decode), payload),
    functools.partial(jax.jit(add), payload, received),
  ]


def updates(codec: "LeafCodec", shape: tuple[int, ...]) -> list[Callable[[], Any]]:
  """Returns updates that send nothing: without a residual, and with one.

  A residual is added to the gradient, and replaced by the unsent part, as in a training
  step.
  """
  import jax

  from gradcomp._src.core.feedback import ErrorFeedback
  from gradcomp._src.core.transform import compress

  gradient = jax.random.normal(jax.random.key(0), shape)

  def stepping(feedback: ErrorFeedback | None) -> Callable[[], Any]:
    tx = compress(codec, exchange="local", feedback=feedback)
    state = tx.init(gradient)
    step = jax.jit(lambda x, state: tx.update(x, state)[::-1], donate_argnums=1)

    def call() -> Any:
      nonlocal state
      state, mean = step(gradient, state)
      return mean

    return call

  return [stepping(None), stepping(ErrorFeedback())]
