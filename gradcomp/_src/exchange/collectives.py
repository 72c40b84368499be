"""The collectives, which send lines of words between workers, and these lines.

Messages are 32-bit words or whole bytes, because XLA widens narrower floats and
integers of less than a byte on the way. In each exchange, one collective completes the
mean, and its name holds the number of its elements. All others are named stages.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.floats.dtypes import is_narrow, widened
from gradcomp._src.mesh import study, types
from gradcomp._src.mesh.axes import AxisName, axis_names, manual_axes
from gradcomp._src.mesh.shard_maps import devices, spread

Shape = tuple[int, ...]
Pairs = Sequence[tuple[int, int]]  # of workers: from whom to whom
Members = Sequence[Sequence[int]]  # the workers of each group


class Workers(NamedTuple):
  """The workers that exchange. ``scale`` is 1/N for a mean, and 1 for a sum."""

  axis_name: AxisName
  size: int
  scale: float


ALONE = Workers((), 1, 1.0)  # of a worker that exchanges nothing

# A TPU keeps an array in tiles of 8 by 128 words. A tile of flat lines, uint32[L, M],
# has words of eight lines, so that XLA would move every word before it sends a line,
# and again before it decodes one. Lanes, uint32[L, K, 128], are whole tiles of a line.
LANES = 128
# Zeros fill the last lane: less than 1 % from here on. Shorter lines stay flat.
_LEAST = 100 * LANES
# XLA for TPUs cuts rows at lanes without moving words, but each cut is an instruction.
_MOST_CUTS = 32 * LANES

STAGE = "gradcomp_stage"  # the name of every other collective
REPEAT = "gradcomp_repeat"  # around all collectives that a repeat adds to a step


def final_stage(elements: int, workers: Workers) -> str:
  """Names the collective that completes a mean, by the elements of a device's shard."""
  elements = -(-elements // devices(workers.axis_name))
  return f"gradcomp_mean_{elements}_over_{workers.size}"


def as_floats(elements: int, axis_name: AxisName) -> str:
  """Returns the name of a collective in place of one of ``elements`` ``float32``."""
  return f"gradcomp_float32_{-(-elements // devices(axis_name))}"


def pmean(tree: Any, axis_name: AxisName) -> Any:
  """Returns the plain mean over the axis, in the arrays' own dtype."""
  note_parts(jax.tree.leaves(tree))
  # In float32 no sum of narrower floats overflows.
  means = lax.pmean(jax.tree.map(widened, tree), axis_name)
  back = lambda mean, x: mean.astype(x.dtype) if is_narrow(x) else mean
  return jax.tree.map(back, means, tree)


def psum(tree: Any, axis_name: AxisName) -> Any:
  """Returns the plain sum over the axis, in the arrays' own dtype."""
  note_parts(jax.tree.leaves(tree))
  return lax.psum(tree, axis_name)


def largest(x: jax.Array, axis_name: AxisName) -> jax.Array:
  """Returns the maximum over the workers, of bytes or ``float32`` of zero or more."""
  maximum = lambda x: lax.pmax(x, axis_name)
  if x.dtype == jnp.uint8:
    return spread(maximum, x, axis_name, STAGE)
  # Such floats have the order of their bit patterns, with NaN as the largest. A maximum
  # of floats may drop NaN.
  magnitude = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
  top = spread(maximum, magnitude, axis_name, STAGE)
  return lax.bitcast_convert_type(top, jnp.float32)


def any_nan(
  arrays: Sequence[jax.Array], axis_name: AxisName | None, *, alike: bool
) -> jax.Array:
  """Returns True if an array has NaN anywhere, which equal workers know."""
  found = functools.reduce(jnp.logical_or, [jnp.isnan(x).any() for x in arrays])
  manual, own = {*manual_axes()}, {*axis_names(axis_name)} if axis_name else set()
  asked = sorted(manual - own if alike else manual | own)
  if not asked:
    return found
  found = types.mark_varying(found, tuple(x for x in asked if x in manual))
  with jax.named_scope(REPEAT):
    return lax.pmax(found.astype(jnp.int32), tuple(asked)) > 0


def totals(own: Sequence[jax.Array], axis_name: AxisName, name: str) -> list[jax.Array]:
  """Returns the sum of each array over the workers; one collective has the name."""
  note_parts(own)
  add = lambda x: lax.psum(x, axis_name)
  names = names_of(own, name)
  return [spread(add, x, axis_name, of) for x, of in zip(own, names, strict=True)]


def names_of(arrays: Sequence[jax.Array], name: str) -> list[str]:
  """Returns the name for the first array that is sent, and stages for others."""
  first = next((i for i, x in enumerate(arrays) if x.size), 0)
  return [name if i == first else STAGE for i in range(len(arrays))]


def gather(
  message: jax.Array, axis_name: AxisName, name: str, *, axis: int = 0
) -> jax.Array:
  """Gathers all workers' messages, cut along ``axis``: ``[N, M, ...]``."""
  given: Any = {"to": "invarying"} if types.is_typed(axis_name) else {}
  every = lambda message: lax.all_gather(message, axis_name, **given)
  return spread(every, message, axis_name, name, axis=axis, to=axis + 1)


def scatter(
  lines: jax.Array, axis_name: AxisName, elements: int | None = None
) -> jax.Array:
  """Sends line d of ``[N, M, ...]`` to worker d, instead of N k ``elements``."""
  count = lines.shape[0]
  if count > 2 and over_gloo():
    # With four workers gloo's own all_to_all takes 1.7 times the time of its bytes, and
    # these rounds take 1.3 times.
    sent = None if elements is None else elements // count * (count - 1)
    return scatter_within(lines, axis_name, [range(count)], sent)
  # A zero of each worker's own: where jax.vmap knows that lines are equal on all
  # workers, its rule for this collective returns an array of a wrong shape.
  lines = lines + (0 * lax.axis_index(axis_name)).astype(lines.dtype)

  exchange = lambda lines: lax.all_to_all(lines, axis_name, 0, 0, tiled=True)
  name = STAGE if elements is None else as_floats(elements, axis_name)
  return spread(exchange, lines, axis_name, name, axis=1)


def over_gloo() -> bool:
  return study.platform() == "cpu" and jax.process_count() > 1


def scatter_within(
  lines: jax.Array, axis_name: AxisName, members: Members, elements: int | None = None
) -> jax.Array:
  """Sends line k of ``[K, M, ...]`` to member k of a worker's group, as `scatter`."""
  # By permutations, because jax.vmap has no rule for grouped collectives.
  place = {worker: i for group in members for i, worker in enumerate(group)}
  own = jnp.array([place[i] for i in range(len(place))])[lax.axis_index(axis_name)]
  mine = lambda table: jnp.array(table)[own]
  parts, schedule = rounds(lines.shape[0])
  width = -(-lines.shape[1] // parts)
  last = lines.shape[1] - width  # where the second part starts
  received = lines
  whole = STAGE if elements is None else as_floats(elements, axis_name)
  for number, (to, part) in enumerate(schedule, 1):
    source = [to.index(i) for i in range(len(to))]
    came = [part[i] for i in source]
    pairs = [(group[i], group[j]) for group in members for i, j in enumerate(to)]
    line = lax.dynamic_index_in_dim(lines, mine(to), keepdims=False)
    piece = lax.dynamic_slice_in_dim(line, mine(part) * last, width)
    name = whole if number == len(schedule) else STAGE
    piece = permute(piece, axis_name, pairs, name)
    at: Any = (mine(source), mine(came) * last, *[0] * (lines.ndim - 2))
    received = lax.dynamic_update_slice(received, piece[None], at)
  return received


def pass_on(message: jax.Array, axis_name: AxisName, count: int) -> jax.Array:
  """Sends each worker's line, ``[M, ...]``, to the next worker in the ring."""
  return permute(message, axis_name, [(i, (i + 1) % count) for i in range(count)])


def permute(
  message: jax.Array, axis_name: AxisName, pairs: Pairs, name: str = STAGE
) -> jax.Array:
  """Sends each worker's line along pairs of workers; without a sender zeros come."""
  move = lambda message: lax.ppermute(message, axis_name, pairs)
  return spread(move, message, axis_name, name, axis=0)


def note_parts(arrays: Sequence[jax.Array]) -> None:
  """Notes the sizes of the arrays in the next message."""
  study.note((study.PARTS, tuple(jnp.size(x) for x in arrays)))


def rounds(size: int) -> tuple[int, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
  """Returns the parts of a line, and each round's receivers and parts, by worker."""
  # Two workers that send to each other share a connection, which gloo uses in turns. So
  # no cycle of a round has two workers, unless the size is 2 or a multiple of 4. In the
  # round of distance d, worker i sends to i + d. If half the size is odd, two rounds
  # mix it with the distance that is two less: one worker out of two takes either. Four
  # workers take all six cycles, with half a line in each: no three cycles have all
  # pairs.
  workers, half, parts = range(size), size // 2, 2 if size == 4 else 1
  if size == 4:
    cycles = [(0, *rest) for rest in itertools.permutations((1, 2, 3))]
    ways = [tuple(x[(x.index(i) + 1) % 4] for i in workers) for x in cycles]
  else:
    distances = [(d, d) for d in range(1, size)]
    if size % 4 == 2 and size > 2:
      distances[half - 3] = (half - 2, half)
      distances[half - 1] = (half, half - 2)
    ways = [tuple((i + x[i % 2]) % size for i in workers) for x in distances]
  # The parts that a worker sends to one receiver have numbers.
  sent: dict[tuple[int, int], int] = {}
  result = []
  for to in ways:
    pairs = list(enumerate(to))
    result.append((to, tuple(sent.get(pair, 0) for pair in pairs)))
    sent |= {pair: sent.get(pair, 0) + 1 for pair in pairs}
  return parts, result


def behind(arrays: Sequence[jax.Array], before: Sequence[jax.Array]) -> list[jax.Array]:
  """Returns arrays once ``before`` has come, unchanged."""
  # What comes of a barrier varies over all axes of what goes in: so messages of other
  # axes do not wait for each other, nor does one with leaves that differ in axes.
  known = [types.varying_axes(x) for x in arrays]
  before = [x for x in before if all(types.varying_axes(x) <= own for own in known)]
  if not before or any(own != known[0] for own in known):
    return list(arrays)
  return lax.optimization_barrier((list(arrays), before))[0]


def in_turn(
  arrays: Sequence[jax.Array], before: Sequence[jax.Array]
) -> list[jax.Array]:
  """Returns arrays that a GPU sends once ``before`` has come, unchanged."""
  # XLA:GPU joins all-gathers of less than 30 MiB together to one, and all-reduces too,
  # which waits for the last message; then first stages do not overlap either. It cannot
  # join two if one needs the other. They run one after the other in any case, on one
  # stream. Elsewhere nothing is joined, and between TPU slices several travel at once.
  if not before:
    return list(arrays)
  either: dict[str, Any] = {"cuda": behind, "rocm": behind}
  free = lambda arrays, _: arrays
  return lax.platform_dependent(list(arrays), list(before), default=free, **either)


def form(words: int) -> Shape:
  """Returns the shape of a line by the number of its words."""
  return (words,) if words < _LEAST else (-(-words // LANES), LANES)


def _matrices(shapes: Sequence[Shape]) -> tuple[list[tuple[int, int]], bool]:
  """Returns the rows and words of each array in a line, and whether that has lanes."""
  found = [(math.prod(shape[:-1]), shape[-1] if shape else 1) for shape in shapes]
  return found, len(form(sum(rows * words for rows, words in found))) > 1


def join(parts: Sequence[jax.Array]) -> jax.Array:
  """Joins arrays ``[L, *shape]`` to L lines: ``[L, M]``, or long ``[L, K, 128]``."""
  note_parts(parts)
  count, (matrices, long) = len(parts[0]), _matrices([x.shape[1:] for x in parts])
  if not long:
    return jnp.concatenate([x.reshape(count, -1) for x in parts], axis=1)
  # A long line has the first 128 words of all rows of each array, then the next 128,
  # and so on; then the rest of all rows; and then zeros.
  lanes, rests = [], []
  for x, (rows, width) in zip(parts, matrices, strict=True):
    words, end = x.reshape(count, rows, width), width - width % LANES
    rests.append(words[:, :, end:].reshape(count, -1))
    if end <= _MOST_CUTS:
      starts = range(0, end, LANES)
      lanes += [lax.slice_in_dim(words, at, at + LANES, axis=2) for at in starts]
    else:
      whole = words[:, :, :end].reshape(count, rows, end // LANES, LANES)
      lanes.append(lax.collapse(whole.swapaxes(1, 2), 1, 3))
  rest = jnp.concatenate(rests, axis=1)
  rest = jnp.pad(rest, [(0, 0), (0, -rest.shape[1] % LANES)])
  return jnp.concatenate([*lanes, rest.reshape(count, -1, LANES)], axis=1)


def split(lines: jax.Array, shapes: Sequence[Shape]) -> list[jax.Array]:
  """Splits L lines to arrays ``[L, *shape]``: undoes :func:`join`."""
  count, (matrices, long) = len(lines), _matrices(shapes)
  cut = lambda x, start, size: lax.slice_in_dim(x, start, start + size, axis=1)
  found, start, after = [], 0, 0
  rest = lines
  if long:
    lanes = sum(rows * (width // LANES) for rows, width in matrices)
    rest = lax.collapse(lines[:, lanes:], 1)
  for shape, (rows, width) in zip(shapes, matrices, strict=True):
    whole = width // LANES if long else 0
    left = width - whole * LANES
    words = cut(rest, after, rows * left)
    if long:
      if LANES * whole <= _MOST_CUTS:
        parts = [cut(lines, start + rows * k, rows) for k in range(whole)]
      else:
        own = cut(lines, start, rows * whole).reshape(count, whole, rows, LANES)
        parts = [own.swapaxes(1, 2).reshape(count, rows, whole * LANES)]
      words = jnp.concatenate([*parts, words.reshape(count, rows, left)], axis=2)
    found.append(words.reshape(count, *shape))
    start, after = start + rows * whole, after + rows * left
  return found


def shares(rows: jax.Array, workers: Workers) -> jax.Array:
  """Splits rows into N shares, ``[N, share, ...]``, with zeros after the last."""
  share = -(-rows.shape[0] // workers.size)
  padding = workers.size * share - rows.shape[0]
  if padding:
    rows = jnp.pad(rows, [(0, padding)] + [(0, 0)] * (rows.ndim - 1))
  return rows.reshape(workers.size, share, *rows.shape[1:])


def own_share(rows: jax.Array, workers: Workers) -> jax.Array:
  """Returns the rows that this worker owns: ``[rows, ...]`` to ``[share, ...]``."""
  number = lax.axis_index(workers.axis_name)
  return lax.dynamic_index_in_dim(shares(rows, workers), number, keepdims=False)


def place(lost: jax.Array, workers: Workers, size: int) -> jax.Array:
  """Places errors of this worker's shares, ``[groups, share, ...]``, among zeros."""
  own = lax.axis_index(workers.axis_name) % size
  mine = jnp.arange(size) == own
  placed = jnp.where(mine.reshape(-1, *[1] * (lost.ndim - 1)), lost[:, None], 0.0)
  return lax.collapse(placed, 0, 3)
