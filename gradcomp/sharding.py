"""Which parts of an optimizer state differ between workers."""

from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from gradcomp.transform import CompressState


def state_specs(opt_state: Any, axis_name: str) -> Any:
  """The ``PartitionSpec`` of every array of an optimizer state.

  Residuals differ between workers: the global array stacks them on their first axis,
  ``P(axis_name)``. So do the gradients that ``optax.MultiSteps`` around the exchange
  has not sent yet. Everything else, momentum too, is replicated: ``P()``.

  Args:
    opt_state: the state of any optax transformation that holds gradcomp's, or its
      ``jax.eval_shape``.
    axis_name: the axis given to the gradcomp transformation.

  Returns:
    A tree of the same structure, for ``in_specs`` and ``out_specs`` of
    ``jax.shard_map``.

  Example:
    >>> tx = optax.chain(gradcomp.qsgd(bits=4, feedback="error"), optax.sgd(0.1))
    >>> specs = state_specs(tx.init({"w": jnp.zeros(3)}), "data")
    >>> specs[0].residual["w"] == P("data"), specs[0].step == P()
    (True, True)
  """

  def specs(node: Any) -> Any:
    replicated = jax.tree.map(lambda _: PartitionSpec(), node)
    if isinstance(node, CompressState):
      return replicated._replace(residual=per_worker(node.residual))
    if isinstance(node, optax.MultiStepsState) and _exchanges(node.inner_opt_state):
      inner = state_specs(node.inner_opt_state, axis_name)
      gradients = per_worker(node.acc_grads)
      return replicated._replace(inner_opt_state=inner, acc_grads=gradients)
    return replicated

  def per_worker(tree: Any) -> Any:
    return jax.tree.map(lambda _: PartitionSpec(axis_name), tree)

  def is_leaf(node: Any) -> bool:
    return isinstance(node, CompressState | optax.MultiStepsState)

  return jax.tree.map(specs, opt_state, is_leaf=is_leaf)


def _exchanges(opt_state: Any) -> bool:
  """Whether there is a gradcomp state in it."""

  def is_ours(node: Any) -> bool:
    return isinstance(node, CompressState)

  return any(map(is_ours, jax.tree.leaves(opt_state, is_leaf=is_ours)))


def check_stacked(opt_state: Any, specs: Any, params: Any, workers: int) -> None:
  """ValueError if a part that differs between workers holds that of one alone."""
  own = {leaf.shape or (1,) for leaf in jax.tree.leaves(params)}
  stacked = {(workers * first, *rest) for first, *rest in own}
  for (path, leaf), spec in zip(
    jax.tree_util.tree_leaves_with_path(opt_state), jax.tree.leaves(specs), strict=True
  ):
    whole = leaf.shape and leaf.shape not in own and leaf.shape[0] % workers == 0
    if spec != PartitionSpec() and leaf.shape not in stacked and not whole:
      raise ValueError(
        f"`opt_state`{jax.tree_util.keystr(path)} must stack the parts of {workers} "
        f"workers on its first axis, got the shape {leaf.shape}; make the state by "
        "optimizer.init under jax.set_mesh(mesh), or, with optax.MultiSteps around the "
        "exchange, inside jax.shard_map."
      )
