"""The collectives, which send lines of words between workers.

Messages are 32-bit words or whole bytes, because XLA widens narrower floats and
integers of less than a byte on the way. In each exchange, one collective completes the
mean. Its name holds the number of elements of that mean, from which
:func:`gradcomp.wire_report` computes the bytes of a plain mean. All other collectives
are named stages. Under Auto axes each device sends a part of the words: see
:func:`spread`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from gradcomp._src.exchange.permutations import rounds
from gradcomp._src.floats.dtypes import is_narrow, widened
from gradcomp._src.mesh.axes import AxisName, automatic_axes
from gradcomp._src.mesh.study import Parts, note
from gradcomp._src.mesh.types import is_typed


def devices(axis_name: AxisName) -> int:
  """Returns the number of devices that share the work of one worker."""
  return math.prod(automatic_axes(axis_name).values())


def spread(
  function: Callable[[jax.Array], jax.Array],
  words: jax.Array,
  axis_name: AxisName,
  name: str,
  *,
  ndim: int | None = None,
) -> jax.Array:
  """Runs a collective in which each device sends a part of the last axis.

  ``function`` treats all places of the last axis of ``words``, ``[..., M]``, equally.
  Zeros fill M up to a multiple of the number of devices; every device sends a scalar.
  XLA's own transfers between devices do not get the name. The result has ``ndim`` axes,
  of which the last is again M; by default those of ``words``.
  """
  axes = automatic_axes(axis_name)
  named = jax.named_scope(name)(function)
  if not axes or not words.ndim:
    return named(words)
  length = words.shape[-1]
  filling = -length % math.prod(axes.values())
  # The constraint keeps the words whole outside of the map. Without it, XLA would shard
  # the operands of the words, and the arrays that are computed from them. That takes
  # many small messages, and whole leaves would come out sharded.
  words = jax.lax.with_sharding_constraint(words, PartitionSpec())
  padded = jnp.pad(words, [(0, 0)] * (words.ndim - 1) + [(0, filling)])

  def cut(ndim: int) -> PartitionSpec:
    return PartitionSpec(*[None] * (ndim - 1), tuple(axes))

  mapped = jax.shard_map(
    named,
    in_specs=cut(words.ndim),
    out_specs=cut(words.ndim if ndim is None else ndim),
    axis_names=set(axes),
    check_vma=is_typed(axis_name),
  )
  whole = jax.lax.with_sharding_constraint(mapped(padded), PartitionSpec())
  return whole[..., :length]


class Workers(NamedTuple):
  """The workers that exchange. ``scale`` is 1/N for a mean, and 1 for a sum."""

  axis_name: AxisName
  size: int
  scale: float


STAGE = "gradcomp_stage"  # the name of every other collective


def final_stage(elements: int, workers: Workers) -> str:
  """Returns the name of the collective that completes a mean of ``elements`` elements.

  The name holds the number of elements in one device's shard, and of workers.
  """
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

  def maximum(x: jax.Array) -> jax.Array:
    return lax.pmax(x, axis_name)

  if x.dtype == jnp.uint8:
    return spread(maximum, x, axis_name, STAGE)
  # Such floats have the order of their bit patterns, with NaN as the largest. A maximum
  # of floats may drop NaN.
  magnitude = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
  top = spread(maximum, magnitude, axis_name, STAGE)
  return lax.bitcast_convert_type(top, jnp.float32)


def totals(
  arrays: Sequence[jax.Array], axis_name: AxisName, name: str
) -> list[jax.Array]:
  """Returns the sum of each array over the workers, in collectives of this name."""
  if devices(axis_name) == 1:
    with jax.named_scope(name):
      return psum(arrays, axis_name)  # in one message
  return [spread(lambda x: psum(x, axis_name), x, axis_name, name) for x in arrays]


def gather(message: jax.Array, axis_name: AxisName, name: str) -> jax.Array:
  """Gathers each worker's message at every worker: ``[M]`` to ``[N, M]``.

  If types are tracked, the result is typed as equal on all workers.
  """

  def every(message: jax.Array) -> jax.Array:
    if is_typed(axis_name):
      return lax.all_gather(message, axis_name, to="invarying")
    return lax.all_gather(message, axis_name)

  return spread(every, message, axis_name, name, ndim=message.ndim + 1)


def scatter(
  lines: jax.Array, axis_name: AxisName, elements: int | None = None
) -> jax.Array:
  """Sends line d of ``[N, M]`` to worker d; line s of the result is from worker s.

  ``elements`` is the number of ``float32`` that all lines replace, a multiple of N;
  None if they are a stage of a mean.
  """
  count = lines.shape[0]
  if count > 2 and _over_gloo():
    # With four workers gloo's own all_to_all takes 1.7 times the time of its bytes, and
    # these rounds take 1.3 times.
    sent = None if elements is None else elements // count * (count - 1)
    return scatter_within(lines, axis_name, [range(count)], sent)

  # A zero of each worker's own: where jax.vmap knows that lines are equal on all
  # workers, its rule for this collective returns an array of a wrong shape.
  lines = lines + (0 * lax.axis_index(axis_name)).astype(lines.dtype)

  def exchange(lines: jax.Array) -> jax.Array:
    return lax.all_to_all(lines, axis_name, 0, 0, tiled=True)

  name = STAGE if elements is None else as_floats(elements, axis_name)
  return spread(exchange, lines, axis_name, name)


def _over_gloo() -> bool:
  return jax.default_backend() == "cpu" and jax.process_count() > 1


def scatter_within(
  lines: jax.Array,
  axis_name: AxisName,
  members: Sequence[Sequence[int]],
  elements: int | None = None,
) -> jax.Array:
  """Sends line k of ``[K, M]`` to member k of the worker's group: see :func:`scatter`.

  ``members`` are the workers of each group, K a group. Every worker is in one group.
  """
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
    piece = lax.dynamic_slice(lines, (mine(to), mine(part) * last), (1, width))
    name = whole if number == len(schedule) else STAGE
    piece = permute(piece, axis_name, pairs, name)
    at = (mine(source), mine(came) * last)
    received = lax.dynamic_update_slice(received, piece, at)
  return received


def pass_on(message: jax.Array, axis_name: AxisName, count: int) -> jax.Array:
  """Sends each worker's message to the next worker in the ring."""
  ring = [(i, (i + 1) % count) for i in range(count)]
  return permute(message, axis_name, ring)


def permute(
  message: jax.Array,
  axis_name: AxisName,
  pairs: Sequence[tuple[int, int]],
  name: str = STAGE,
) -> jax.Array:
  """Sends each worker's message along pairs of workers; without a sender zeros come."""

  def move(message: jax.Array) -> jax.Array:
    return lax.ppermute(message, axis_name, pairs)

  return spread(move, message, axis_name, name)


def note_parts(arrays: Sequence[jax.Array]) -> None:
  """Notes the sizes of the arrays in the next message."""
  note(Parts(tuple(jnp.size(x) for x in arrays)))
