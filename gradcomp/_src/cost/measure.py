"""Measures links between devices, and a codec on a device of this program."""

import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gradcomp._src.checkpoint.placement import put
from gradcomp._src.codecs.protocol import LeafCodec, payload_of
from gradcomp._src.codecs.sums.records import Context, Leaf
from gradcomp._src.core.feedback import ErrorFeedback
from gradcomp._src.core.transform import compress
from gradcomp._src.cost import rules
from gradcomp._src.exchange import collectives
from gradcomp._src.exchange.lines import form
from gradcomp._src.mesh.axes import AxisName, axis_names

_PAYLOADS = 4  # that are added at a time


class _Case(NamedTuple):
  """A collective to time."""

  kind: str  # its name in the factors of a link
  workers: int  # of its group, or of its longest cycle
  rounds: int  # the messages that follow one another
  lines: int  # of a worker's words: one to each worker, or all to all
  sent: Fraction  # the bytes that a worker sends a byte of its input
  run: Callable[[Any], Any]  # from float32[lines, M] or float32[lines, K, 128]


def measured_link(
  mesh: Mesh, axis_name: AxisName | None, sizes: Sequence[int], times: int, talks: bool
) -> dict[str, Any]:
  """Returns the fields of a link; see :meth:`Link.measure`."""
  # All processes run the same collectives in the same order, whatever they measure.
  names = axis_names(mesh.axis_names if axis_name is None else axis_name)
  workers = math.prod(mesh.shape[name] for name in names)
  if workers < 2:
    raise ValueError(f"`mesh` must have 2 workers or more over {names}, got {workers}.")
  if not isinstance(sizes, Sequence):
    raise ValueError(f"`sizes` must be several numbers of bytes, got {sizes!r}.")
  sizes = sorted({rules.count("sizes", size) for size in sizes})
  if len(sizes) < 2:
    raise ValueError(f"`sizes` must hold two different ones or more, got {sizes}.")
  rules.count("repeats", times)
  over = names if len(names) > 1 else names[0]
  lines = []
  for case, points in _times(mesh, over, workers, sizes, times):
    start, byte = line(points)
    lines.append((case, start, byte))
    if talks and jax.process_index() == 0:
      found = f"{1e6 * start:,.0f} us and {8e-9 / byte:,.3f} Gbit/s"
      said = f"{case.kind}, {case.workers} workers: {found}"
      print(said, file=sys.stderr, flush=True)
  fastest = min(byte for _, _, byte in lines)
  return {
    "latency": statistics.median(start / case.rounds for case, start, _ in lines),
    "bytes_per_second": 1 / fastest,
    "factor": {(case.kind, case.workers): byte / fastest for case, _, byte in lines},
  }


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
  """Fits ``seconds = start + byte * bytes`` to pairs of bytes and seconds."""
  # It minimizes the squares of relative errors: short messages count like long ones.
  x, y = np.asarray(points).T
  start, byte = np.linalg.lstsq(np.stack([1 / y, x / y], 1), np.ones(len(y)))[0]
  # Noise can hide the latency, or the rate. Then all is put down to the bytes.
  if start < 0 or byte <= 0:
    start, byte = 0.0, sum(x / y) / sum((x / y) ** 2)
  return float(start), float(byte)


def _cases(over: AxisName, n: int) -> Iterator[_Case]:
  """Yields the collectives that exchanges call, over n workers."""
  whole, share = Fraction(1), Fraction(n - 1, n)
  gather = lambda x: collectives.gather(x[0], over, "measured")
  yield _Case("all_gather", n, n - 1, 1, whole * (n - 1), gather)
  yield _Case("all_to_all", n, n - 1, n, share, lambda x: collectives.scatter(x, over))
  add = lambda x: collectives.psum(x, over)
  yield _Case("all_reduce", n, 2 * (n - 1), 1, 2 * share, add)
  yield _Case("ppermute", n, 1, 1, whole, lambda x: collectives.pass_on(x[0], over, n))
  if n > 2 and n % 2 == 0 and isinstance(over, str):
    pairs = [(i, i + 1) for i in range(0, n, 2)]
    swap = lambda x: collectives.scatter_within(x, over, pairs)
    yield _Case("ppermute", 2, 1, 2, whole / 2, swap)


