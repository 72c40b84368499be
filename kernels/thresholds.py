"""Thresholds: a magnitude that a wanted number of a row's elements reach.

Found on a sample and then counted on all elements, which makes a bit for each element
that reaches it, and searched on from there if that misled. Each function reads one row,
out of several of which a number says which: so one program serves all leaves of a size.
Only what reads elements is compiled for each of them, unless they are copied.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcomp.kernels.dispatch import Implementation
from gradcomp.kernels.listing import LANES, TILE, count_bits, first_bits
from gradcomp.kernels.magnitudes import ABOVE_ALL, magnitudes
from gradcomp.kernels.marks import mark
from gradcomp.kernels.rows import Row

# The sample: lines of memory, one from each of as many equal parts.
_LINE = 16
_LINES = 8192  # at most
_HITS = 192  # where twice as many elements may be listed as are wanted

# Of all bits of a threshold, which leaves it right to a thousandth.
_HALVINGS = 18

# A sixteenth of an octave: what a threshold moves first if the sample misled it.
_FIRST_STEP = 1 << 19


def reaching(
  x: Row,
  count: int,
  capacity: int,
  sign: jax.Array | None,
  first: jax.Array | None,
  implementation: Implementation | None,
) -> jax.Array:
  """A bit for each element that reaches a threshold: ``uint32[n / 32]``.

  As many as :func:`gradcomp.kernels.selection.at_least` lists, whose arguments these
  are; their order is that of listing/.

  A search by bisection over the bits of the threshold, from the sample's: in steps that
  double until both sides are known. Up to 45 counts; one where the sample is right.
  Where it ends between neighbours, both are looked at once more.
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
    # Zeros are no elements of a sign.
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
  """After a look at the elements that reach a threshold."""

  threshold: jax.Array  # uint32[]: to look at next
  step: jax.Array  # uint32[]: how far it moves at most
  low: jax.Array  # uint32[]: more elements reach it than there is capacity for
  high: jax.Array  # uint32[]: fewer reach it than wanted
  fewest: jax.Array  # int32[]: elements that are enough
  fits: jax.Array  # bool[]: whether the number is right
  ends: jax.Array  # int32[]: looks since low and high are neighbours
  words: jax.Array  # uint32[n / 32]: who reaches the threshold; at last, low
  before: jax.Array  # the same of the look before; at last, of high


def _sampled(x: Row, count: int, capacity: int, sign: jax.Array | None) -> jax.Array:
  """A threshold that about the geometric mean of both numbers of elements reach.

  By bisection over the magnitudes of all elements if these are few, else of lines at
  places that no regular pattern follows, one in each of as many equal parts.
  """
  middle = math.sqrt(count * capacity)
  # Of hits h in a sample the deviation is sqrt(h): so many that four of them still fit.
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
