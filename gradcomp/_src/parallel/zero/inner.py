"""The optimizer's step on a worker's rows of each leaf, and its measures.

Its trace runs on rows of its leaves, and is refused if it mixes elements.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal
from jax.tree_util import keystr, tree_leaves_with_path

from gradcomp._src import checks
from gradcomp._src.core import border, measures
from gradcomp._src.core import state as states
from gradcomp._src.exchange import collectives
from gradcomp._src.floats.dtypes import within
from gradcomp._src.floats.rounding import round_to
from gradcomp._src.kernels.common.float_codes import FloatFormat
from gradcomp._src.mesh import types
from gradcomp._src.mesh.axes import Axes
from gradcomp._src.parallel.zero.leaf_rows import LeafRows, Rows

Optimizer: TypeAlias = optax.GradientTransformationExtraArgs

# JAX's primitives that compute each element from one element of each argument.
ELEMENTWISE = frozenset(
  "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp conj "
  "convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 "
  "expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max "
  "min mul ne neg nextafter not or pow pvary real reduce_precision rem round rsqrt "
  "select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt "
  "square sub tan tanh xor".split()
)
# Those that act on real and imaginary parts separately, as products by real numbers do.
_LINEAR = frozenset(
  "add add_any sub neg copy copy_p select_n convert_element_type "
  "broadcast_in_dim".split()
)
_CALLS = frozenset(
  "jit pjit closed_call core_call checkpoint custom_jvp_call custom_vjp_call".split()
)
_RANDOM = ("random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform")

_CURE = (
  "put what needs whole gradients before zero, e.g. "
  "gradcomp.wrappers.clip_by_local_norm in place of optax.clip_by_global_norm, or take "
  "an exchange and then the optimizer in place of zero."
)


class _Value(NamedTuple):
  """The rows of one leaf that stand for it; of none an array, or a number if even."""

  x: Any
  leaf: int | None = None  # the number of the leaf that it depends on
  even: bool = True  # whether all its elements are equal, if it depends on no leaf
  real: bool = True  # whether its imaginary part is known to be zero, if on none


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
  """A trace, called with rows of its leaves; ValueError if elements mix."""

  closed: ClosedJaxpr
  given: Sequence[int | None]  # the leaf of each argument; None for a number
  results: Sequence[int | None]
  names: Sequence[str]  # of the leaves
  pairs: frozenset[int] = frozenset()  # complex leaves, which rows have as pairs

  def __call__(self, arrays: Sequence[Any]) -> list[Any]:
    """Returns the results for rows of any shape, with the bits of a whole leaf."""
    facts = zip(arrays, self.given, self.closed.in_avals, strict=True)
    values = [_Value(x, leaf, not (leaf is None and y.ndim)) for x, leaf, y in facts]
    found = self._run(self.closed, values)
    return list(map(self._result, found, self.results, self.closed.out_avals))

  def check(self) -> None:
    """Raises the error of a call, and computes nothing."""
    self([None] * len(self.given))

  def _run(self, function: Any, given: Sequence[_Value]) -> list[_Value]:
    """Returns the results of a jaxpr, closed or not."""
    jaxpr = getattr(function, "jaxpr", function)
    pairs = zip(jaxpr.constvars, getattr(function, "consts", ()), strict=True)
    values = {x: _constant(value, x.aval) for x, value in pairs}
    values |= zip(jaxpr.invars, given, strict=True)
    read = lambda x: _constant(x.val, x.aval) if isinstance(x, Literal) else values[x]
    for equation in jaxpr.eqns:
      own = [read(x) for x in equation.invars]
      name, params = equation.primitive.name, equation.params
      if name in _CALLS:
        found = self._run(params.get("jaxpr", params.get("call_jaxpr")), own)
      elif name == "cond":
        found = self._cond(own[0], [self._run(x, own[1:]) for x in params["branches"]])
      else:
        found = self._equation(equation, own)
      values |= zip(equation.outvars, found, strict=True)
    return [read(x) for x in jaxpr.outvars]

  def _cond(self, which: _Value, results: Sequence[Sequence[_Value]]) -> list[_Value]:
    if which.leaf is not None:
      raise ValueError(
        f"`inner` must not decide by the elements of a leaf, but has a cond "
        f"of {self.names[which.leaf]}; {_CURE}"
      )
    found = []
    for values in zip(*results, strict=True):
      leaf = self._leaf("cond", values)
      cases, x = [x.x for x in values], None
      if not any(case is None for case in (which.x, *cases)):
        x = lax.select_n(jnp.clip(which.x, 0, len(cases) - 1), *alike(*cases))
      even, real = (all(x[i] for x in values) for i in (2, 3))
      found.append(_Value(x, leaf, even, real))
    return found

  def _equation(self, equation: Any, given: list[_Value]) -> list[_Value]:
    name = equation.primitive.name
    if name.startswith(_RANDOM):
      raise ValueError(
        f"`inner` must draw nothing at random, because every owner of rows would draw "
        f"the same, but computes {name}; put what adds noise, like optax.add_noise, "
        "before or after zero."
      )
    leaf = self._leaf(name, given)
    if leaf is not None:
      self._check(equation, given, leaf)
    even = all(x.even for x in given)
    if name == "broadcast_in_dim" and (even or leaf is not None):
      return given[:1]
    arrays, alone = [x.x for x in given], name in ELEMENTWISE
    found: Sequence[Any] = [None] * len(equation.outvars)
    if not any(x is None for x in arrays):
      shapes = [x.aval.shape for x in equation.invars]
      arrays = alike(*arrays) if alone else [*map(jnp.broadcast_to, arrays, shapes)]
      computed = equation.primitive.bind(*arrays, **equation.params)
      found = computed if equation.primitive.multiple_results else [computed]
    even, real = even and alone, all(x.real for x in given)
    pairs = zip(found, equation.outvars, strict=True)
    return [_Value(x, leaf, even or not y.aval.ndim, real) for x, y in pairs]

  def _result(self, found: _Value, leaf: int | None, aval: Any) -> Any:
    """Returns a result that belongs to a leaf, or is a number, of the trace's shape."""
    if leaf is None and found.leaf is not None:
      raise ValueError(
        f"`inner` must keep numbers that are equal for all elements, but keeps one of "
        f"{self.names[found.leaf]}; {_CURE}"
      )
    if leaf is None:
      return None if found.x is None else jnp.broadcast_to(found.x, aval.shape)
    if found.leaf not in (None, leaf) or (found.leaf is None and not found.even):
      raise ValueError(
        f"`inner` must compute the state and the updates of {self.names[leaf]} from "
        f"its own elements and from numbers; {_CURE}"
      )
    return found.x

  def _leaf(self, name: str, given: Sequence[_Value]) -> int | None:
    """Returns the one leaf that values depend on, or None; ValueError for several."""
    leaves = sorted({x.leaf for x in given if x.leaf is not None})
    if len(leaves) > 1:
      raise ValueError(
        f"`inner` must treat each leaf by itself, but computes {name} of "
        f"several, {', '.join(self.names[i] for i in leaves)}; {_CURE}"
      )
    return leaves[0] if leaves else None

  def _check(self, equation: Any, given: Sequence[_Value], leaf: int) -> None:
    """Raises ValueError for an operation that is not elementwise."""
    name = equation.primitive.name
    shapes = [x.aval.shape for x in (*equation.invars, *equation.outvars)]
    same = name == "broadcast_in_dim" and shapes[0] == shapes[-1]
    if name not in ELEMENTWISE and not same:
      raise ValueError(
        f"`inner` must treat each element by itself, because a worker sees only its "
        f"own, but computes {name} of {self.names[leaf]}; {_CURE}"
      )
    if not all(x.even for x in given if x.leaf is None):
      raise ValueError(
        f"`inner` must compute with its gradients, its parameters, trees like them and "
        f"numbers, but computes {name} of {self.names[leaf]} and of "
        "another array; keep that in the state, as a tree like the parameters."
      )
    linear = name in _LINEAR
    if name in ("mul", "div"):
      own = [x.leaf is not None for x in given]
      order = own == [True, False] or (own == [False, True] and name == "mul")
      linear = order and all(x.real for x in given if x.leaf is None)
    if leaf in self.pairs and not linear:
      raise ValueError(
        f"`inner` must treat the real and the imaginary part of {self.names[leaf]} "
        f"each by itself, because zero cuts complex leaves into pairs, but "
        f"computes {name}; use an optimizer like optax.sgd for complex leaves, by "
        "optax.partition around several of zero, or keep them as pairs of real leaves."
      )


