"""Refuses optimizers that look at more than one element at a time.

A worker that owns a part of the elements would take the norm of its part for that of
all, and nobody would see it.
"""

from collections.abc import Iterator
from typing import Any

import jax
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from gradcomp._extra_args import stand_ins
from gradcomp.state import OwnedRows, is_rows

# What makes one number of several, by the beginnings of JAX's names.
_MIXES = ("reduce_", "arg", "cum", "dot_general", "sort", "conv_", "top_k", "scan")


def check_elementwise(inner: optax.GradientTransformation, rows: OwnedRows) -> None:
  """Raises ValueError for an optimizer whose update of an element needs other elements.

  It traces ``inner`` with shapes alone. What it refuses are reductions, products of
  matrices, sorting and the like, and a state that has arrays of other shapes than
  those of the rows, because these are no trees like the parameters.

  Args:
    inner: the optimizer.
    rows: what it sees as parameters and gradients.
  """
  if not jax.tree.leaves(rows):
    return
  inner = optax.with_extra_args_support(inner)
  state = jax.eval_shape(inner.init, rows)
  like = _shapes(rows)
  for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_rows):
    if _shapes(node) != like if is_rows(node) else node.size > 2:  # words of a key
      raise ValueError(
        f"`inner` must keep numbers, and trees like its parameters, of the shapes "
        f"{like}, got {_shapes(node)} at `inner_state`{jax.tree_util.keystr(path)}; "
        "use an optimizer that treats each element by itself, like optax.adamw, and no "
        "optax.flatten."
      )
  update = lambda *args: inner.update(*args, **stand_ins(rows))
  trace = jax.make_jaxpr(update)(rows, state, rows)
  for equation in _equations(trace.jaxpr):
    name = equation.primitive.name
    several = any(getattr(x.aval, "ndim", 0) for x in equation.invars)
    if several and name.startswith(_MIXES) and name != "reduce_precision":
      raise ValueError(
        f"`inner` must treat each element by itself, because a worker sees only those "
        f"that it owns, but its update computes {name} of several; put what needs "
        "whole gradients in front of zero, e.g. gradcomp.clip_by_local_norm in place "
        "of optax.clip_by_global_norm."
      )


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
  """Yields the equations of a function, and of those that it calls."""
  for equation in jaxpr.eqns:
    yield equation
    for part in jax.tree.leaves(tuple(equation.params.values())):
      part = part.jaxpr if isinstance(part, ClosedJaxpr) else part
      if isinstance(part, Jaxpr):
        yield from _equations(part)


def _shapes(tree: Any) -> list[tuple[int, ...]]:
  return [x.shape for x in jax.tree.leaves(tree)]
