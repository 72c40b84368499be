"""The steps of a round: the worker's local step, and the exchange of displacements."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from gradcomp._src.core.state import FragmentState, OwnSteps
from gradcomp._src.exchange.collectives import pmean
from gradcomp._src.local_steps.displacement import (
  own_params,
  rounded_product,
  shaped_like,
  wide,
)
from gradcomp._src.mesh.axes import AxisName, axis_names
from gradcomp._src.mesh.study import Options, note
from gradcomp._src.mesh.types import mark_varying, other_axes


class Fragment(NamedTuple):
  """A range of leaves that are exchanged together in ``step`` of a round, 1 to H."""

  leaves: range
  step: int


def split_fragments(sizes: Sequence[int], fragments: int, every: int) -> list[Fragment]:
  """Splits leaves, in their order, into fragments of similar numbers of elements.

  The last of P fragments is exchanged in the last of H steps, and the others H/P steps
  apart before it.

  Raises:
    ValueError: there are fewer leaves than fragments.

  Example:
    >>> split_fragments([4, 4, 8], 2, every=30)
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


def fragment_sizes(tree: Any) -> list[int]:
  """Returns the numbers of elements of a tree's leaves."""
  return [math.prod(x.shape) for x in jax.tree.leaves(tree)]


def select_fragment(tree: Any, fragment: Fragment) -> Any:
  """Replaces all leaves outside a fragment by ``optax.MaskedNode``."""
  leaves, treedef = jax.tree.flatten(tree)
  hole = optax.MaskedNode()
  kept = [x if i in fragment.leaves else hole for i, x in enumerate(leaves)]
  return jax.tree.unflatten(treedef, kept)


def join_fragments(trees: Sequence[Any], like: Any) -> Any:
  """Joins the leaves of all fragments to a tree; inverts :func:`select_fragment`."""
  leaves = itertools.chain(*map(jax.tree.leaves, trees))
  return jax.tree.unflatten(jax.tree.structure(like), leaves)


@dataclasses.dataclass(frozen=True, eq=False)
class LocalRound:
  """The optimizers and options of :func:`gradcomp.local.local_steps`."""

  inner: optax.GradientTransformationExtraArgs
  outer: optax.GradientTransformationExtraArgs
  compressed: optax.GradientTransformationExtraArgs
  axes: AxisName
  every: int
  delay: int
  mixing: float

  def own_step(
    self, grads: Any, own: OwnSteps, params: Any, extra_args: Any
  ) -> tuple[Any, Any]:
    """Runs the inner optimizer; returns the displacement and the inner state."""
    at = own_params(params, own.moved)
    like = jax.eval_shape(self.inner.init, at)
    inner_state = shaped_like(own.inner_state, like)
    updates, inner_state = self.inner.update(grads, inner_state, at, **extra_args)

    def add(moved: jax.Array, update: jax.Array, x: jax.Array) -> jax.Array:
      moved = moved.reshape(update.shape)
      return self._own(moved + rounded_product(update.astype(moved.dtype)), x)

    return jax.tree.map(add, own.moved, updates, params), inner_state

  def shared_step(
    self,
    fragment: Fragment,
    number: jax.Array,
    state: FragmentState,
    moved: Any,
    params: Any,
    value: Any,
  ) -> tuple[Any, Any, FragmentState]:
    """Exchanges a fragment and updates the shared parameters, if this is its step.

    ``number`` is that of this step, from 1 on, ``moved`` the worker's displacement from
    ``params``, and ``value`` its loss, or None; ``outer`` takes the mean of all. It
    returns the updates, the displacement from the updated ones, and the state.
    """

    def is_at(step: int) -> jax.Array:
      return (number >= step) & (number % self.every == step % self.every)

    def rest(state: FragmentState) -> tuple[Any, Any, FragmentState]:
      return jax.tree.map(jnp.zeros_like, params), moved, state

    def send(state: FragmentState) -> tuple[Any, FragmentState]:
      note(Options((("every", self.every), ("delay", self.delay))))
      difference = jax.tree.map(jnp.negative, moved)
      mean, exchange = self.compressed.update(difference, state.exchange)
      return mean, state._replace(exchange=exchange)

    def arrive(mean: Any, state: FragmentState) -> tuple[Any, Any, FragmentState]:
      at = jax.tree.map(wide, params)
      given = {} if value is None else {"value": self._mean(value), "grad": mean}
      updates, outer_state = self.outer.update(mean, state.outer_state, at, **given)
      updates = optax.tree.cast_like(updates, params)
      left = jax.tree.map(self._left, moved, updates, params)
      return updates, left, state._replace(outer_state=outer_state)

    if not self.delay:
      sync = lambda state: arrive(*send(state))
      return lax.cond(is_at(fragment.step), sync, rest, state)

    def send_off(state: FragmentState) -> FragmentState:
      mean, state = send(state)
      return state._replace(arriving=mean)

    state = lax.cond(is_at(fragment.step), send_off, lambda state: state, state)
    come = lambda state: arrive(state.arriving, state)
    return lax.cond(is_at(fragment.step + self.delay), come, rest, state)

  def _mean(self, value: Any) -> jax.Array:
    """Returns the mean of the workers' losses, in the steps that exchange anyway."""
    return pmean(mark_varying(jnp.float32(value), self.axes), self.axes)

  def _left(self, moved: jax.Array, update: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the displacement from the updated parameters, after mixing."""
    if self.mixing == 1:  # 0 * NaN is no zero
      return self._own(jnp.zeros_like(moved), x)
    rest = moved - rounded_product(update.astype(moved.dtype))
    return rounded_product(rest * jnp.asarray(1 - self.mixing, rest.dtype))

  def _own(self, moved: jax.Array, x: jax.Array) -> jax.Array:
    """Types a displacement as varying over the workers, as both branches need it."""
    return mark_varying(moved, (*axis_names(self.axes), *other_axes(x, self.axes)))
