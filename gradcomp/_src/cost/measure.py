"""The calls that are timed to measure a link or a codec, and their medians."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.core.feedback import ErrorFeedback
from gradcomp._src.core.transform import compress
from gradcomp._src.exchange import collectives
from gradcomp._src.mesh.axes import AxisName


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
  """Fits ``seconds = start + byte * bytes`` to pairs of bytes and seconds."""
  # It minimizes the squares of relative errors: short messages count like long ones.
  x, y = np.asarray(points).T
  start, byte = np.linalg.lstsq(np.stack([1 / y, x / y], 1), np.ones(len(y)))[0]
  # Noise can hide the latency, or the rate. Then all is put down to the bytes.
  if start < 0 or byte <= 0:
    start, byte = 0.0, sum(x / y) / sum((x / y) ** 2)
  return float(start), float(byte)


# A collective's name in the factors of a link; the workers of its group, or of its
# longest cycle; the messages that follow one another; a worker's lines: one to each
# worker, or one to all; the bytes that it sends a byte of its input; and what runs it,
# on float32[lines, M] or float32[lines, K, 128].
_Case = tuple[str, int, int, int, Fraction, Callable[[Any], Any]]


def cases(over: AxisName, n: int) -> Iterator[_Case]:
  """Yields the collectives that exchanges call, over n workers."""
  whole, share = Fraction(1), Fraction(n - 1, n)
  gather = lambda x: collectives.gather(x[0], over, "measured")
  yield "all_gather", n, n - 1, 1, whole * (n - 1), gather
  yield "all_to_all", n, n - 1, n, share, lambda x: collectives.scatter(x, over)
  yield "all_reduce", n, 2 * (n - 1), 1, 2 * share, lambda x: collectives.psum(x, over)
  yield "ppermute", n, 1, 1, whole, lambda x: collectives.pass_on(x[0], over, n)
  if n > 2 and n % 2 == 0 and isinstance(over, str):
    pairs = [(i, i + 1) for i in range(0, n, 2)]
    swap = lambda x: collectives.scatter_within(x, over, pairs)
    yield "ppermute", 2, 1, 2, whole / 2, swap


def median(call: Callable[[], Any], repeats: int, meet: Any = float) -> float:
  """Returns the median seconds of a call, with ``meet`` between workers."""
  seconds = []
  for _ in range(repeats):
    meet(0.0)  # of all workers, and then the seconds of the slowest of them
    start = time.perf_counter()
    jax.block_until_ready(call())
    seconds.append(meet(time.perf_counter() - start))
  return statistics.median(seconds)


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