def _constant(value: Any, aval: Any) -> _Value:
  real = not jnp.iscomplexobj(aval)
  if not (real or aval.ndim or isinstance(value, jax.core.Tracer)):
    real = not np.asarray(value).imag  # JAX computes with no array of a mesh in a map
  x = value if isinstance(value, jax.Array) else np.asarray(value, aval.dtype)
  return _Value(x, even=not aval.ndim, real=real)


def alike(*given: Any) -> list[jax.Array]:
  """Broadcasts arrays and numbers to one shape and one set of varying axes."""
  shape = max((x.shape for x in given), key=len)
  known = list(map(types.varying_axes, given))
  axes = sorted(frozenset().union(*known))
  result = []
  for x, own in zip(given, known, strict=True):  # each operation makes a trace longer
    missing = tuple(name for name in axes if name not in own)
    x = lax.pcast(x, missing, to="varying") if missing else x
    result.append(x if x.shape == shape else jnp.broadcast_to(x, shape))
  return result


class Inner:
  """An optimizer of rows; ValueError unless it treats each element by itself."""

  # It is traced with the shapes of the parameters, in float32, and run on rows, lists
  # by leaf. Its state has OwnedRows in place of arrays like a leaf.
  def __init__(
    self, inner: Optimizer, params: Any, axes: Sequence[Axes], extra_args: Any = None
  ):
    checks.one_tree("zero", params)
    self._axes = axes
    typed = lambda dtype, x: jax.ShapeDtypeStruct(x.shape, dtype)
    reals = jax.tree.map(lambda x: typed(jnp.float32, x), params)
    given = border.stand_ins(reals) if extra_args is None else extra_args
    self._extra = jax.tree.leaves(_arrays_in(given))
    self._init, self._update, self._state = _traced(inner, reals, given)
    if extra_args is None:
      self._update.check()
    leaves = enumerate(jax.tree.leaves(params))
    if complexes := frozenset(i for i, x in leaves if jnp.iscomplexobj(x)):
      wide = lambda x: typed(jnp.complex64 if jnp.iscomplexobj(x) else jnp.float32, x)
      traced = _traced(inner, jax.tree.map(wide, params), given, complexes)
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

  def like_params(node: Any) -> bool:
    if jax.tree.structure(node, is_leaf=is_hole) != treedef:
      return False
    # A count is none, though a parameter may have its shape.
    own = lambda x: x.ndim > 0 or jnp.issubdtype(x.dtype, jnp.inexact)
    fits = lambda x, i: i is not None and own(x) and x.shape == shapes[i]
    return all(map(lambda x, i: is_hole(x) or fits(x, i), flat(node), places))

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


@functools.partial(jax.jit, static_argnums=0)  # leaves of a shape: traced once
def still_lacking(
  dtypes: tuple[Any, Any],  # of the parameter and its update
  here: Any,
  master: jax.Array,
  seen: jax.Array,
  sent: jax.Array,
  old: jax.Array,
) -> jax.Array:
  """Returns the master minus the new parameter; ``old`` where no update is finite."""
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
