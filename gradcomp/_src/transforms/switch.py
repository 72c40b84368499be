"""``switch``: transformations that replace one another at given steps."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import GetAttrKey, keystr
from jax.tree_util import tree_leaves_with_path as with_path

from gradcomp._src.checks import static_integer
from gradcomp._src.core.border import any_tree
from gradcomp._src.core.state import is_state
from gradcomp._src.mesh import agreement


class SwitchState(NamedTuple):
  """The state of :func:`gradcomp.wrappers.switch`, with the largest inner state."""

  count: jax.Array  # type: ignore[assignment]  # int32[], replicated: steps so far
  inner: Any  # the largest state of a transformation; the others keep a part of it


def switch(
  boundaries: Sequence[int], transformations: Sequence[optax.GradientTransformation]
) -> optax.GradientTransformationExtraArgs:
  """Applies one transformation after the other, each from its boundary on.

  The first applies until step ``boundaries[0]``, and so on. All are branches of one
  program: nothing is compiled again. They share one state, so that each goes on with
  the residuals and the momentum of the one before: each must keep the state of the one
  that keeps most, or a part of its arrays.

  Fang et al. warm up with a dense exchange, Lin et al. with falling densities::

    densities = [0.25, 0.0625, 0.015625, 0.004, 0.001]
    epochs = [steps * (i + 1) for i in range(4)]
    exchange = gradcomp.wrappers.switch(
      epochs,
      [gradcomp.redsync(d, axis_name="data", exchange="all_gather") for d in densities],
    )

  A density of 1 is the dense exchange, with the momentum of :func:`gradcomp.redsync`.
  Han et al. train the first third in float32:
  ``switch([steps // 3], [dense(...), aps(...)])``. A transformation without residuals
  sends the old one with its first gradient. Take one exchange for all, because only
  owners can send the owner residuals of ``two_shot``. These have the shape of the
  codec's rows: to change the bits on the way, take ``TwoShot(feedback=False)``.

  Args:
    boundaries: steps, in ascending order, one fewer than transformations.
    transformations: transformations of optax, or gradcomp's.

  Returns:
    A gradient transformation; its state has ``count``, the steps so far, and ``inner``,
    the largest state of a transformation.

  Raises:
    ValueError: boundaries are not ascending steps, or too few or many; in ``init``, the
      states of the transformations do not fit together.

  Example:
    >>> tx = switch([2], [optax.scale(1.0), optax.scale(-1.0)])
    >>> state = tx.init(jnp.ones(()))
    >>> for _ in range(3):
    ...   update, state = tx.update(jnp.ones(()), state)
    ...   print(update)
    1.0
    1.0
    -1.0

  References:
    Fang et al., `RedSync <https://arxiv.org/abs/1808.04357>`_, 2018, section 2.5; Lin
    et al., `Deep Gradient Compression <https://arxiv.org/abs/1712.01887>`_, 2018,
    section 3.3; Han et al., `APS <https://arxiv.org/abs/1911.08907>`_, 2021, section
    4.2
  """
  told = dict(locals())
  rule = "steps in ascending order, above 0 and below 2**31"
  if not isinstance(boundaries, Sequence):
    raise ValueError(f"`boundaries` must be {rule}, got {boundaries!r}.")
  steps = [static_integer("boundaries", rule, step) for step in boundaries]
  if any(a >= b for a, b in zip([0, *steps], [*steps, 2**31], strict=True)):
    raise ValueError(f"`boundaries` must be {rule}, got {list(boundaries)}.")
  choices = [optax.with_extra_args_support(tx) for tx in transformations]
  if len(choices) != len(steps) + 1:
    raise ValueError(
      f"`transformations` must be one more than the {len(steps)} boundaries, got "
      f"{len(choices)}."
    )

  def init_fn(params: Any) -> SwitchState:
    states = [tx.init(params) for tx in choices]
    largest = max(states, key=lambda state: len(jax.tree.leaves(state)))
    shapes = {path: (x.shape, x.dtype) for path, x in with_path(largest)}
    # The owner residuals of states that also have residuals: without feedback owners
    # may drop their last rounding error, as workers do.
    promised = [
      (*path, *place)
      for path, node in with_path(largest, is_leaf=is_state)
      if is_state(node) and node.residual is not None
      for place, _ in with_path(node)
      if place[0] == GetAttrKey("server_residual")
    ]
    for number, state in enumerate(states):
      name = f"`transformations`[{number}]"
      own = {path: (x.shape, x.dtype) for path, x in with_path(state)}
      for path, (shape, dtype) in own.items():
        if shapes.get(path) != (shape, dtype):
          raise ValueError(
            f"{name} must keep a part of the state that another of them keeps, but its "
            f"state{keystr(path)} is {dtype}{list(shape)}, and there it is "
            f"{shapes.get(path, 'missing')}; give all the same feedback=, exchange= "
            "and min_leaf_size=, and the same transformations around them, or "
            'exchange="all_gather" or gradcomp.exchange.TwoShot(feedback=False), whose '
            "owners keep nothing."
          )
      for path in promised:
        if path not in own:
          raise ValueError(
            f"{name} must keep the residuals of owners, state{keystr(path)}, as "
            "another of them does, or they would never be sent; give all "
            'exchange="all_gather", or gradcomp.exchange.TwoShot(feedback=False).'
          )
    return SwitchState(jnp.zeros([], jnp.int32), largest)

  def update_fn(
    updates: Any, state: SwitchState, params: Any = None, **extra_args: Any
  ) -> tuple[Any, SwitchState]:
    agreement.require_agreement("gradcomp.wrappers.switch", told, updates)

    branch = lambda tx: lambda g, inner: tx.update(g, inner, params, **extra_args)
    number = jnp.sum(state.count >= jnp.array(steps, jnp.int32), dtype=jnp.int32)
    updates, inner = lax.switch(number, [*map(branch, choices)], updates, state.inner)
    return updates, SwitchState(optax.safe_increment(state.count), inner)

  return any_tree(init_fn, update_fn)
