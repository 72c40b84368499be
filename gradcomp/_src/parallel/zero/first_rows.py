"""The first rows that workers own, on one device or on all."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gradcomp._src.core.state import OwnedRows, is_rows
from gradcomp._src.mesh.closures import OF_OPTIMIZER, with_arrays
from gradcomp._src.mesh.specs import sharded_axes, stacked_over
from gradcomp._src.mesh.types import mark_varying, typed_spec

Others = Sequence[tuple[str, ...]]


def on_mesh(
  first_rows: Callable[[Any, Others], tuple[OwnedRows, Any]],
  tree: Any,
  others: Others,
  names: tuple[str, ...],
) -> tuple[OwnedRows, Any]:
  """Calls ``first_rows(tree, others)`` on all devices of the mesh: global arrays.

  It returns the rows that a worker owns, and the state of its optimizer. ``others`` are
  each leaf's other axes, over which it varies.
  """
  specs = jax.tree.map(typed_spec, tree)
  cut = frozenset().union(*(sharded_axes(typed_spec(x)) for x in jax.tree.leaves(tree)))
  inside = cut.union(names)

  def spec(node: Any) -> Any:
    if not is_rows(node):
      return PartitionSpec()
    return OwnedRows(
      {
        axes: jax.tree.map(lambda _, axes=axes: stacked_over(axes, inside), own)
        for axes, own in node.arrays.items()
      }
    )

  def enter(bind: Any, closed_over: list[Any]) -> Any:
    def mapped(function: Any, out_specs: Any) -> Any:
      return jax.shard_map(
        lambda tree, closed_over: function(bind(closed_over)(tree, others)),
        in_specs=(specs, PartitionSpec()),
        out_specs=out_specs,
        axis_names=set(inside),
        check_vma=False,
      )

    found: list[Any] = []

    def probe(rows: Any) -> jax.Array:
      found.append(jax.tree.map(shape_of, rows))
      return jnp.zeros([])

    jax.eval_shape(mapped(probe, PartitionSpec()), tree, closed_over)
    out = jax.tree.map(spec, found[0], is_leaf=is_rows)
    return jax.jit(mapped(lambda rows: rows, out))(tree, closed_over)

  return with_arrays(first_rows, enter, OF_OPTIMIZER)


def per_worker(tree: Any) -> Any:
  """Types rows, even zeros, as varying over the workers."""

  def mark(node: Any) -> Any:
    if not is_rows(node):
      return node
    arrays = {axes: mark_varying(own, axes) for axes, own in node.arrays.items()}
    return OwnedRows(arrays)

  return jax.tree.map(mark, tree, is_leaf=is_rows)


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
  """Returns the shape and the dtype of an array."""
  return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
