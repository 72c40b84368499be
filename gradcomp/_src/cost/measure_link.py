"""Measures links between the devices of a program. Only the functions need JAX."""

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from gradcomp._src.cost.link import Link
from gradcomp._src.cost.rules import count

if TYPE_CHECKING:  # at run time this would import JAX
  from jax.sharding import Mesh

_WORD = 4  # bytes


class _Case(NamedTuple):
  """A collective to time."""

  kind: str  # its name in the factors of a link
  workers: int  # of its group, or of its longest cycle
  rounds: int  # the messages that follow one another
  lines: int  # of a worker's words: one to each worker, or all to all
  sent: Fraction  # the bytes that a worker sends a byte of its input
  run: Callable[[Any], Any]  # from float32[lines, M]


def measured_link(
  mesh: "Mesh",
  axis_name: str | tuple[str, ...] | None,
  *,
  sizes: Sequence[int],
  repeats: int,
  progress: bool,
) -> Link:
  """Measures a link; see :meth:`Link.measure`."""
  import jax

  # All processes run the same collectives in the same order, whatever they measure.
  names = mesh.axis_names if axis_name is None else axis_name
  names = (names,) if isinstance(names, str) else tuple(names)
  workers = math.prod(mesh.shape[name] for name in names)
  if workers < 2:
    raise ValueError(f"`mesh` must have 2 workers or more over {names}, got {workers}.")
  if not isinstance(sizes, Sequence):
    raise ValueError(f"`sizes` must be several numbers of bytes, got {sizes!r}.")
  sizes = sorted({count("sizes", size) for size in sizes})
  if len(sizes) < 2:
    raise ValueError(f"`sizes` must hold two different ones or more, got {sizes}.")
  count("repeats", repeats)
  talks = progress and jax.process_index() == 0
  lines = []
  for case in _cases(names if len(names) > 1 else names[0], workers):
    points = _times(case, mesh, names, sizes, repeats)
    start, byte = line(points)
    lines.append((case, start, byte))
    if talks:
      print(
        f"{case.kind}, {case.workers} workers: {1e6 * start:,.0f} us and "
        f"{8e-9 / byte:,.3f} Gbit/s",
        file=sys.stderr,
        flush=True,
      )
  fastest = min(byte for _, _, byte in lines)
  return Link(
    latency=statistics.median(start / case.rounds for case, start, _ in lines),
    bytes_per_second=1 / fastest,
    factor={(case.kind, case.workers): byte / fastest for case, _, byte in lines},
  )


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
  """Fits ``seconds = start + byte * bytes`` to pairs of bytes and seconds.

  It minimizes the squares of relative errors, so that short messages count as much as
  long ones. The start is at least 0, and each byte takes some time.

  Example:
    >>> start, byte = line([(100.0, 3.0), (300.0, 5.0), (500.0, 7.0)])
    >>> round(start, 9), round(byte, 9)
    (2.0, 0.01)
  """
  one = sum(1 / y**2 for _, y in points)
  x = sum(x / y**2 for x, y in points)
  xx = sum(x * x / y**2 for x, y in points)
  y = sum(1 / y for _, y in points)
  xy = sum(x / y for x, y in points)
  byte = (one * xy - x * y) / (one * xx - x * x)
  start = (y - byte * x) / one
  # Noise can hide the latency, or the rate. Then all is put down to the bytes.
  return (start, byte) if start >= 0 and byte > 0 else (0.0, xy / xx)


def _cases(axis_name: str | tuple[str, ...], n: int) -> Iterator[_Case]:
  """Yields the collectives that exchanges call, over n workers."""
  from gradcomp._src.exchange import collectives

  share = Fraction(n - 1, n)
  gather = lambda x: collectives.gather(x[0], axis_name, "measured")
  yield _Case("all_gather", n, n - 1, 1, Fraction(n - 1), gather)
  scatter = lambda x: collectives.scatter(x, axis_name)
  yield _Case("all_to_all", n, n - 1, n, share, scatter)
  add = lambda x: collectives.psum(x, axis_name)
  yield _Case("all_reduce", n, 2 * (n - 1), 1, 2 * share, add)
  ring = lambda x: collectives.pass_on(x, axis_name, n)
  yield _Case("ppermute", n, 1, 1, Fraction(1), ring)
  if n > 2 and n % 2 == 0 and isinstance(axis_name, str):
    pairs = [(i, i + 1) for i in range(0, n, 2)]
    swap = lambda x: collectives.scatter_within(x, axis_name, pairs)
    yield _Case("ppermute", 2, 1, 2, Fraction(1, 2), swap)


def _times(
  case: _Case, mesh: "Mesh", names: tuple[str, ...], sizes: Sequence[int], repeats: int
) -> list[tuple[float, float]]:
  """Returns, for each size, the bytes that a worker sends and the median seconds."""
  import jax
  import numpy as np
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec as P

  from gradcomp._src.exchange.collectives import largest

  workers = math.prod(mesh.shape[name] for name in names)

  def program(function: Callable[[Any], Any], spec: P) -> Any:
    mapped = jax.shard_map(
      function, mesh=mesh, in_specs=P(names), out_specs=spec, check_vma=False
    )
    return jax.jit(mapped)

  def spread(value: float, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    own = np.full(shape, value, dtype)  # of each worker, wherever it is
    whole = (workers * shape[0], *shape[1:])
    sharding = NamedSharding(mesh, P(names))
    return jax.make_array_from_callback(whole, sharding, lambda index: own)

  axis_name = names if len(names) > 1 else names[0]
  slowest = program(lambda x: largest(x, axis_name), P())
  meet = lambda seconds: float(slowest(spread(seconds, (1,), np.float32))[0])
  run = program(lambda x: case.run(x).reshape(-1), P(names))
  points: list[tuple[float, float]] = []
  for size in sizes:
    words = math.ceil(size / (case.sent * case.lines * _WORD))
    x = spread(1, (case.lines, words), np.float32)
    send = run.lower(x).compile()
    if not points:
      jax.block_until_ready(send(x))  # makes the connections
    seconds = []
    for _ in range(repeats):
      meet(0.0)
      start = time.perf_counter()
      jax.block_until_ready(send(x))
      seconds.append(meet(time.perf_counter() - start))
    sent = float(case.sent * case.lines * words * _WORD)
    points.append((sent, statistics.median(seconds)))
  return points
