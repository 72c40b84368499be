"""Measures of a step's messages by sums of leaves, for `gradcomp.telemetry.inspect`."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.tiles import tile_shape
from gradcomp._src.core.fingerprint import leaf_fingerprints
from gradcomp._src.core.residual_storage import is_stored, read_residual
from gradcomp._src.core.state import CompressState, measures, with_measures
from gradcomp._src.exchange.collectives import STAGE, Workers, psum
from gradcomp._src.exchange.owners import OwnerResiduals, owned_leaves
from gradcomp._src.exchange.plan import MessagePlan, own_axes
from gradcomp._src.exchange.step import Leaves, Reduced, Step
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.mesh.types import mark_varying

# A prime, so that no axis of a leaf falls into step with the parts.
PARTS = 1021


def sketch(x: jax.Array) -> jax.Array:
  r"""Adds the elements of an array, with random signs, in up to 1021 parts.

  Sketches are linear: that of a sum is the sum of sketches. The square of a sketch's
  norm is an unbiased estimate of the array's. Its standard deviation is
  :math:`\sqrt{2 / 1021}`, or 4.4 % of it, if the elements are spread over the parts.
  An array of at most 1021 elements is its own sketch.

  References:
    Charikar et al., `Finding Frequent Items in Data Streams
    <https://doi.org/10.1007/3-540-45465-9_59>`_, 2002
  """
  flat = x.reshape(-1)
  if flat.size <= PARTS:
    return flat
  bits = lax.bitcast_convert_type(flat, jnp.uint32)
  # A random sign of each position, equal in every step: the first bit of the finalizer
  # of MurmurHash3.
  word = lax.iota(jnp.uint32, flat.size) * np.uint32(0x9E3779B1)
  word = (word ^ (word >> 16)) * np.uint32(0x85EBCA6B)
  word = (word ^ (word >> 13)) * np.uint32(0xC2B2AE35)
  bits = bits ^ (word & np.uint32(0x80000000))
  signed = lax.bitcast_convert_type(bits, jnp.float32)
  padded = jnp.pad(signed, (0, -flat.size % PARTS))
  return jnp.sum(padded.reshape(-1, PARTS), axis=0)


# A CPU sorts an element in 115 ns, which is more than a step of small nets takes.
_LONGEST = 1024  # elements of a bucket, where different values are counted
_RUN = 128  # elements that follow each other in a sample of exponents
_RUNS = 128  # of these in a leaf's sample


class Sums(NamedTuple):
  """Sums over a leaf's elements, ``float32[leaves]``: means over the workers."""

  size: jax.Array  # elements
  gradient: jax.Array  # squares of the gradient
  residual: jax.Array  # squares of the residual after the step
  owned: jax.Array  # squares of the owner residuals, added over the workers
  corrected: jax.Array  # squares of gradient plus residual
  unsent: jax.Array  # squares of the unsent part
  mean: jax.Array  # squares of the result
  true: jax.Array  # squares of the mean of all workers' gradients
  product: jax.Array  # products of result and gradient
  zeros: jax.Array  # zeros in the sent part
  top: jax.Array  # elements of the sent part that are the largest of their bucket
  levels: jax.Array  # different values in a bucket, times the size
  spread: jax.Array  # the largest magnitude of the gradient times all magnitudes
  union: jax.Array  # elements of the result that are not zero
  equal: jax.Array  # elements of leaves with the same gradient on all workers
  exponents: jax.Array  # elements with each biased exponent, float32[leaves, 256]


class WorkerLeaf(NamedTuple):
  """The arrays of one leaf on a worker in a step, in ``float32``."""

  gradient: jax.Array
  residual: jax.Array  # after the step
  corrected: jax.Array
  unsent: jax.Array
  sent: jax.Array
  mean: jax.Array


# Jitted, so that leaves of equal shapes and codecs share a trace.
@functools.partial(jax.jit, static_argnums=0)
def _leaf(codec: Codec | None, leaf: WorkerLeaf) -> Sums:
  """Measures a leaf of one worker."""
  gradient = leaf.gradient
  most = jnp.maximum(jnp.max(gradient, initial=0.0), -jnp.min(gradient, initial=0.0))
  buckets = jnp.abs(_buckets(leaf.sent, codec))
  largest = jnp.max(buckets, axis=-1, keepdims=True, initial=0.0)
  square, zero = squares(gradient), jnp.float32(0.0)
  return Sums(
    size=jnp.float32(gradient.size),
    gradient=square,
    residual=squares(leaf.residual),
    owned=zero,  # which is not found leaf by leaf; nor are levels, and what is equal
    corrected=squares(leaf.corrected),
    unsent=squares(leaf.unsent),
    mean=squares(leaf.mean),
    true=square,  # unless workers exchange something
    product=jnp.sum(leaf.mean * gradient),
    zeros=_count(leaf.sent == 0),
    top=_count((buckets == largest) & (largest > 0)),
    levels=zero,
    spread=most * jnp.sum(jnp.abs(gradient)),
    union=_count(leaf.mean != 0),
    equal=zero,
    exponents=_exponents(gradient),
  )


