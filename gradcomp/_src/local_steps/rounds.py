"""The steps of a round: each worker's own, and the exchange of displacements."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from gradcomp._src.codecs.protocol import is_codec
from gradcomp._src.core.feedback import ErrorFeedback
from gradcomp._src.core.specs import make_own
from gradcomp._src.core.state import FragmentState, OwnSteps, is_own_steps
from gradcomp._src.exchange.collectives import pmean
from gradcomp._src.floats.dtypes import fitted
from gradcomp._src.kernels.common.fixed_point import sign_bit, signed
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.mesh.study import note
from gradcomp._src.mesh.types import mark_varying, put


def wide(x: jax.Array) -> jax.Array:
  """Returns an array in float32 or wider."""
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def feedback_of(feedback: Any, codec: Any) -> Any:
  """Returns the feedback of displacements; None for an exact codec."""
  if feedback != "error":
    return feedback
  # A codec that is unbiased without random numbers is exact.
  exact = is_codec(codec) and codec.unbiased and not codec.needs_key
  return None if exact else ErrorFeedback()


def first_own(
  params: Any, names: tuple[str, ...], init: Callable[[Any], Any]
) -> OwnSteps:
  """Creates displacements of zero and first inner states, in a map or for a mesh."""

  def make(params: Any) -> OwnSteps:
    # The inner optimizer gets the types of arrays that update will give it.
    params = mark_varying(params, names)
    moved = jax.tree.map(lambda x: jnp.zeros_like(wide(x)), params)
    return OwnSteps({names: mark_varying(stored((moved, init(params))), names)})

  return make_own(make, params, names, "how many workers have parameters of their own")


def stored(tree: Any) -> Any:
  """Gives each scalar of a worker one axis, so that a map can stack it."""
  return jax.tree.map(lambda x: jnp.asarray(x).reshape(jnp.shape(x) or (1,)), tree)


def numbers_of_all(opt_state: Any, mesh: Mesh | AbstractMesh) -> Any:
  """Broadcasts numbers that a user has set by hand, like a rate, to all workers."""

  def of_node(node: Any) -> Any:
    if not is_own_steps(node):
      return node
    ((names, (moved, inner_state)),) = node.by_axes.items()

    def stacked(x: Any) -> Any:
      if jnp.shape(x):
        return x
      x = jnp.broadcast_to(x, math.prod(mesh.shape[name] for name in names))
      return put(x, mesh, names, PartitionSpec(names))

    return OwnSteps({names: (moved, jax.tree.map(stacked, inner_state))})

  return jax.tree.map(of_node, opt_state, is_leaf=is_own_steps)


def own_params(params: Any, moved: Any) -> Any:
  """Adds a worker's displacement to the parameters; ValueError for other shapes."""

  def add(path: Any, x: jax.Array, step: jax.Array) -> jax.Array:
    if step.shape != (x.shape or (1,)):
      raise ValueError(
        f"`opt_state` must be that of one worker, whose own steps of "
        f"{jax.tree_util.keystr(path)} have the shape {x.shape or (1,)}, got "
        f"{step.shape}; call this inside the map, or in a loss that is given to "
        "gradcomp.value_and_grad, and make the state by optimizer.init inside the map "
        "or under jax.set_mesh(mesh)."
      )
    return (wide(x) + step.reshape(x.shape)).astype(x.dtype)

  return jax.tree_util.tree_map_with_path(add, params, moved)


def rounded_product(x: jax.Array) -> jax.Array:
  """Returns a product unchanged, protected from contraction with a sum to an FMA."""
  if x.dtype != jnp.float32:
    return x
  # Contracted, the product of a learning rate would be rounded in some programs only.
  return signed(jnp.abs(x), sign_bit(x))


def split_fragments(tree: Any, fragments: int) -> list[range]:
  """Splits leaves, in order, into fragments of similar size, by their numbers."""
  sizes = [math.prod(x.shape) for x in jax.tree.leaves(tree)]
  if fragments > max(len(sizes), 1):
    raise ValueError(
      f"`fragments` must be at most the number of leaves, {len(sizes)}, got "
      f"{fragments}; no leaf is cut."
    )
  ends = list(itertools.accumulate(sizes))
  borders = [0]
  for i in range(1, fragments):
    goal = sum(sizes) * i / fragments
    nearest = min(range(len(sizes)), key=lambda j: abs(ends[j] - goal)) + 1
    # Each fragment has a leaf, and leaves one for each that comes.
    borders.append(min(max(nearest, borders[-1] + 1), len(sizes) - fragments + i))
  return [range(*pair) for pair in itertools.pairwise([*borders, len(sizes)])]


def select_fragment(tree: Any, fragment: range) -> Any:
  """Replaces all leaves outside a fragment by ``optax.MaskedNode``."""
  leaves, treedef = jax.tree.flatten(tree)
  kept = [x if i in fragment else optax.MaskedNode() for i, x in enumerate(leaves)]
  return jax.tree.unflatten(treedef, kept)


