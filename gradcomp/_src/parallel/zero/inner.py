"""The optimizer's step on a worker's rows of each leaf, and its measures."""

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_leaves_with_path

from gradcomp._src import checks
from gradcomp._src.core import inputs, measures
from gradcomp._src.core import state as states
from gradcomp._src.exchange import collectives
from gradcomp._src.floats.dtypes import within
from gradcomp._src.floats.rounding import round_to
from gradcomp._src.kernels.common.float_formats import FloatFormat
from gradcomp._src.mesh.axes import Axes
from gradcomp._src.parallel.zero.elementwise import Program, alike
from gradcomp._src.parallel.zero.leaf_rows import LeafRows, Rows

Optimizer: TypeAlias = optax.GradientTransformationExtraArgs


class Inner:
  """An optimizer of rows; ValueError unless it treats each element by itself."""

  # It is traced with the shapes of the parameters, in float32, and run on rows, lists
  # by leaf. Its state has OwnedRows in place of arrays like a leaf.
  def __init__(
    self, inner: Optimizer, params: Any, axes: Sequence[Axes], extra_args: Any = None
  ):
    checks.one_tree("zero", params)
    self._axes = axes
    leaves = jax.tree.leaves(params)
    typed = lambda dtype, x: jax.ShapeDtypeStruct(x.shape, dtype)
    reals = jax.tree.map(lambda x: typed(jnp.float32, x), params)
    given = inputs.stand_ins(reals) if extra_args is None else extra_args
    self._extra = jax.tree.leaves(_arrays_in(given))
    self._init, self._update, self._state = _traced(inner, reals, given)
    if extra_args is None:
      self._update.check()
    complexes = [i for i, x in enumerate(leaves) if jnp.iscomplexobj(x)]
    if complexes:
      wide = lambda x: typed(jnp.complex64 if jnp.iscomplexobj(x) else jnp.float32, x)
      traced = _traced(inner, jax.tree.map(wide, params), given, frozenset(complexes))
      for program in traced[:2]:
        program.check()

  def first(self, master: Sequence[jax.Array]) -> Any:
    """Returns the first state for rows of the parameters."""
    return self._stored(self._init(master), master)

  def step(
    self, rows: LeafRows, means: Rows, state: Any, seen: Rows, unsent: Rows
  ) -> tuple[Rows, Any, Rows]:
    """Runs the optimizer on the master of a worker's rows, ``seen`` plus ``unsent``."""
    # Returns the new master and state, old where not finite, and the master less the
    # parameters of all workers, NaN where not finite.
    given: Any = jax.tree.structure(state, is_leaf=states.is_rows)
    if given != self._state:
      raise ValueError(
        f"`state.inner_state` must be that of `inner`, {self._state}, got {given}; "
        "make the state by optimizer.init with this transformation."
      )
    with jax.named_scope("gradcomp_inner"):
      master = list(map(jnp.add, seen, unsent))
      old = jax.tree.leaves(state)
      found = self._update([*means, *old, *master, *self._extra])
      columns = means, found[: len(means)], master, seen, rows.elements
      leaves = [_moved(*x) for x in zip(*columns, strict=True)]
      after, finite, lacking = ([x[k] for x in leaves] for k in range(3))
      pairs = zip(found[len(means) :], old, self._init.results, strict=True)
      new = [x if i is None else jnp.where(finite[i], x, y) for x, y, i in pairs]
      return after, self._stored(new, master), lacking

  def _stored(self, values: Sequence[Any], master: Sequence[jax.Array]) -> Any:
    """Returns the state with these leaves."""
    rows = lambda x, i: states.OwnedRows({self._axes[i]: alike(x, master[i])[0]})
    pairs = zip(values, self._init.results, strict=True)
    nodes = [x if leaf is None else rows(x, leaf) for x, leaf in pairs]
    return jax.tree.unflatten(self._state, nodes)


