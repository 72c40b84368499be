"""Fragments of the parameters, each with its own step of a round."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax


class Fragment(NamedTuple):
  """A range of leaves that are exchanged together in ``step`` of a round, 1 to H."""

  leaves: range
  step: int


def cut(sizes: Sequence[int], fragments: int, every: int) -> list[Fragment]:
  """Splits leaves, in their order, into fragments of similar numbers of elements.

  The last of P fragments is exchanged in the last of H steps, and the others H/P steps
  apart before it.

  Raises:
    ValueError: there are fewer leaves than fragments.

  Example:
    >>> cut([4, 4, 8], 2, every=30)
    [Fragment(leaves=range(0, 2), step=15), Fragment(leaves=range(2, 3), step=30)]
  """
  if fragments > max(len(sizes), 1):
    raise ValueError(
      f"`fragments` must be at most the number of leaves, {len(sizes)}, for no leaf is "
      f"cut, got {fragments}."
    )
  ends = list(itertools.accumulate(sizes))
  borders = [0]
  for i in range(1, fragments):
    goal = sum(sizes) * i / fragments
    nearest = min(range(len(sizes)), key=lambda j: abs(ends[j] - goal)) + 1
    # Each fragment has a leaf, and leaves one for each that comes.
    borders.append(min(max(nearest, borders[-1] + 1), len(sizes) - fragments + i))
  borders.append(len(sizes))
  pairs = itertools.pairwise(borders)
  return [
    Fragment(range(*pair), every * (i + 1) // fragments) for i, pair in enumerate(pairs)
  ]


def sizes_of(tree: Any) -> list[int]:
  """Returns the numbers of elements of a tree's leaves."""
  return [math.prod(x.shape) for x in jax.tree.leaves(tree)]


def select(tree: Any, fragment: Fragment) -> Any:
  """Replaces all leaves outside a fragment by ``optax.MaskedNode``."""
  leaves, treedef = jax.tree.flatten(tree)
  hole = optax.MaskedNode()
  kept = [x if i in fragment.leaves else hole for i, x in enumerate(leaves)]
  return jax.tree.unflatten(treedef, kept)


def join(trees: Sequence[Any], like: Any) -> Any:
  """Joins the leaves of all fragments to a tree: the inverse of :func:`select`."""
  leaves = itertools.chain(*map(jax.tree.leaves, trees))
  return jax.tree.unflatten(jax.tree.structure(like), leaves)
