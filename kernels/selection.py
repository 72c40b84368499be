"""Selects the elements of largest magnitude of a row, without sorting them all."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.gpu import dispatch, tiles
from gradcomp._src.kernels.materialize import pick
from gradcomp._src.kernels.tpu.lines import LANES as TPU_LANES

T = TypeVar("T")

# Leaves of up to COPIED elements are copied where that spares the compiler a program
# for each of them. On a processor with 1 MiB of cache a core, a step of 32 such leaves
# takes a tenth less time with the copy, because the copy stays in the cache. With twice
# as many elements it takes 1.4 times as long.
COPIED = 1 << 17

# A tile is 1024 elements in 32 words. Bit p of word w is element 32 p + w.
WORD = 32
LANES = 32
TILE = WORD * LANES

# Of the kernel: tiles in a block, so that each thread loads 16 bytes of a plane, and
# planes in a round of the loop, loaded at once.
_TILES, _STEP = 16, 8

# The sample is lines of memory, one from each of equal parts of the row.
_LINE = 16  # elements of a line
_LINES = 8192  # at most
_HITS = 192  # elements of the sample to reach it, where capacity is twice the count

# Steps of the bisection on a sample, which find a threshold to a thousandth.
_HALVINGS = 18

# A threshold first moves by a sixteenth of an octave if the sample misled the search.
_FIRST_STEP = 1 << 19

ABOVE_ALL = np.uint32(0x80000000)  # above all magnitudes, NaN's too
_SMALLEST_NORMAL, _INFINITY = np.uint32(0x00800000), np.uint32(0x7F800000)  # bits


class RowView(NamedTuple):
  """One row out of several matrices of the same shape."""

  # float32[rows, n] each; or float32[n], a row: XLA for TPUs loops over it in registers
  # of 1024 elements, but of 128 over float32[1, n].
  matrices: Sequence[Array]
  number: Array  # int32[]: counts the rows of the first matrix, the second, ...

  @property
  def size(self) -> int:
    """The number of elements of the row."""
    return self.matrices[0].shape[-1]

  def read(self, function: Callable[[Array], T]) -> T:
    """Returns ``function(row)``, without a copy of a row of a matrix with several."""

    def row(matrix: Array, number: Array | int) -> Array:
      if matrix.shape[0] == 1:
        return matrix[0]
      return lax.dynamic_index_in_dim(matrix, number, keepdims=False)

    return self.read_within(lambda matrix, number: function(row(matrix, number)))

  def read_within(self, function: Callable[[Array, Array | int], T]) -> T:
    """Returns ``function(matrix, number)`` of the row's matrix and its number there."""
    count = self.matrices[0].size // self.size

    def of(matrix: Array) -> T:
      matrix = matrix.reshape(count, self.size)
      return function(matrix, self.number % count if count > 1 else 0)

    return pick(of, self.number // count, self.matrices)

  def copied(self) -> "RowView":
    """Returns the same row, copied once, so that readers are compiled once."""
    return RowView([self.read(lambda x: x)[None]], jnp.int32(0))

  def at(self, positions: Array) -> Array:
    """Returns the elements at positions; positions beyond the row's end give 0."""
    return self.read(
      lambda x: x.at[positions].get(
        mode="fill", fill_value=0, wrap_negative_indices=False
      )
    )


def _magnitudes(x: Array, sign: Array | None = None) -> Array:
  """Returns ``|x|`` in order, as ``uint32``; with ``sign``, the other sign's are 0."""
  # Infinity and NaN are above all numbers, and have both signs.
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  magnitude = bits & np.uint32(ABOVE_ALL - 1)
  if sign is None:
    return magnitude
  own = (bits >> 31 == 0) == (sign > 0)
  return jnp.where(own | (magnitude >= _INFINITY), magnitude, jnp.uint32(0))


def _mark_reference(x: RowView, threshold: Array, sign: Array | None) -> Array:
  """Marks elements that reach a threshold by one bit each: ``uint32[tiles * 32]``."""

  def reached(x: Array) -> Array:
    # Without the barrier XLA computes the magnitudes before the loop over thresholds,
    # which makes a copy of the row.
    x, limit = lax.optimization_barrier((x, threshold))
    whole = x.size // TILE * TILE
    bit = np.uint32(1) << np.arange(WORD, dtype=np.uint32)[:, None]
    # Zeros beyond the row have no bit. Cleared in the last words afterwards, they came
    # back where XLA 0.12 for CPU writes the words into others.
    real = np.arange(TILE).reshape(WORD, LANES) < x.size - whole
    rest = jnp.pad(x[whole:], (0, -x.size % TILE))
    words = []
    for part, marks in (x[:whole], bit), (rest, np.where(real, bit, np.uint32(0))):
      order = _magnitudes(part.reshape(-1, WORD, LANES), sign)
      bits = jnp.where(order >= limit, marks, np.uint32(0))
      words.append(lax.reduce(bits, np.uint32(0), lax.bitwise_or, (1,)))
    return jnp.concatenate(words)

  return x.read(reached).reshape(-1)


def _mark_on_gpu(
  x: RowView, threshold: Array, sign: Array | None, *, interpret: Any = False
) -> Array:
  """Marks as :func:`_mark_reference` does, for one tile or more."""
  _, whole = tiles.blocks(x.size // TILE, _TILES)
  words = x.read_within(
    lambda matrix, number: _mark_tiles(
      matrix, jnp.int32(number), threshold, sign, interpret=interpret
    )
  )
  if whole < len(words):
    part = x.read(lambda x: x[whole * TILE :])
    rest = _mark_reference(RowView([part[None]], jnp.int32(0)), threshold, sign)
    words = lax.dynamic_update_slice(words, rest.reshape(-1, LANES), (whole, 0))
  return words.reshape(-1)


# It is jitted so that it is traced once for all matrices of a shape.
@functools.partial(jax.jit, static_argnames="interpret")
def _mark_tiles(
  matrix: Array, number: Array, threshold: Array, sign: Array | None, *, interpret: Any
) -> Array:
  """Returns the words of a row, ``uint32[tiles, 32]``, with room for the rest."""
  several, size = matrix.shape
  rows, whole = tiles.blocks(size // TILE, _TILES)
  view = whole, WORD, LANES
  scalars = [y.reshape(1) for y in (number, threshold, sign) if y is not None]
  if interpret:
    matrix = matrix[number, : whole * TILE].reshape(view)

  def kernel(program: Array, x_ref: Any, *refs: Any) -> None:
    number, limit, *own = (ref[0] for ref in refs[:-1])
    if not interpret:
      # A known number allows loads of 16 bytes for every size.
      number = number if several > 1 else 0
      x_ref = x_ref.at[number, : whole * TILE].reshape(view)
    block = tiles.Block(([x_ref], refs[-1], None), program, rows, vector, interpret)

    def add_planes(step: Array, words: Array) -> Array:
      for plane in [step * _STEP + k for k in range(_STEP)]:
        order = _magnitudes(block.plane(plane), *own)
        bit = jnp.uint32(1) << plane.astype(jnp.uint32)
        words = words | jnp.where(order >= limit, bit, jnp.uint32(0))
      return words

    none = block.placed(jnp.zeros(block.shape, jnp.uint32))
    block.put(lax.fori_loop(jnp.int32(0), jnp.int32(WORD // _STEP), add_planes, none))

  vector = math.gcd(4, size if several > 1 else 4)
  out = [tiles.typed(matrix, (-(-size // TILE), LANES), jnp.uint32)]
  inputs = [matrix, *scalars]
  (words,) = tiles.run(kernel, whole // rows, inputs, out, "mark", interpret)
  return words


def mark(
  x: RowView,
  threshold: Array,
  sign: Array | None = None,
  *,
  implementation: dispatch.Implementation | None = None,
) -> Array:
  """Runs :func:`_mark_reference` or a kernel, as :func:`dispatch.run` chooses."""
  refusal = functools.partial(tiles.refusal_of_tiles, tile=TILE)
  no = refusal(x.size) or refusal(x.matrices[0].size)
  kernels = {"cuda": no or _mark_on_gpu, "tpu": dispatch.NO_KERNEL}
  given = "mark", _mark_reference, kernels, x, threshold, sign
  return dispatch.run(*given, implementation=implementation)


def positions(words: Array, capacity: int, size: int) -> Array:
  """Lists elements with set bits, tile by tile, then ``size``: ``int32[capacity]``."""
  sums = [lax.population_count(words).astype(jnp.int32)]
  while sums[-1].size > words.size // LANES:
    # A TPU would pad a last axis of 2 to 128.
    sums.append(sums[-1][0::2] + sums[-1][1::2])
  counts = sums.pop()
  starts = jnp.cumsum(counts, dtype=jnp.int32) - counts
  numbers = lax.iota(jnp.int32, counts.size)
  place = jnp.where(counts > 0, starts, capacity)
  first = jnp.zeros(capacity, jnp.int32).at[place].max(numbers, mode="drop")
  tile, slot = lax.cummax(first), lax.iota(jnp.int32, capacity)
  rank, word = slot - starts[tile], tile
  for halves in reversed(sums):
    word = 2 * word
    left = halves.at[word].get(mode="promise_in_bounds")
    right = rank >= left
    rank, word = jnp.where(right, rank - left, rank), word + right
  used = slot < counts.sum(dtype=jnp.int32)
  word = jnp.minimum(word, words.size - 1)  # unused slots may lie beyond the words
  bit = _set_bit(words[word], rank)
  return jnp.where(used, tile * TILE + bit * LANES + word % LANES, size)


def _set_bit(word: Array, rank: Array) -> Array:
  """Returns the place of the set bit with ``rank`` others below it; 31 if none has."""
  place = jnp.zeros_like(rank)
  for width in (16, 8, 4, 2, 1):
    low = word & jnp.uint32((1 << width) - 1)
    below = lax.population_count(low).astype(jnp.int32)
    right = rank >= below
    rank = jnp.where(right, rank - below, rank)
    word = jnp.where(right, word >> width, low)
    place = place + jnp.where(right, width, 0)
  return place


def _count_bits(words: Array) -> Array:
  return lax.population_count(words).astype(jnp.int32).sum(dtype=jnp.int32)


def _first_bits(words: Array, wanted: Array) -> Array:
  """Keeps the first ``wanted`` set bits of all words, and clears the others."""
  counts = lax.population_count(words).astype(jnp.int32)
  rank = jnp.maximum(wanted - (jnp.cumsum(counts, dtype=jnp.int32) - counts), 0)
  below = (jnp.uint32(1) << _set_bit(words, rank).astype(jnp.uint32)) - 1
  return jnp.where(rank >= counts, words, words & below)


def _sampled(x: RowView, count: int, capacity: int, sign: Array | None) -> Array:
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
  order = _magnitudes(x.read(lambda x: x) if whole else x.read(lines), sign)
  wanted = min(max(round(middle * order.size / x.size), 1), order.size)

  def halve(k: Array, low: Array) -> Array:
    between = low + (ABOVE_ALL >> 1 + k.astype(jnp.uint32))
    many = (order >= between).sum(dtype=jnp.int32) >= wanted
    return jnp.where(many, between, low)

  return lax.fori_loop(0, _HALVINGS, halve, order[0] & 0)


def _lines_by_rows(x: Array, start: Array) -> Array:
  """Reads the lines in a form for TPUs, where XLA would slice them one by one."""
  # It gathers whole rows of 128, if all starts are multiples of that. So a line is in
  # two rows, as a column here; halves, quarters and so on of a row move it to the top.
  rows = jnp.pad(x, (0, -x.size % TPU_LANES)).reshape(-1, TPU_LANES)
  row, place = start // TPU_LANES, start % TPU_LANES
  both = (row, jnp.minimum(row + 1, rows.shape[0] - 1))
  found = [rows.at[number].get(mode="promise_in_bounds") for number in both]
  columns = jnp.concatenate(found, axis=1).T[: TPU_LANES + _LINE - 1]
  for step in (64, 32, 16, 8, 4, 2, 1):
    columns = jnp.where(place & step > 0, columns[step:], columns[:-step])
  return columns.T.reshape(-1)


@dispatch.on_tpu(_lines_by_rows)
def _lines(x: Array, start: Array) -> Array:
  """Reads a line of a flat array from each start on: ``float32[lines * 16]``."""
  return jax.vmap(lambda at: lax.dynamic_slice(x, (at,), (_LINE,)))(start).reshape(-1)


def select(
  x: RowView,
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

  def order(x: Array) -> Array:
    # Normal floats in the order of magnitudes are sorted faster than integers. CPUs
    # take subnormal numbers for zeros: they become negative, and NaN infinity.
    bits = _magnitudes(x, sign)
    below = ABOVE_ALL | (2 * _SMALLEST_NORMAL - 1 - bits)
    bits = jnp.where(bits < _SMALLEST_NORMAL, below, jnp.minimum(bits, _INFINITY))
    return lax.bitcast_convert_type(bits, jnp.float32)

  if method == "exact":
    found = x.read(lambda x: lax.top_k(order(x), count)[1]).astype(jnp.int32)
    if sign is not None:
      found = jnp.where(_magnitudes(x.at(found), sign) > 0, found, x.size)
    return jnp.sort(found)
  # The search bisects the bits of the threshold. It starts from the sample's, in steps
  # that double until both sides are known. It counts once if the sample is right, and
  # up to 45 times if not. Where it ends between neighbors, it looks at both once more.
  zero = _magnitudes(x.matrices[0].reshape(-1)[0]) & 0
  none, fewest = zero.astype(jnp.int32), jnp.int32(count)
  sampled = functools.partial(_sampled, x, count, capacity, sign)
  if first is None:
    guess = sampled()
  else:
    given = lax.bitcast_convert_type(first, jnp.uint32) | zero
    guess = lax.cond(given > 0, lambda: given, sampled)
    fewest = jnp.where(given > 0, 0, count)

  def look(state: tuple[Array, ...]) -> tuple[Array, ...]:
    threshold, step, low, high, enough, _, ends, before, _ = state
    words = mark(x, threshold, sign, implementation=implementation)
    found = _count_bits(words)
    many = found > capacity
    low, high = jnp.where(many, threshold, low), jnp.where(many, high, threshold)
    middle = low + (high - low) // 2
    up = jnp.minimum(low + step, middle)
    down = jnp.maximum(high - jnp.minimum(step, high), middle)
    ended = high - low <= 1
    last = jnp.where(ends == 0, high, low)
    following = jnp.where(ended, last, jnp.where(many, up, down))
    # With a sign, zeros and the elements of the other sign must not reach it.
    following = jnp.maximum(following, 0 if sign is None else 1)
    step = 2 * jnp.minimum(step, np.uint32(1 << 29))
    fits, ends = (found >= enough) & ~many, ends + ended
    return following, step, low, high, none + count, fits, ends, words, before

  nothing = jnp.zeros(-(-x.size // TILE) * LANES, jnp.uint32) + zero
  start: tuple[Array, ...] = (
    jnp.maximum(guess, 1),  # the threshold to look at next
    zero + np.uint32(_FIRST_STEP),  # how far it moves at most
    zero,  # low: more elements reach it than there is capacity for
    zero + ABOVE_ALL,  # high: fewer elements reach it than are wanted
    none + fewest,  # the number of elements that is enough
    zero > 0,  # whether the number of elements is right
    none,  # looks since low and high became neighbors
    nothing,  # bits of this look's elements; at the end, low's
    nothing,  # the same of the look before; at the end, high's
  )
  going = lambda state: ~state[5] & (state[6] < 3)
  *_, fits, _, reached, above = lax.while_loop(going, look, start)

  def with_ties() -> Array:
    return above | _first_bits(reached & ~above, count - _count_bits(above))

  words = lax.cond(fits, lambda: reached, with_ties)
  # The loop has one round, which XLA cannot know. So XLA keeps the list, and does not
  # fuse it into each of its readers, which would make it anew for each.
  number = _count_bits(words)
  nothing = jnp.zeros(capacity, jnp.int32) + (number & 0)
  listed = lambda *_: positions(words, capacity, x.size)
  found = lax.fori_loop(0, (number >= 0) * 1, listed, nothing)
  if method == "trimmed":
    own = jnp.where(found < x.size, order(x.at(found)), -jnp.inf)
    found = found[jnp.sort(lax.top_k(own, count)[1])]
  return found
