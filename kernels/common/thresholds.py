"""Thresholds: magnitudes that a wanted number of a row's elements reach.

A threshold is found on a sample of the row. Then all elements that reach it are
counted, which also makes a bit for each of them. If the sample misled, the search goes
on from there.

Each function reads one row out of several matrices; a number says which. So one program
serves all leaves of a size. Only the code that reads elements is compiled for each
matrix, and not even that if the row is copied.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcomp._src.kernels.common.magnitudes import ABOVE_ALL, magnitudes
from gradcomp._src.kernels.common.row_view import RowView
from gradcomp._src.kernels.compaction import LANES, TILE, count_bits, first_bits
from gradcomp._src.kernels.gpu.dispatch import Implementation
from gradcomp._src.kernels.threshold_mask import mark

# The sample is lines of memory, one from each of as many equal parts of the row.
_LINE = 16  # elements of a line
_LINES = 8192  # at most
_HITS = 192  # elements of the sample to reach it, where capacity is twice the count

# Steps of the bisection on a sample, which find a threshold to a thousandth.
_HALVINGS = 18

# A threshold first moves by a sixteenth of an octave if the sample misled the search.
_FIRST_STEP = 1 << 19


def reaching(
  x: RowView,
  count: int,
  capacity: int,
  sign: jax.Array | None,
  first: jax.Array | None,
  implementation: Implementation | None,
) -> jax.Array:
  """Returns a bit for each element that reaches a threshold: ``uint32[n / 32]``.

  It sets the bits of the elements that ``selection.at_least``
  lists for the same arguments. The bits lie in tiles, in the order of listing/.

  The search bisects the bits of the threshold. It starts from the sample's threshold,
  in steps that double until both sides are known. It counts once if the sample is
  right, and up to 45 times if not. Where it ends between neighbors, it looks at both
  once more.
  """
  zero = magnitudes(x.matrices[0][0, 0]) & 0
  fewest = jnp.int32(count)
  sampled = functools.partial(_sampled, x, count, capacity, sign)
  if first is None:
    guess = sampled()
  else:
    given = lax.bitcast_convert_type(first, jnp.uint32) | zero
    guess = lax.cond(given > 0, lambda: given, sampled)
    fewest = jnp.where(given > 0, 0, count)

  def goes_on(state: _Search) -> jax.Array:
    return ~state.fits & (state.ends < 3)

  def look(state: _Search) -> _Search:
    words, found = mark(x, state.threshold, sign, implementation=implementation)
    many = found > capacity
    low = jnp.where(many, state.threshold, state.low)
    high = jnp.where(many, state.high, state.threshold)
    middle = low + (high - low) // 2
    up = jnp.minimum(low + state.step, middle)
    down = jnp.maximum(high - jnp.minimum(state.step, high), middle)
    ended = high - low <= 1
    last = jnp.where(state.ends == 0, high, low)
    # With a sign, zeros and the elements of the other sign must not reach it.
    following = jnp.where(ended, last, jnp.where(many, up, down))
    return _Search(
      threshold=jnp.maximum(following, 0 if sign is None else 1),
      step=2 * jnp.minimum(state.step, np.uint32(1 << 29)),
      low=low,
      high=high,
      fewest=zero.astype(jnp.int32) + count,
      fits=(found >= state.fewest) & ~many,
      ends=state.ends + ended,
      words=words,
      before=state.words,
    )

  none = jnp.zeros(-(-x.size // TILE) * LANES, jnp.uint32) + zero
  start = _Search(
    threshold=jnp.maximum(guess, 1),
    step=zero + np.uint32(_FIRST_STEP),
    low=zero,
    high=zero + ABOVE_ALL,
    fewest=zero.astype(jnp.int32) + fewest,
    fits=zero > 0,
    ends=zero.astype(jnp.int32),
    words=none,
    before=none,
  )
  state = lax.while_loop(goes_on, look, start)

  def with_ties() -> jax.Array:
    above = state.before
    return above | first_bits(state.words & ~above, count - count_bits(above))

  return lax.cond(state.fits, lambda: state.words, with_ties)


class _Search(NamedTuple):
  """The state of the search after a look at the elements that reach a threshold."""

  threshold: jax.Array  # uint32[]: to look at next
  step: jax.Array  # uint32[]: how far it moves at most
  low: jax.Array  # uint32[]: more elements reach it than there is capacity for
  high: jax.Array  # uint32[]: fewer elements reach it than are wanted
  fewest: jax.Array  # int32[]: the number of elements that is enough
  fits: jax.Array  # bool[]: whether the number of elements is right
  ends: jax.Array  # int32[]: looks since low and high became neighbors
  words: jax.Array  # uint32[n / 32]: bits of this look's elements; at the end, low's
  before: jax.Array  # the same of the look before; at the end, high's


def _sampled(
  x: RowView, count: int, capacity: int, sign: jax.Array | None
) -> jax.Array:
  """Returns a threshold that about ``sqrt(count * capacity)`` elements reach.

  It bisects the magnitudes of all elements if these are few. Otherwise it takes lines
  of memory, one in each of as many equal parts, at places that follow no regular
  pattern.
  """
  middle = math.sqrt(count * capacity)
  # The deviation of h hits in a sample is sqrt(h). With so many hits, an error of four
  # deviations is still between count and capacity.
  hits = _HITS / max(capacity / count - 1, 1 / 16) ** 2
  number_of_lines = min(_LINES, math.ceil(hits / middle * x.size / _LINE))

  def lines(x: jax.Array) -> jax.Array:
    part = x.size // number_of_lines
    number = lax.iota(jnp.uint32, number_of_lines)
    offset = (number * np.uint32(0x9E3779B1) >> 8) % np.uint32(part - _LINE + 1)
    start = (number * np.uint32(part) + offset).astype(jnp.int32)
    line = jax.vmap(lambda at: lax.dynamic_slice(x, (at,), (_LINE,)))
    return line(start).reshape(-1)

  whole = x.size <= _LINE * number_of_lines
  order = magnitudes(x.read(lambda x: x) if whole else x.read(lines), sign)
  wanted = min(max(round(middle * order.size / x.size), 1), order.size)

  def halve(_: jax.Array, sides: tuple[jax.Array, jax.Array]) -> tuple:
    low, high = sides
    between = low + (high - low) // 2
    many = (order >= between).sum(dtype=jnp.int32) >= wanted
    return jnp.where(many, between, low), jnp.where(many, high, between)

  zero = order[0] & 0
  return lax.fori_loop(0, _HALVINGS, halve, (zero, zero + ABOVE_ALL))[0]
