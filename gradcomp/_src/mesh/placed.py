"""How the parameters of a train step lie on Auto axes, which no type has in a trace.

A context has their specs, by the path and the shape of each leaf. It is a part of the
keys of JAX's caches, as a study is.
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from gradcomp._src.mesh.axes import automatic_axes
from gradcomp._src.mesh.specs import axes_in, restrict_spec
from gradcomp._src.mesh.trees import unboxed
from gradcomp._src.mesh.types import placed_spec

# ``with PLACED(by_leaf(params, specs)):`` in a trace.
PLACED: Any = jax.make_user_context(None)


def specs_over(params: Any, axes: Collection[str]) -> tuple[PartitionSpec, ...] | None:
  """Returns the spec of each array; None if these axes shard none of them."""
  specs = tuple(placed_spec(x) for x in jax.tree.leaves(params))
  return specs if axes_in(specs).intersection(axes) else None


def by_leaf(params: Any, specs: Sequence[PartitionSpec]) -> Any:
  """Returns the specs by leaf, for :data:`PLACED`."""
  leaves = jax.tree_util.tree_leaves_with_path(unboxed(params))
  return tuple(map(_name, *zip(*leaves, strict=True))), tuple(specs)


def shards_of(grads: Any) -> Any:
  """Returns the specs of a step's gradients over Auto axes that no map has bound.

  None if no such axis shards any of them.
  """
  if PLACED.value is None:
    return None
  known, axes = dict(zip(*PLACED.value, strict=True)), automatic_axes()

  def spec(path: Any, x: jax.Array) -> PartitionSpec:
    return restrict_spec(known.get(_name(path, x), PartitionSpec()), axes)

  specs = jax.tree_util.tree_map_with_path(spec, grads)
  return specs if axes_in(specs) else None


def _name(path: Any, x: Any) -> tuple[str, tuple[int, ...]]:
  return jax.tree_util.keystr(path), x.shape
