"""Refits of codec state, and what it counts."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.codecs.protocol import FittedCodec, LeafCodec, is_fitted
from gradcomp._src.codecs.sparse import Selected
from gradcomp._src.codecs.sums.records import Memory


class Adding(NamedTuple):
  """An all-reduce of ``int32`` counts, and its number of workers."""

  add: Callable[[jax.Array], jax.Array]
  workers: int


def refitted(
  codecs: Sequence[LeafCodec],
  leaves: Sequence[jax.Array],
  shared: Sequence[Any],
  kinds: Sequence[Hashable],
  step: jax.Array,
  adding: Callable[[Sequence[int]], Adding],
) -> list[Any]:
  """Returns the shared codec states of a step, after refits that are due.

  A fitted codec counts all leaves that it encodes every ``refit_every`` steps. Counts
  are added as integers, exactly, so that all workers fit the same levels.

  Args:
    codecs: the codec of each leaf.
    leaves: ``float32`` arrays.
    shared: the codec state of each leaf that all workers share.
    kinds: a value for each leaf; leaves with an equal one have states of one type.
    step: ``int32[]``.
    adding: a function from the numbers of a codec's leaves to their all-reduce.
  """
  result = list(shared)
  for codec in dict.fromkeys(filter(is_fitted, codecs)):
    own = [i for i, other in enumerate(codecs) if other == codec]
    add, workers = adding(own)
    # The counts of all leaves and workers fit in 32 bits, cut to fewer digits if need
    # be.
    most = len(own) * workers * codec.most_counted
    shift = max(0, most.bit_length() - 31)

    def fit(old: list[jax.Array]) -> list[jax.Array]:
      counts = sum(_measure(codec, leaves[i]) >> shift for i in own)  # noqa: B023
      total = add(jnp.asarray(counts))  # noqa: B023
      return [codec.fit(total, levels) for levels in old]  # noqa: B023

    first = {kinds[i]: shared[i] for i in reversed(own)}
    due = step % codec.refit_every == 0
    again = lax.cond(due, fit, lambda old: old, list(first.values()))
    fitted = dict(zip(first, again, strict=True))
    for i in own:
      result[i] = fitted[kinds[i]]
  return result


def used_entries(memory: Memory) -> jax.Array | None:
  """Returns the number of entries that each row sent, if the codec state counts them.

  Example:
    >>> used_entries(Memory()) is None
    True
  """
  return memory.own.used if isinstance(memory.own, Selected) else None


@functools.partial(jax.jit, static_argnums=0)
def _measure(codec: FittedCodec, leaf: jax.Array) -> jax.Array:
  """Counts a leaf's elements; jitted, so that leaves of one shape are traced once."""
  return codec.measure(leaf)
