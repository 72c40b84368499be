"""Runs an optimizer on rows of elements in place of leaves.

JAX traces the optimizer with the shapes of the leaves, so that masks, labels and
other functions of paths or shapes see those of the parameters. The elementwise
operations of a leaf in the trace are then applied to the rows of all leaves of its
kind.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import keystr, tree_leaves_with_path

from gradcomp._src.checks import one_tree
from gradcomp._src.core.inputs import stand_ins
from gradcomp._src.core.state import OwnedRows, is_rows
from gradcomp._src.mesh.types import mark_varying, varying_axes
from gradcomp._src.parallel.zero.trace import OptimizerTrace, arrays_in, trace
from gradcomp._src.parallel.zero.treatment import ELEMENTWISE, follow, kinds_of


class Inner:
  """An optimizer of rows; ValueError unless it treats each element by itself.

  Elements of ``params`` count as float32, and complex ones as pairs. Extra arguments
  are by default stand-ins. ``kinds`` has a number for each leaf, equal for leaves that
  are treated equally. Only these may be in one matrix.
  """

  def __init__(
    self,
    inner: optax.GradientTransformationExtraArgs,
    params: Any,
    extra_args: dict[str, Any] | None = None,
  ):
    one_tree("zero", params)
    names = [keystr(path) for path, _ in tree_leaves_with_path(params)]
    complexes = [_is_complex(x) for x in jax.tree.leaves(params)]
    typed = lambda dtype, x: jax.ShapeDtypeStruct(x.shape, dtype)
    reals = jax.tree.map(lambda x: typed(jnp.float32, x), params)
    given = stand_ins(reals) if extra_args is None else extra_args
    self._extra = jax.tree.leaves(arrays_in(given))
    self._trace = trace(inner, reals, given)
    self.kinds = kinds_of(self._trace, names)
    if any(complexes):
      wide = lambda x: typed(jnp.complex64 if _is_complex(x) else jnp.float32, x)
      kinds_of(trace(inner, jax.tree.map(wide, params), given), names, complexes)

  def first(self, master: OwnedRows, leaves: OwnedRows) -> Any:
    """Returns the first state for rows of the parameters.

    ``leaves`` has the number of a leaf in each matrix.
    """
    trace = self._trace
    found = []
    for leaf, rows in _by_matrix(leaves, master):
      values = follow(trace.init, _only(leaf, rows, trace.count), _OnRows())
      found.append([_like(x, rows) for x in _of(trace, leaf, values)])
    shared = follow(trace.init, [None] * trace.count, _OnRows())
    return _stored(trace, shared, found, leaves)

  def step(
    self,
    means: OwnedRows,
    state: Any,
    master: OwnedRows,
    leaves: OwnedRows,
  ) -> tuple[OwnedRows, OwnedRows, Any]:
    """Takes a step with rows of gradients, ``means``, and of parameters, ``master``.

    The results are the rows of the parameters with their updates; masks, true where
    these and the gradients are finite; and the state, with old values in other places.
    """
    trace, count = self._trace, self._trace.count
    made: Any = jax.tree.structure(trace.stored, is_leaf=is_rows)
    given: Any = jax.tree.structure(state, is_leaf=is_rows)
    if given != made:
      raise ValueError(
        f"`state.inner_state` must be that of `inner`, {made}, got {given}; make the "
        "state by optimizer.init with this transformation."
      )
    held: list[Any] = jax.tree.leaves(state, is_leaf=is_rows)
    rest = [iter(jax.tree.leaves(x)) if is_rows(x) else x for x in held]

    def run(old: Sequence[Any], leaf: int | None, mean: Any, rows: Any) -> list[Any]:
      given = [*_only(leaf, mean, count), *old, *_only(leaf, rows, count), *self._extra]
      return follow(trace.update, given, _OnRows())

    places = list(zip(trace.owners, trace.nodes, strict=True))
    numbers = [rest[k] if owner is None else None for owner, k in places]
    moved, finite, found = [], [], []
    for leaf, mean, rows in _by_matrix(leaves, means, master):
      own = [next(rest[k]) if owner == leaf else None for owner, k in places]
      old = [x if y is None else y for x, y in zip(numbers, own, strict=True)]
      values = run(old, leaf, mean, rows)
      after = rows + _like(values[leaf], rows)
      ok = jnp.isfinite(mean) & jnp.isfinite(after)
      state = zip(_of(trace, leaf, values[count:]), _of(trace, leaf, own), strict=True)
      found.append([jnp.where(ok, _like(x, rows), y) for x, y in state])
      moved.append(after)
      finite.append(ok)
    shared = run(numbers, None, None, None)[count:]
    tree = jax.tree.structure(leaves)
    trees = (jax.tree.unflatten(tree, x) for x in (moved, finite))
    return *trees, _stored(trace, shared, found, leaves)


def _is_complex(x: Any) -> bool:
  return bool(jnp.issubdtype(x.dtype, jnp.complexfloating))


def _by_matrix(leaves: OwnedRows, *rows: OwnedRows) -> list[Any]:
  """Returns for each matrix the number of a leaf in it, and its rows."""
  return list(zip(*map(jax.tree.leaves, (leaves, *rows)), strict=True))


def _only(leaf: int | None, x: Any, count: int) -> list[Any]:
  """Returns ``count`` leaves: rows for one, and None for the others."""
  return [x if i == leaf else None for i in range(count)]


def _of(trace: OptimizerTrace, leaf: int, state: Sequence[Any]) -> list[Any]:
  """Returns the leaves of a state that belong to one parameter."""
  return [x for x, owner in zip(state, trace.owners, strict=True) if owner == leaf]


def _stored(
  trace: OptimizerTrace,
  shared: Sequence[Any],
  found: Sequence[Sequence[Any]],
  leaves: OwnedRows,
) -> Any:
  """Builds the state from shared leaves and the leaves of each matrix."""
  nodes, treedef = jax.tree.flatten(trace.stored, is_leaf=is_rows)
  own = [
    dict(zip(_of(trace, i, trace.nodes), x, strict=True))
    for i, x in zip(jax.tree.leaves(leaves), found, strict=True)
  ]
  for k, node in enumerate(nodes):
    if is_rows(node):
      tree = jax.tree.unflatten(jax.tree.structure(leaves), [x.get(k) for x in own])
      nodes[k] = OwnedRows(
        {a: tuple(x for x in own if x is not None) for a, own in tree.arrays.items()}
      )
    else:
      nodes[k] = shared[trace.nodes.index(k)]
  return jax.tree.unflatten(treedef, nodes)


def _like(x: jax.Array, rows: jax.Array) -> jax.Array:
  """Broadcasts a number to all places of rows."""
  return _alike(x, rows)[0]


def _alike(*given: jax.Array) -> list[jax.Array]:
  """Broadcasts arrays and numbers to one shape and one set of varying axes."""
  shape = max((x.shape for x in given), key=len)
  axes = tuple(sorted(frozenset().union(*map(varying_axes, given))))
  result = []
  for x in given:
    x = jnp.broadcast_to(x, shape)
    result.append(mark_varying(x, axes) if axes else x)
  return result


class _OnRows:
  """Computes with rows in place of one leaf, and None in place of the others.

  An array of equal elements is one number.
  """

  def constant(self, value: Any, aval: Any) -> jax.Array:
    return value if isinstance(value, jax.Array) else jnp.asarray(value, aval.dtype)

  def choice(self, which: Any, results: Sequence[Sequence[Any]]) -> list[Any]:
    return [
      None
      if any(x is None for x in cases)
      else lax.select_n(jnp.clip(which, 0, len(cases) - 1), *_alike(*cases))
      for cases in zip(*results, strict=True)
    ]

  def equation(self, equation: Any, given: Sequence[Any]) -> Sequence[Any]:
    if any(x is None for x in given):
      return [None] * len(equation.outvars)
    primitive = equation.primitive
    if primitive is lax.broadcast_in_dim_p and (
      not given[0].ndim or equation.invars[0].aval.shape == equation.params["shape"]
    ):
      return given[:1]
    if primitive.name in ELEMENTWISE:
      given = _alike(*given)
    else:
      given = [
        jnp.broadcast_to(x, y.aval.shape)
        for x, y in zip(given, equation.invars, strict=True)
      ]
    found = primitive.bind(*given, **equation.params)
    return found if primitive.multiple_results else [found]
