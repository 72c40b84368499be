"""Which parts of an optimizer state differ between workers."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from gradcomp.transform import CompressState


def state_specs(opt_state: Any, axis_name: str) -> Any:
  """The ``PartitionSpec`` of every array of an optimizer state.

  Residuals differ between workers: the global array stacks them on their first axis,
  ``P(axis_name)``. Everything else, momentum too, is replicated: ``P()``.

  Args:
    opt_state: the state of any optax transformation that holds gradcomp's, or its
      ``jax.eval_shape``.
    axis_name: the axis given to the gradcomp transformation.

  Returns:
    A tree of the same structure, for ``in_specs`` and ``out_specs`` of
    ``jax.shard_map``.

  Example:
    >>> tx = optax.chain(gradcomp.qsgd(bits=4, feedback="error"), optax.sgd(0.1))
    >>> state_specs(tx.init({"w": jnp.zeros(3)}), "data")[0].residual
    {'w': PartitionSpec('data',)}
  """

  def specs(node: Any) -> Any:
    replicated = jax.tree.map(lambda _: PartitionSpec(), node)
    if not isinstance(node, CompressState):
      return replicated
    per_worker = jax.tree.map(lambda _: PartitionSpec(axis_name), node.residual)
    return replicated._replace(residual=per_worker)

  return jax.tree.map(
    specs, opt_state, is_leaf=lambda node: isinstance(node, CompressState)
  )