def squares(x: jax.Array) -> jax.Array:
  """Returns the sum of the squares of all elements."""
  return jnp.sum(x * x)


def _count(x: jax.Array) -> jax.Array:
  # A CPU counts in float32 twice as fast as in integers, exactly up to 2**24 in a row.
  return jnp.sum(jnp.sum(jnp.atleast_1d(x).astype(jnp.float32), axis=-1))


def _exponents(x: jax.Array) -> jax.Array:
  """Counts biased exponents, ``float32[256]``, in a sample of up to 2**14 elements."""
  flat = x.reshape(-1)
  runs = flat.size // _RUN
  if runs > _RUNS:
    picked = np.arange(_RUNS) * runs // _RUNS
    flat = flat[: runs * _RUN].reshape(runs, _RUN)[picked].reshape(-1)
  place = lax.bitcast_convert_type(flat, jnp.uint32) >> 23 & 255
  counts = jnp.zeros(256, jnp.float32).at[place].add(1.0)
  return counts * (x.size / max(flat.size, 1))


def _codecs(plan: MessagePlan) -> list[Codec | None]:
  """Returns the codec of each leaf's rows; None for leaves sent as low-rank factors."""
  result: dict[int, Codec] = {}
  for message in plan.messages:
    layout = message.layout
    for i, slot, like in zip(message.leaves, layout.slots, layout.like, strict=True):
      if like.shape == plan.leaves[i].shape:
        result[i] = layout.codecs[slot.group]
  return [result.get(i) for i in range(len(plan.names))]


def _buckets(x: jax.Array, codec: Codec | None) -> jax.Array:
  """Splits a leaf into its codec's buckets, ``[n, width]``. Zeros fill the last."""
  if codec is None or not x.size:
    return x.reshape(1, -1)
  return codec.split(x).reshape(-1, tile_shape(codec)[-1])


