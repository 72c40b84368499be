"""The trace of an optimizer with the parameters' shapes, and the parts of its state."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr
from jax.tree_util import keystr, tree_leaves_with_path

from gradcomp._src.core.state import OwnedRows


@dataclasses.dataclass(frozen=True, eq=False)
class OptimizerTrace:
  """The traced functions of an optimizer, and the structure of its state.

  Attributes:
    init: maps the leaves of the parameters to the leaves of the state.
    update: maps the leaves of gradients, state, parameters and arrays among the extra
      arguments to the leaves of the updates, and of the state.
    count: the number of parameters.
    owners: for each leaf of the state, its parameter; None for a shared one.
    nodes: for each leaf of the state, the number of its tree.
    stored: the state, with an :class:`OwnedRows` in place of each tree like the
      parameters. Where these are masked, it may have holes.
  """

  init: ClosedJaxpr
  update: ClosedJaxpr
  count: int
  owners: tuple[int | None, ...]
  nodes: tuple[int, ...]
  stored: Any


def trace(
  inner: optax.GradientTransformationExtraArgs, params: Any, extra_args: dict[str, Any]
) -> OptimizerTrace:
  """Traces an optimizer with shapes of parameters.

  ValueError if its state has other arrays than numbers and trees like the parameters.
  """
  init, state = jax.make_jaxpr(inner.init, return_shape=True)(params)

  def updated(grads: Any, state: Any, params: Any, arrays: Any) -> Any:
    return inner.update(grads, state, params, **(extra_args | arrays))

  given = params, state, params, arrays_in(extra_args)
  update, results = jax.make_jaxpr(updated, return_shape=True)(*given)
  made: Any = jax.tree.structure(results)
  if made != jax.tree.structure((params, state)):
    raise ValueError(
      "`inner` must return updates like its gradients, and a state like that of its "
      f"init, got {made}."
    )
  count = len(jax.tree.leaves(params))
  return OptimizerTrace(init, update, count, *_places(state, params))


def arrays_in(extra_args: dict[str, Any]) -> dict[str, Any]:
  """Returns the extra arguments that are arrays, and trees of them."""
  is_array = lambda x: hasattr(x, "dtype")
  return {k: v for k, v in extra_args.items() if all(map(is_array, jax.tree.leaves(v)))}


def _places(
  state: Any, params: Any
) -> tuple[tuple[int | None, ...], tuple[int, ...], Any]:
  """Returns the owners and the nodes of a state's leaves, and its stored form."""
  treedef: Any = jax.tree.structure(params, is_leaf=_is_hole)
  leaves = jax.tree.leaves(params, is_leaf=_is_hole)
  numbers = dict(enumerate(i for i, x in enumerate(leaves) if not _is_hole(x)))
  number = {place: i for i, place in numbers.items()}

  def like_params(node: Any) -> bool:
    if treedef != jax.tree.structure(node, is_leaf=_is_hole):
      return False
    own = zip(jax.tree.leaves(node, is_leaf=_is_hole), leaves, strict=True)
    return all(_is_hole(x) or _fits(x, y) for x, y in own)

  nodes, stored = jax.tree.flatten(state, is_leaf=like_params)
  paths = tree_leaves_with_path(state, is_leaf=like_params)
  owners: list[int | None] = []
  of_node: list[int] = []
  for k, (path, node) in enumerate(paths):
    if like_params(node):
      own = enumerate(jax.tree.leaves(node, is_leaf=_is_hole))
      found: Sequence[int | None] = [number[i] for i, x in own if not _is_hole(x)]
      nodes[k] = OwnedRows({})
    else:
      _check_number(keystr(path), node, leaves)
      found = [None]
    owners += found
    of_node += [k] * len(found)
  return tuple(owners), tuple(of_node), jax.tree.unflatten(stored, nodes)


def _fits(x: Any, param: Any) -> bool:
  """Returns True for an array that a state may keep for a parameter."""
  inexact = jnp.issubdtype(x.dtype, jnp.inexact)
  return not _is_hole(param) and x.shape == param.shape and (x.ndim > 0 or inexact)


def _check_number(path: str, x: Any, leaves: Sequence[Any]) -> None:
  if x.size > 2:  # words of a key
    shapes = [y.shape for y in leaves if not _is_hole(y)]
    raise ValueError(
      f"`inner` must keep numbers, and trees like its parameters, of the shapes "
      f"{shapes}, got {x.shape} at `inner_state`{path}; use an optimizer that treats "
      "each element by itself, like optax.adamw, and no optax.flatten."
    )


def _is_hole(x: Any) -> bool:
  return isinstance(x, optax.MaskedNode)
