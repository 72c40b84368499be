"""Searches the threshold that enough elements of a row reach, and lists these."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.gpu import dispatch, tiles
from gradcomp._src.kernels.selection import pallas, reference
from gradcomp._src.kernels.tpu.lines import LANES

# The sample is lines of memory, one from each of equal parts of the row.
_LINE = 16  # elements of a line
_LINES = 8192  # at most
_HITS = 192  # elements of the sample to reach it, where capacity is twice the count

# Steps of the bisection on a sample, which find a threshold to a thousandth.
_HALVINGS = 18

# A threshold first moves by a sixteenth of an octave if the sample misled the search.
_FIRST_STEP = 1 << 19


def select(
  x: reference.RowView,
  method: str,
  between: tuple[int, int],
  *,
  sign: Array | None = None,
  first: Array | None = None,
  implementation: dispatch.Implementation | None = None,
) -> Array:
  """Returns the positions of large elements of a row; its size in slots not used."""
  # "exact" and "trimmed" return the `count` largest, ascending; else they are all that
  # reach a threshold, tile by tile, in `capacity` slots.
  # The threshold is one that between `count` and `capacity` elements reach, or `first`
  # if no more than `capacity` do. Where equal elements leave no such threshold, all
  # larger ones are listed, and equal ones up to `count`. With `sign` only its elements
  # count. "trimmed" sorts the listed ones alone, and "exact" all.
  count, capacity = between
  order = lambda x: reference.as_floats(reference.magnitudes(x, sign))
  if method == "exact":
    found = x.read(lambda x: lax.top_k(order(x), count)[1]).astype(jnp.int32)
    if sign is not None:
      found = jnp.where(reference.magnitudes(x.at(found), sign) > 0, found, x.size)
    return jnp.sort(found)
  words = _reaching(x, count, capacity, sign, first, implementation)
  # The loop has one round, which XLA cannot know. So XLA keeps the list, and does not
  # fuse it into each of its readers, which would make it anew for each.
  number = reference.count_bits(words)
  nothing = jnp.zeros(capacity, jnp.int32) + (number & 0)
  listed = lambda *_: reference.positions(words, capacity, x.size)
  found = lax.fori_loop(0, (number >= 0) * 1, listed, nothing)
  if method == "trimmed":
    own = jnp.where(found < x.size, order(x.at(found)), -jnp.inf)
    found = found[jnp.sort(lax.top_k(own, count)[1])]
  return found


def mark(
  x: reference.RowView,
  threshold: Array,
  sign: Array | None = None,
  *,
  implementation: dispatch.Implementation | None = None,
) -> Array:
  """Runs :func:`reference.mark` or a kernel, as :func:`dispatch.run` chooses."""
  refusal = functools.partial(tiles.refusal_of_tiles, tile=reference.TILE)
  no = refusal(x.size) or refusal(x.matrices[0].size)
  kernels = {"cuda": no or pallas.mark, "tpu": dispatch.NO_KERNEL}
  given = "mark", reference.mark, kernels, x, threshold, sign
  return dispatch.run(*given, implementation=implementation)


class _Search(NamedTuple):
  """The state of the search after a look at the elements that reach a threshold."""

  threshold: Array  # uint32[]: to look at next
  step: Array  # uint32[]: how far it moves at most
  low: Array  # uint32[]: more elements reach it than there is capacity for
  high: Array  # uint32[]: fewer elements reach it than are wanted
  fewest: Array  # int32[]: the number of elements that is enough
  fits: Array  # bool[]: whether the number of elements is right
  ends: Array  # int32[]: looks since low and high became neighbors
  words: Array  # uint32[n / 32]: bits of this look's elements; at the end, low's
  before: Array  # the same of the look before; at the end, high's


def _reaching(
  x: reference.RowView,
  count: int,
  capacity: int,
  sign: Array | None,
  first: Array | None,
  implementation: dispatch.Implementation | None,
) -> Array:
  """Returns a bit for each element that ``threshold`` lists: ``uint32[n / 32]``."""
  # The search bisects the bits of the threshold. It starts from the sample's, in steps
  # that double until both sides are known. It counts once if the sample is right, and
  # up to 45 times if not. Where it ends between neighbors, it looks at both once more.
  zero = reference.magnitudes(x.matrices[0].reshape(-1)[0]) & 0
  fewest = jnp.int32(count)
  sampled = functools.partial(_sampled, x, count, capacity, sign)
  if first is None:
    guess = sampled()
  else:
    given = lax.bitcast_convert_type(first, jnp.uint32) | zero
    guess = lax.cond(given > 0, lambda: given, sampled)
    fewest = jnp.where(given > 0, 0, count)

  def look(state: _Search) -> _Search:
    words = mark(x, state.threshold, sign, implementation=implementation)
    found = reference.count_bits(words)
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

  none = jnp.zeros(-(-x.size // reference.TILE) * reference.LANES, jnp.uint32) + zero
  start = _Search(
    threshold=jnp.maximum(guess, 1),
    step=zero + np.uint32(_FIRST_STEP),
    low=zero,
    high=zero + reference.ABOVE_ALL,
    fewest=zero.astype(jnp.int32) + fewest,
    fits=zero > 0,
    ends=zero.astype(jnp.int32),
    words=none,
    before=none,
  )
  state = lax.while_loop(lambda x: ~x.fits & (x.ends < 3), look, start)

  def with_ties() -> Array:
    above = state.before
    rest = count - reference.count_bits(above)
    return above | reference.first_bits(state.words & ~above, rest)

  return lax.cond(state.fits, lambda: state.words, with_ties)


def _sampled(
  x: reference.RowView, count: int, capacity: int, sign: Array | None
) -> Array:
  """Returns a threshold that about ``sqrt(count * capacity)`` elements reach."""
  # It bisects the magnitudes of all elements if these are few, else of lines of memory,
  # one in each of equal parts, at places without a regular pattern.
  middle = math.sqrt(count * capacity)
  # The deviation of h hits in a sample is sqrt(h). With this number of hits, an error
  # of four deviations is still between count and capacity.
  hits = _HITS / max(capacity / count - 1, 1 / 16) ** 2
  number_of_lines = min(_LINES, math.ceil(hits / middle * x.size / _LINE))

  def lines(x: Array) -> Array:
    part = x.size // number_of_lines
    number = lax.iota(jnp.uint32, number_of_lines)
    offset = (number * np.uint32(0x9E3779B1) >> 8) % np.uint32(part - _LINE + 1)
    return _lines(x, (number * np.uint32(part) + offset).astype(jnp.int32))

  whole = x.size <= _LINE * number_of_lines
  order = reference.magnitudes(x.read(lambda x: x) if whole else x.read(lines), sign)
  wanted = min(max(round(middle * order.size / x.size), 1), order.size)

  def halve(k: Array, low: Array) -> Array:
    between = low + (reference.ABOVE_ALL >> 1 + k.astype(jnp.uint32))
    many = (order >= between).sum(dtype=jnp.int32) >= wanted
    return jnp.where(many, between, low)

  return lax.fori_loop(0, _HALVINGS, halve, order[0] & 0)


def _lines_by_rows(x: Array, start: Array) -> Array:
  """Reads the lines in a form for TPUs, where XLA would slice them one by one."""
  # It gathers whole rows of 128, if all starts are multiples of that. So a line is in
  # two rows, as a column here; halves, quarters and so on of a row move it to the top.
  rows = jnp.pad(x, (0, -x.size % LANES)).reshape(-1, LANES)
  row, place = start // LANES, start % LANES
  both = (row, jnp.minimum(row + 1, rows.shape[0] - 1))
  found = [rows.at[number].get(mode="promise_in_bounds") for number in both]
  columns = jnp.concatenate(found, axis=1).T[: LANES + _LINE - 1]
  for step in (64, 32, 16, 8, 4, 2, 1):
    columns = jnp.where(place & step > 0, columns[step:], columns[:-step])
  return columns.T.reshape(-1)


@dispatch.on_tpu(_lines_by_rows)
def _lines(x: Array, start: Array) -> Array:
  """Reads a line of a flat array from each start on: ``float32[lines * 16]``."""
  return jax.vmap(lambda at: lax.dynamic_slice(x, (at,), (_LINE,)))(start).reshape(-1)