@jax.jit  # leaves of a shape: traced once
def _moved(
  mean: jax.Array, update: jax.Array, master: jax.Array, seen: jax.Array, here: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the new master of rows, where it is finite, and it less the parameters."""
  moved = master + alike(update, master)[0]
  ok = jnp.isfinite(mean) & jnp.isfinite(moved)
  lacks = jnp.where(here, jnp.where(ok, moved - seen, jnp.nan), 0.0)
  return jnp.where(ok, moved, master), ok, lacks


def _traced(
  inner: Optimizer, params: Any, extra_args: Any, pairs: frozenset[int] = frozenset()
) -> tuple[Program, Program, Any]:
  """Traces ``init`` and ``update``; returns these, and the structure of the state."""
  init, state = jax.make_jaxpr(inner.init, return_shape=True)(params)

  def updated(grads: Any, state: Any, params: Any, arrays: Any) -> Any:
    return inner.update(grads, state, params, **(extra_args | arrays))

  given = params, state, params, _arrays_in(extra_args)
  update, results = jax.make_jaxpr(updated, return_shape=True)(*given)
  made: Any = jax.tree.structure(results)
  if made != jax.tree.structure((params, state)):
    raise ValueError(
      "`inner` must return updates like its gradients, and a state like that of its "
      f"init, got {made}."
    )
  names = [keystr(path) for path, _ in tree_leaves_with_path(params)]
  leaves: list[int | None] = [*range(len(names))]
  held = _owners(state, params)
  every = [*leaves, *held, *leaves]
  every += [None] * (len(update.in_avals) - len(every))
  first = Program(init, leaves, held, names, pairs)
  later = Program(update, every, [*leaves, *held], names, pairs)
  return first, later, jax.tree.structure(state)


def _arrays_in(extra_args: dict[str, Any]) -> dict[str, Any]:
  """Returns the extra arguments that are arrays, and trees of them."""
  is_array = lambda x: hasattr(x, "dtype")
  return {k: v for k, v in extra_args.items() if all(map(is_array, jax.tree.leaves(v)))}


def _owners(state: Any, params: Any) -> list[int | None]:
  """Returns the parameter of each array in a state by its number; None for numbers."""
  is_hole = lambda x: isinstance(x, optax.MaskedNode)
  flat = lambda tree: jax.tree.leaves(tree, is_leaf=is_hole)
  shapes = [x.shape for x in jax.tree.leaves(params)]
  numbers = iter(range(len(shapes)))
  places = [None if is_hole(x) else next(numbers) for x in flat(params)]
  treedef: Any = jax.tree.structure(params, is_leaf=is_hole)

  def fits(x: Any, place: int | None) -> bool:
    if is_hole(x) or place is None:
      return is_hole(x)
    is_leaf = x.ndim > 0 or jnp.issubdtype(x.dtype, jnp.inexact)
    return is_leaf and x.shape == shapes[place]

  def like_params(node: Any) -> bool:
    alike = treedef == jax.tree.structure(node, is_leaf=is_hole)
    return alike and all(map(fits, flat(node), places))

  owners: list[int | None] = []
  for path, node in tree_leaves_with_path(state, is_leaf=like_params):
    if like_params(node):
      pairs = zip(flat(node), places, strict=True)
      owners += [place for x, place in pairs if not is_hole(x)]
      continue
    if node.size > 2:  # words of a key
      raise ValueError(
        f"`inner` must keep numbers, and trees like its parameters, of the shapes "
        f"{shapes}, got {node.shape} at `inner_state`{keystr(path)}; use an optimizer "
        "that treats each element by itself, like optax.adamw, and no optax.flatten."
      )
    owners.append(None)
  return owners


def still_lacking(
  rows: LeafRows, master: Rows, seen: Rows, sent: Rows, old: Rows, dtypes: Sequence[Any]
) -> Rows:
  """Returns the master minus the new parameters; ``old`` where no update is finite."""
  # `dtypes` are those of each leaf's parameter and update.
  columns = dtypes, rows.elements, master, seen, sent, old
  return [_left(*x) for x in zip(*columns, strict=True)]


@functools.partial(jax.jit, static_argnums=0)  # leaves of a shape: traced once
def _left(
  dtypes: tuple[Any, Any],
  here: Any,
  master: jax.Array,
  seen: jax.Array,
  sent: jax.Array,
  old: jax.Array,
) -> jax.Array:
  """Returns :func:`still_lacking` of a leaf."""
  param, update = dtypes
  after = _rounded(seen + _rounded(within(sent, update), update), param)
  return jnp.where(here & jnp.isfinite(after), master - after, old)


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
  """Rounds float32 to the values of a dtype."""
  # XLA may drop a cast to the dtype and back.
  info = jnp.finfo(dtype)
  return round_to(x, FloatFormat(info.nexp, info.nmant)) if info.bits < 32 else x


def measured_zero(
  state: states.CompressState, rows: LeafRows, before: Rows, sent: Rows, after: Rows
) -> states.CompressState:
  """Returns the state, if inspected with sums of gradients, then of updates."""
  # `before` and `after` are the master minus the parameters, `sent` the updates.
  found = state.measures
  if found is None:
    return state
  by_axes: dict[Axes, dict[int, jax.Array]] = {}
  parts = zip(rows.axes, rows.elements, before, sent, after, strict=True)
  for i, (axes, here, *given) in enumerate(parts):
    wanted, came, kept = (jnp.where(here, x, 0.0) for x in given)
    ones = jnp.broadcast_to(here, wanted.shape).astype(jnp.float32)
    terms = (ones, wanted**2, kept**2, came**2, came * wanted, ones * (came == 0))
    by_axes.setdefault(axes, {})[i] = jnp.stack(list(map(jnp.sum, terms)))
  sums: dict[int, jax.Array] = {}
  for axes, own in by_axes.items():
    with jax.named_scope(collectives.STAGE):
      total = collectives.psum(jnp.stack(list(own.values())), axes)
    sums |= zip(own, total, strict=True)
  stacked = jnp.stack([sums[i] for i in range(len(sums))], axis=1)
  size, gradient, owned, mean, product, zeros = stacked
  none = jnp.zeros_like(size)
  of_own = gradient, none, gradient, owned, zeros  # in the order of Sums
  back = measures.Sums(*of_own, owned, size, mean, gradient, product, none)
  both = jax.tree.map(lambda *x: jnp.concatenate(x), found._replace(owned=owned), back)
  return state._replace(measures=both)