def _times(
  mesh: Mesh, over: AxisName, workers: int, sizes: Sequence[int], repeats: int
) -> Iterator[tuple[_Case, list[tuple[float, float]]]]:
  """Yields of each collective, for each size, the bytes sent and the median seconds."""
  split = P(axis_names(over))
  given: Any = {"mesh": mesh, "in_specs": split, "check_vma": False}

  def spread(value: float, count: int, *rest: int) -> jax.Array:
    whole = np.broadcast_to(np.float32(value), (workers * count, *rest))
    return put(whole, NamedSharding(mesh, split))

  largest = lambda x: collectives.largest(x, over)
  slowest = jax.jit(jax.shard_map(largest, out_specs=P(), **given))
  meet = lambda seconds: float(slowest(spread(seconds, 1))[0])
  for case in _cases(over, workers):
    flat = lambda x, case=case: case.run(x).reshape(-1)
    run = jax.jit(jax.shard_map(flat, out_specs=split, **given))
    points: list[tuple[float, float]] = []
    for size in sizes:
      share = case.sent * case.lines * 4  # bytes, for a word of each line
      line = form(math.ceil(size / share))  # as exchanges send it
      x = spread(1, case.lines, *line)
      send = run.lower(x).compile()
      if not points:
        jax.block_until_ready(send(x))  # makes the connections
      seconds = _median(functools.partial(send, x), repeats, meet)
      points.append((float(share * math.prod(line)), seconds))
    yield case, points


def measured_speed(codec: LeafCodec, elements: int, repeats: int) -> dict[str, float]:
  """Returns the seconds of a codec; see :meth:`CodecSpeed.measure`."""
  rules.count("elements", elements)
  rules.count("repeats", repeats)
  width = 1 << (elements.bit_length() // 2)
  shape = (-(-elements // width), width)
  medians = []
  for call in (*_calls(codec, shape), *updates(codec, shape)):
    jax.block_until_ready(call())  # compiles it
    medians.append(_median(call, repeats) / math.prod(shape))
  encode, decode, add, forget, keep = medians
  more = {"add": add / _PAYLOADS, "keep": max(0.0, keep - forget)}
  return {"encode": encode, "decode": decode, **more}


def _median(call: Callable[[], Any], repeats: int, meet: Any = float) -> float:
  seconds = []
  for _ in range(repeats):
    meet(0.0)  # of all workers, and then the seconds of the slowest of them
    start = time.perf_counter()
    jax.block_until_ready(call())
    seconds.append(meet(time.perf_counter() - start))
  return statistics.median(seconds)


def _calls(codec: LeafCodec, shape: tuple[int, int]) -> list[Callable[[], Any]]:
  """Returns functions that encode, decode, and add payloads, without arguments."""
  x, key = jax.random.normal(jax.random.key(0), shape), jnp.array([1, 2], jnp.uint32)
  leaf = Leaf(shape, addends=_PAYLOADS)
  bound: Any = codec.bind(leaf)
  context = Context(key, memory=bound.init(leaf, key), step=jnp.int32(0))
  encode = jax.jit(lambda x: payload_of(bound, x, context))
  decode = jax.jit(lambda payload: bound.decode(payload, like=x))

  def add(payload: Any, received: jax.Array) -> jax.Array:
    rows, agreed = payload.rows.shape[0], payload.agreed
    if agreed is not None:
      agreed = jnp.broadcast_to(agreed, (rows, agreed.shape[1]))
    return bound.sums.gathered(received, agreed, 1 / _PAYLOADS)(0, rows)

  mean, payload = jax.jit(add), encode(x)
  received = jnp.stack([payload.rows] * _PAYLOADS)
  return [lambda: encode(x), lambda: decode(payload), lambda: mean(payload, received)]


def updates(codec: LeafCodec, shape: tuple[int, ...]) -> list[Callable[[], Any]]:
  """Returns updates that send nothing: without a residual, and with one."""
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

  kept = ErrorFeedback() if codec.contraction > 0 else None  # which refuses the others
  return [stepping(None), stepping(kept)]
