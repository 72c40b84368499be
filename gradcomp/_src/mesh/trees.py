"""Trees as libraries have them: leaves that are not trained, and arrays in boxes.

A module of equinox has functions, numbers and keys among its leaves; only its float
arrays have gradients. A box is a node of one array that JAX takes for that array, like
a Variable of flax.nnx.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.mesh.per_worker import is_marked
from gradcomp._src.mesh.specs import is_spec

_ARRAYS = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct


def is_array(x: Any) -> bool:
  """Returns True for an array, or the shape of one; Python's numbers are none."""
  return isinstance(x, _ARRAYS)


def is_trainable(x: Any) -> bool:
  """Returns True for an array of real or complex floats."""
  return is_array(x) and _is_inexact(x.dtype)


@functools.cache  # a train step asks for each leaf in every step
def _is_inexact(dtype: Any) -> bool:
  return bool(jnp.issubdtype(dtype, jnp.inexact))


def split(tree: Any, has: Callable[[Any], bool] = is_trainable) -> tuple[Any, Any]:
  """Returns the leaves that are trained, and all others, with None for the rest."""
  leaves, treedef = jax.tree.flatten(tree)
  mine = [x if has(x) else None for x in leaves]
  others = [x if y is None else None for x, y in zip(leaves, mine, strict=True)]
  return jax.tree.unflatten(treedef, mine), jax.tree.unflatten(treedef, others)


def trainable(tree: Any) -> Any:
  """Returns a tree with None in the place of leaves that are not trained."""
  return split(tree)[0]


def combine(mine: Any, others: Any) -> Any:
  """Joins the two trees of :func:`split`."""
  choose = lambda x, y: y if x is None else x
  return jax.tree.map(choose, mine, others, is_leaf=lambda x: x is None)


def is_box(node: Any) -> bool:
  """Returns True for a node of one child that is an array to JAX, for ``is_leaf``."""
  if not hasattr(node, "__jax_array__") or jax.tree_util.all_leaves([node]):
    return False
  return len(_children(node)) == 1


def _children(node: Any) -> list[Any]:
  return jax.tree.leaves(node, is_leaf=lambda x: x is not node and x is not None)


def unboxed(tree: Any) -> Any:
  """Returns a tree with the content of each box in its place: an array, or a spec."""
  content = lambda x: _children(x)[0] if is_box(x) else x
  is_leaf = lambda x: is_box(x) or is_spec(x) or is_marked(x)
  return jax.tree.map(content, tree, is_leaf=is_leaf)


def boxed_like(like: Any, tree: Any) -> Any:
  """Puts the arrays of a tree into the boxes of another."""
  if not any(map(is_box, jax.tree.leaves(like, is_leaf=is_box))):
    return tree
  box = lambda whole: jax.tree.structure(whole, is_leaf=lambda x: x is not whole)
  choose = lambda x, new: jax.tree.unflatten(box(x), [new]) if is_box(x) else new
  return jax.tree.map(choose, like, tree, is_leaf=lambda x: is_box(x) or is_marked(x))