def _sample(sent: jax.Array, codec: Codec | None) -> jax.Array:
  """Returns the middle bucket of a leaf; all of it if it is shorter than one."""
  buckets = _buckets(sent, codec)
  whole = sent.size // (buckets.shape[1] or 1)
  return (buckets[whole // 2] if whole else sent.reshape(-1))[:_LONGEST]


def _levels(samples: Sequence[jax.Array]) -> list[jax.Array]:
  """Counts the different values in each sample."""
  alike: dict[int, list[int]] = {}
  for i, sample in enumerate(samples):
    alike.setdefault(sample.size, []).append(i)
  result: dict[int, jax.Array] = {}
  for size, numbers in alike.items():
    values = jnp.sort(jnp.stack([samples[i] for i in numbers]), axis=1)
    new = jnp.sum(values[:, 1:] != values[:, :-1], axis=1) + min(size, 1)
    result |= zip(numbers, new.astype(jnp.float32), strict=True)
  return [result[i] for i in range(len(samples))]


def watched(state: CompressState, leaves: int) -> CompressState:
  """Returns a state with sums for ``leaves`` leaves, NaN until a step measures."""
  return with_measures(state, _filled(leaves, jnp.nan))


def _filled(leaves: int, value: float) -> Sums:
  column = jnp.full(leaves, value, jnp.float32)
  sums = Sums._make([column] * len(Sums._fields))
  return sums._replace(exponents=jnp.full((leaves, 256), value, jnp.float32))


def measured(
  state: CompressState, step: Step, updates: Any, corrected: Leaves, reduced: Reduced
) -> CompressState:
  """Returns the state after a step, with the sums of the step if it is inspected."""
  if measures(state) is None:
    return state
  plan, workers = step.plan, step.workers
  # Under Explicit axes gradients are addends, an Nth of a worker's gradient elsewhere.
  size = 1 if workers is None else workers.size
  factor = 1.0 if workers is None else workers.scale * size
  residuals = map(read_residual, jax.tree.leaves(state.residual, is_leaf=is_stored))
  none = [jnp.zeros(1, jnp.float32)] * len(corrected)
  before = jax.tree.leaves(updates), list(residuals) or none, corrected
  after = reduced.unsent, reduced.sent, reduced.mean or _unknown(plan)
  leaves = []
  for column in zip(*before, *after, strict=True):
    leaf = WorkerLeaf(*(x.astype(jnp.float32) for x in column))
    gradient, residual = factor * leaf.gradient, factor * leaf.residual
    leaves.append(leaf._replace(gradient=gradient, residual=residual))
  # Types tell leaves apart that differ over other axes, so they share no array.
  groups: dict[tuple[str, ...], list[int]] = {}
  for i, others in enumerate(plan.others):
    groups.setdefault(others, []).append(i)
  found, codecs = [_filled(0, 0.0)], _codecs(plan)
  for others, numbers in groups.items():
    sums = [_leaf(codecs[i], leaves[i]) for i in numbers]
    own = jax.tree.map(lambda *x: jnp.stack(x), *sums)
    levels = _levels([_sample(leaves[i].sent, codecs[i]) for i in numbers])
    own = own._replace(levels=jnp.stack(levels) * own.size)
    owned = _owned(plan, state.server_residual, others)[np.array(numbers)]
    words = leaf_fingerprints([before[0][i] for i in numbers])[:, 0]
    own = own._replace(owned=size * owned, equal=_digits(words, size))
    of_group = [leaves[i] for i in numbers]
    found.append(_over_workers(plan, own, of_group, workers, others))
  order = np.argsort([i for numbers in groups.values() for i in numbers])
  in_order = lambda *x: jnp.concatenate(x)[order]
  return with_measures(state, jax.tree.map(in_order, *found))


# One float a worker shows whether all have the same word: some bits of it are digits to
# the base N + 1. A digit of the sum counts the workers with that bit. The sum is below
# 2**24, and so exact in any order. Of 8 workers, 7 bits fit.
def _places(workers: int) -> np.ndarray:
  """Returns the powers of N + 1 with room for N."""
  digits = int(24 / math.log2(workers + 1))
  return (workers + 1) ** np.arange(digits, dtype=np.uint32)


def _digits(words: jax.Array, workers: int) -> jax.Array:
  """Returns bits of words, ``uint32[leaves]``, as digits: ``float32[leaves]``."""
  places = _places(workers)
  bits = (words[:, None] >> np.arange(places.size, dtype=np.uint32)) & np.uint32(1)
  return jnp.sum(bits * places, axis=1).astype(jnp.float32)


def _same_bits(total: jax.Array, workers: int) -> jax.Array:
  """Returns whether all workers had one word, from their sum: ``bool[leaves]``."""
  # Workers with other words pass by chance: of two workers, one leaf of 2**15.
  counts = total.astype(jnp.uint32)[:, None] // _places(workers) % (workers + 1)
  return jnp.all((counts == 0) | (counts == workers), axis=1) & (workers > 1)


def _unknown(plan: MessagePlan) -> list[jax.Array]:
  """Returns NaN in place of means that stay with their owners."""
  # Typed as a mean is, which is equal on all workers.
  nan = [jnp.full(leaf.shape, jnp.nan, jnp.float32) for leaf in plan.leaves]
  typed = lambda x, axes: mark_varying(x, axes) if axes else x
  return list(map(typed, nan, plan.others))


def _over_workers(
  plan: MessagePlan,
  own: Sums,
  leaves: Sequence[WorkerLeaf],
  workers: Workers | None,
  others: tuple[str, ...],
) -> Sums:
  """Averages sums over the workers, and estimates the square norm of the true mean."""
  # No worker has the true mean of a leaf. It is a m + r, where m is the result and r is
  # at right angles to m. So is each worker's gradient, and the means of the workers' a
  # and r are the a and r of the true mean. Workers know a from scalar products, and
  # estimate the length of the mean r from sketches.
  if workers is None:
    own = own._replace(equal=jnp.zeros_like(own.size))
  else:
    a, sketches = _along(own), []
    if plan.sends:
      sketches = [sketch(x.gradient - a[i] * x.mean) for i, x in enumerate(leaves)]
    # Every worker knows the size, and in its place the digits are sent.
    unknown: Any = None
    flat, restore = ravel_pytree((own._replace(size=unknown), sketches))
    total = _sum(flat, workers.axis_name)
    same = _same_bits(restore(total)[0].equal, workers.size)
    size = own.size
    own, sketches = restore(total / workers.size)
    own = own._replace(size=size, equal=jnp.where(same, size, 0.0))
    if sketches:
      across = jnp.stack(list(map(squares, sketches)))
      own = own._replace(true=_along(own) * own.product + across)
  if others:
    flat, restore = ravel_pytree(own)
    own = restore(_sum(flat, others))
  return own


def _sum(x: jax.Array, axis_name: AxisName) -> jax.Array:
  with jax.named_scope(STAGE):
    return psum(x, axis_name)


def _along(sums: Sums) -> jax.Array:
  """Returns a: a gradient's projection on the result, as a multiple of the result."""
  return sums.product / jnp.where(sums.mean > 0, sums.mean, 1.0)


def _owned(
  plan: MessagePlan, residuals: OwnerResiduals | None, others: tuple[str, ...]
) -> jax.Array:
  """Returns squares of this worker's owner residuals, ``float32[leaves + 1]``."""
  result = jnp.zeros(len(plan.names) + 1, jnp.float32)
  if residuals is None or plan.axis_name is None:
    return result
  axes = own_axes(plan.axis_name, others)
  number = lax.axis_index(plan.axis_name)
  places = owned_leaves(plan, number).get(axes)
  for place, rows in zip(places or (), residuals[axes] if places else (), strict=True):
    by_row = jnp.sum(rows * rows, axis=range(1, rows.ndim))
    result = result.at[place].add(by_row)
  return result