@dataclasses.dataclass(frozen=True, eq=False)
class LocalRound:
  """The optimizers and options of :func:`gradcomp.local.local_steps`."""

  inner: optax.GradientTransformationExtraArgs
  outer: optax.GradientTransformationExtraArgs
  compressed: optax.GradientTransformationExtraArgs
  plain: optax.GradientTransformationExtraArgs  # the dense mean, without a state
  axes: AxisName
  every: int
  start: int
  fragments: int
  delay: int
  mixing: float

  def own_step(
    self, grads: Any, own: OwnSteps, params: Any, extra_args: Any
  ) -> tuple[Any, Any]:
    """Runs the inner optimizer; returns the displacement and the inner state."""
    at = own_params(params, own.moved)
    like = jax.eval_shape(self.inner.init, at)
    reshaped = lambda x, y: jnp.reshape(x, y.shape)
    inner_state = jax.tree.map(reshaped, own.inner_state, like)
    updates, inner_state = self.inner.update(grads, inner_state, at, **extra_args)

    def add(moved: jax.Array, update: jax.Array, x: jax.Array) -> jax.Array:
      moved = moved.reshape(update.shape)
      moved += rounded_product(update.astype(moved.dtype))
      return mark_varying(moved, self.axes, x)

    return jax.tree.map(add, own.moved, updates, params), inner_state

  def all_share(
    self, number: jax.Array, states: Any, moved: Any, params: Any, value: Any
  ) -> tuple[Any, Any, tuple[FragmentState, ...]]:
    """Exchanges the fragments of a local step, from 1 on, or all, data-parallel."""
    zero = lambda moved, x: mark_varying(jnp.zeros_like(moved), self.axes, x)
    is_at = lambda at: (number >= at) & (number % self.every == at % self.every)

    def left(moved: jax.Array, update: jax.Array, x: jax.Array) -> jax.Array:
      """Returns the displacement from the updated parameters, after mixing."""
      if self.mixing == 1:  # 0 * NaN is no zero
        return zero(moved, x)
      rest = moved - rounded_product(update.astype(moved.dtype))
      return rounded_product(rest * jnp.asarray(1 - self.mixing, rest.dtype))

    def share(fragment: range, step: int, state: FragmentState, all_moved: Any) -> Any:
      """Exchanges a fragment and updates the shared parameters, in its step."""
      moved, shared = (select_fragment(x, fragment) for x in (all_moved, params))
      rest = lambda state: (jax.tree.map(jnp.zeros_like, shared), moved, state)

      def send(state: FragmentState) -> FragmentState:
        note(("every", self.every))
        note(("delay", self.delay))
        difference = jax.tree.map(jnp.negative, moved)
        mean, exchange = self.compressed.update(difference, state.exchange)
        return state._replace(exchange=exchange, arriving=mean)

      def arrive(state: FragmentState) -> tuple[Any, Any, FragmentState]:
        at, mean = jax.tree.map(wide, shared), state.arriving
        given: dict[str, Any] = {}
        if value is not None:
          own = mark_varying(jnp.float32(value), self.axes)
          given = {"value": pmean(own, self.axes), "grad": mean}
        updates, outer_state = self.outer.update(mean, state.outer_state, at, **given)
        updates = optax.tree.cast_like(updates, shared)
        kept = mean if self.delay else None
        state = state._replace(outer_state=outer_state, arriving=kept)
        return updates, jax.tree.map(left, moved, updates, shared), state

      if not self.delay:
        return lax.cond(is_at(step), lambda state: arrive(send(state)), rest, state)
      state = lax.cond(is_at(step), send, lambda state: state, state)
      return lax.cond(is_at(step + self.delay), arrive, rest, state)

    def of_fragments(moved: Any, states: Any) -> tuple[Any, Any, Any]:
      parts = split_fragments(params, self.fragments)
      # H/P steps apart, and the last in the last step of a round.
      steps = (self.every * i // self.fragments for i in range(1, len(parts) + 1))
      shared = map(share, parts, steps, states, itertools.repeat(moved))
      new, left, kept = zip(*shared, strict=True)
      joined = lambda trees: jax.tree.unflatten(
        jax.tree.structure(params), itertools.chain(*map(jax.tree.leaves, trees))
      )
      return joined(new), joined(left), kept

    def parallel(moved: Any, states: Any) -> tuple[Any, Any, Any]:
      note(("stateless", True))
      mean, _ = self.plain.update(moved, self.plain.init(moved))
      new = jax.tree.map(lambda x, like: fitted(x, like.dtype), mean, params)
      return new, jax.tree.map(zero, moved, params), states

    if not self.start:
      return of_fragments(moved, states)
    return lax.cond(number > 0, of_fragments, parallel, moved, states)
