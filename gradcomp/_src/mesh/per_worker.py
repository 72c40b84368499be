"""``PerWorker``: the gradient of all workers, where no type can say so."""

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec

from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.mesh.specs import is_spec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerWorker:
  """The gradient of all workers in plain ``jax.jit`` under Auto axes.

  :func:`gradcomp.value_and_grad` returns one in the place of each array there, so that
  trainers find the tree they expect. The ``update`` of every transformation of this
  library takes such trees, and returns plain arrays: the same mean on all workers; or
  such trees, if it sends nothing. Row :math:`i` is worker :math:`i`'s gradient: ``[N,
  ...]``, sharded over the axis.

  Transformations of others in front of the exchange see all rows. Those that take one
  element at a time, like ``optax.scale``, do as they should. A norm would be that of
  all workers together: use :func:`gradcomp.wrappers.clip_by_local_norm`, or put
  :func:`gradcomp.wrappers.allow_frozen` around the optimizer, which runs it on each
  worker's gradients.

  Attributes:
    rows: the gradients, ``[N, ...]``; or a tree of such arrays.
    axis_name: the axis of the workers, or a tuple of axes.
    spec: the parameter's spec over other axes of the mesh.

  Example:
    >>> grads = {"w": PerWorker(jnp.zeros((8, 3)), axis_name="data")}
    >>> jax.tree.map(jnp.shape, grads)["w"].rows
    (8, 3)
  """

  rows: Any
  axis_name: AxisName = dataclasses.field(metadata={"static": True})
  spec: PartitionSpec = dataclasses.field(
    default=PartitionSpec(), metadata={"static": True}
  )


def is_marked(x: Any) -> bool:
  """Returns True for a :class:`PerWorker`, also as ``is_leaf``."""
  return isinstance(x, PerWorker)


def of_all(tree: Any) -> bool:
  """Returns True for a tree with a :class:`PerWorker` in it."""
  return any(map(is_marked, jax.tree.leaves(tree, is_leaf=is_marked)))


def marked(rows: Any, axis_name: AxisName, specs: Any) -> Any:
  """Marks each array of a tree; one spec may stand for a whole subtree."""
  mark = lambda spec, part: jax.tree.map(lambda x: PerWorker(x, axis_name, spec), part)
  return jax.tree.map(mark, specs, rows, is_leaf=is_spec)


def unmarked(tree: Any) -> tuple[Any, Any, AxisName]:
  """Returns rows, a tree of their specs, and the axis; ValueError for other leaves."""
  leaves, treedef = jax.tree.flatten(tree, is_leaf=is_marked)
  axes = {x.axis_name for x in leaves if is_marked(x)}
  if len(axes) != 1 or not all(map(is_marked, leaves)):
    raise ValueError(
      "`updates` must be gradients of all workers of one axis, as gradcomp."
      f"value_and_grad returns them, got {sum(map(is_marked, leaves))} of "
      f"{len(leaves)} that are a gradcomp.PerWorker, over {sorted(map(str, axes))}."
    )
  rows = jax.tree.unflatten(treedef, [x.rows for x in leaves])
  specs = [jax.tree.map(lambda _, x=x: x.spec, x.rows) for x in leaves]
  return rows, jax.tree.unflatten(treedef, specs), axes.pop()
