"""Measures of one worker's leaves: sums over elements, and statistics of buckets."""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.tiles import cut, tile_shape
from gradcomp._src.exchange.plan import Plan

# A CPU sorts an element in 115 ns, which is more than a step of small nets takes.
_LONGEST = 1024  # elements of a bucket, where different values are counted
_RUN = 128  # elements that follow each other in a sample of exponents
_RUNS = 128  # of these in a leaf's sample


class Sums(NamedTuple):
  """Sums over a leaf's elements, ``float32[leaves]``: means over the workers.

  Attributes:
    size: the number of elements.
    gradient: the squares of the gradient.
    residual: the squares of the residual after the step.
    owned: the squares of its owner residuals. It is a sum over the workers.
    corrected: the squares of gradient plus residual.
    unsent: the squares of its unsent part.
    mean: the squares of the result.
    true: the squares of the mean of all workers' gradients.
    product: the products of result and gradient.
    zeros: the zeros in the sent part.
    top: the elements of the sent part that are the largest of their bucket.
    levels: the number of different values in a bucket, times the size.
    spread: the largest magnitude of the gradient times the sum of magnitudes.
    union: the elements of the result that are not zero.
    exponents: the elements with each biased exponent, ``float32[leaves, 256]``.
  """

  size: jax.Array
  gradient: jax.Array
  residual: jax.Array
  owned: jax.Array
  corrected: jax.Array
  unsent: jax.Array
  mean: jax.Array
  true: jax.Array
  product: jax.Array
  zeros: jax.Array
  top: jax.Array
  levels: jax.Array
  spread: jax.Array
  union: jax.Array
  exponents: jax.Array


class WorkerLeaf(NamedTuple):
  """The arrays of one leaf on a worker in a step, in ``float32``."""

  gradient: jax.Array
  residual: jax.Array  # after the step
  corrected: jax.Array
  unsent: jax.Array
  sent: jax.Array
  mean: jax.Array


def worker_sums(plan: Plan, leaves: Mapping[int, WorkerLeaf]) -> list[Sums]:
  """Measures the leaves of one worker, by their numbers, except owner residuals."""
  codecs = _codecs(plan)
  levels = _levels([_sample(x.sent, codecs[i]) for i, x in leaves.items()])
  found = [_leaf(codecs[i], x) for i, x in leaves.items()]
  return [
    x._replace(levels=count * x.size) for x, count in zip(found, levels, strict=True)
  ]


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
    owned=zero,  # which is not found leaf by leaf, and neither are levels
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


def _codecs(plan: Plan) -> list[Codec | None]:
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
  return cut(x, codec).reshape(-1, tile_shape(codec)[-1])


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
