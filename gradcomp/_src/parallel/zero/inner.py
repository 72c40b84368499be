"""Runs an optimizer on rows: the operations of its trace, with the leaves' shapes."""

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
from gradcomp._src.parallel.zero import treatment
from gradcomp._src.parallel.zero.treatment import OptimizerTrace, follow, kinds_of


class Inner:
  """An optimizer of rows; ValueError unless it treats each element by itself.

  ``kinds`` has a number for each leaf. Only leaves of one may be in one matrix.
  """

  def __init__(
    self,
    inner: optax.GradientTransformationExtraArgs,
    params: Any,
    extra_args: dict[str, Any] | None = None,
  ):
    one_tree("zero", params)
    names = [keystr(path) for path, _ in tree_leaves_with_path(params)]
    complexes = [jnp.iscomplexobj(x) for x in jax.tree.leaves(params)]
    typed = lambda dtype, x: jax.ShapeDtypeStruct(x.shape, dtype)
    reals = jax.tree.map(lambda x: typed(jnp.float32, x), params)
    given = stand_ins(reals) if extra_args is None else extra_args
    self._extra = jax.tree.leaves(treatment.arrays_in(given))
    self._trace = treatment.trace(inner, reals, given)
    self.kinds = kinds_of(self._trace, names)
    if any(complexes):
      wide = lambda x: typed(jnp.complex64 if jnp.iscomplexobj(x) else jnp.float32, x)
      traced = treatment.trace(inner, jax.tree.map(wide, params), given)
      kinds_of(traced, names, complexes)

  def first(self, master: OwnedRows, leaves: OwnedRows) -> Any:
    """Returns the first state; ``leaves`` has the number of a leaf in each matrix."""
    trace = self._trace
    found = []
    for leaf, rows in _by_matrix(leaves, master):
      values = follow(trace.init, _only(leaf, rows, trace.count), _OnRows())
      found.append([_like(x, rows) for x in _of(trace, leaf, values)])
    shared = follow(trace.init, [None] * trace.count, _OnRows())
    return _stored(trace, shared, found, leaves)

  def step(
    self, means: OwnedRows, state: Any, master: OwnedRows, leaves: OwnedRows
  ) -> tuple[OwnedRows, OwnedRows, Any]:
    """Returns updated rows, masks of finite ones, and the state, old elsewhere."""
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
  trace: OptimizerTrace, shared: list[Any], found: list[list[Any]], leaves: OwnedRows
) -> Any:
  """Builds the state from shared leaves and the leaves of each matrix."""
  nodes, treedef = jax.tree.flatten(trace.stored, is_leaf=is_rows)
  own = [
    dict(zip(_of(trace, i, trace.nodes), x, strict=True))
    for i, x in zip(jax.tree.leaves(leaves), found, strict=True)
  ]
  kept = lambda rows: tuple(x for x in rows if x is not None)
  for k, node in enumerate(nodes):
    if is_rows(node):
      tree = jax.tree.unflatten(jax.tree.structure(leaves), [x.get(k) for x in own])
      nodes[k] = OwnedRows({axes: kept(x) for axes, x in tree.arrays.items()})
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
  """Computes with rows for one leaf, None for others, numbers for even arrays."""

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
    if primitive.name in treatment.ELEMENTWISE:
      given = _alike(*given)
    else:
      shapes = [x.aval.shape for x in equation.invars]
      given = list(map(jnp.broadcast_to, given, shapes))
    found = primitive.bind(*given, **equation.params)
    return found if primitive.multiple_results else [found]
