"""Selection: the elements of largest magnitude, found and listed without sorting.

Magnitudes are compared as integers: see marks/. Each function reads one row, out of
several of which a number says which: so one program serves all leaves of a size. Only
what reads elements is compiled for each of them.

A threshold is found on a sample and then counted on all elements, which makes a bit for
each element that reaches it. The set bits are listed: see listing/.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcomp.kernels.dispatch import Implementation
from gradcomp.kernels.listing import LANES, TILE, count_bits, first_bits, positions
from gradcomp.kernels.marks import magnitudes, mark
from gradcomp.kernels.rows import Row

# Bits of floats.
_SMALLEST_NORMAL = np.uint32(0x00800000)
_INFINITY = np.uint32(0x7F800000)
_ABOVE_ALL = np.uint32(0x80000000)  # NaN too

# The sample: lines of memory, one from each of as many equal parts.
_LINE = 16
_LINES = 8192  # at most
_HITS = 192  # where twice as many elements may be listed as are wanted

# Of all bits of a threshold, which leaves it right to a thousandth.
_HALVINGS = 18

# A sixteenth of an octave: what a threshold moves first if the sample misled it.
_FIRST_STEP = 1 << 19


def largest(x: Row, count: int, sign: jax.Array | None = None) -> jax.Array:
  """The positions of the ``count`` elements of largest magnitude, in order.

  Args:
    x: n elements.
    count: at most n.
    sign: to choose among the elements of one sign alone, of which there may be fewer.

  Returns:
    ``int32[count]``; n where there is no such element.
  """
  position = x.read(lambda x: lax.top_k(_as_floats(magnitudes(x, sign)), count)[1])
  position = position.astype(jnp.int32)
  if sign is not None:
    own = magnitudes(x.at(position), sign) > 0
    position = jnp.where(own, position, x.size)
  return jnp.sort(position)


def at_least(
  x: Row,
  count: int,
  capacity: int,
  *,
  sign: jax.Array | None = None,
  first: jax.Array | None = None,
  implementation: Implementation | None = None,
) -> jax.Array:
  """The positions of all elements that reach a threshold, between ``count`` and more.

  The threshold is one that between ``count`` and ``capacity`` elements reach. Where
  equal elements leave none, all that are larger are listed, and as many of the equal
  ones as make ``count``.

  Args:
    x: n elements.
    count: at most n.
    capacity: ``count`` or more.
    sign: to choose among the elements of one sign alone, of which there may be fewer.
    first: ``float32[]``, a threshold to take as it is if no more than ``capacity``
      elements reach it, even if fewer than ``count`` do; 0 for none.
    implementation: of marks and lists: see :func:`dispatch.run`.

  Returns:
    ``int32[capacity]``, tile by tile; n behind the last.
  """
  words = _threshold_words(x, count, capacity, sign, first, implementation)
  # A loop of one round, for all that XLA knows of any number: it keeps the list then.
  # Fused into each of its readers, it would be made as often.
  number = count_bits(words)
  nothing = jnp.zeros(capacity, jnp.int32) + (number & 0)
  found = lambda *_: positions(words, capacity, x.size, implementation=implementation)
  return lax.fori_loop(0, (number >= 0) * 1, found, nothing)


def trimmed(
  x: Row,
  count: int,
  capacity: int,
  *,
  sign: jax.Array | None = None,
  implementation: Implementation | None = None,
) -> jax.Array:
  """:func:`largest`, sorting only the survivors of :func:`at_least`.

  Returns:
    ``int32[count]``, tile by tile; n where there is no such element.
  """
  survivors = at_least(x, count, capacity, sign=sign, implementation=implementation)
  order = _as_floats(magnitudes(x.at(survivors), sign))
  _, chosen = lax.top_k(jnp.where(survivors < x.size, order, -jnp.inf), count)
  return survivors[jnp.sort(chosen)]


def _as_floats(order: jax.Array) -> jax.Array:
  """Normal floats in the same order, which are sorted faster than integers.

  Subnormal numbers, which CPUs take for zeros, become negative ones; NaN is infinity.
  """
  subnormal = _ABOVE_ALL | (2 * _SMALLEST_NORMAL - 1 - order)
  bits = jnp.where(order < _SMALLEST_NORMAL, subnormal, jnp.minimum(order, _INFINITY))
  return lax.bitcast_convert_type(bits, jnp.float32)


def _threshold_words(
  x: Row,
  count: int,
  capacity: int,
  sign: jax.Array | None,
  first: jax.Array | None,
  implementation: Implementation | None,
) -> jax.Array:
  """The bits of the elements to list.

  A search by bisection over the bits of the threshold, from the sample's: in steps that
  double until both sides are known. Up to 45 counts; one where the sample is right.
  Where it ends between neighbours, both are looked at once more.
  """
  zero = x.read(lambda x: magnitudes(x[0])) & 0
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
    high=zero + _ABOVE_ALL,
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
  return lax.fori_loop(0, _HALVINGS, halve, (zero, zero + _ABOVE_ALL))[0]
