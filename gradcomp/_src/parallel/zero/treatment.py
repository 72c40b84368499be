"""Traces an elementwise optimizer, and finds the leaves that it treats equally."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.tree_util import keystr, tree_leaves_with_path

from gradcomp._src.core.state import OwnedRows


@dataclasses.dataclass(frozen=True, eq=False)
class OptimizerTrace:
  """The traced functions of an optimizer, and the structure of its state."""

  init: ClosedJaxpr  # of the leaves of the parameters
  update: ClosedJaxpr  # of those of gradients, state, parameters and extra arguments
  count: int  # of the parameters
  owners: tuple[int | None, ...]  # of each leaf of the state, its parameter
  nodes: tuple[int, ...]  # the number of its tree
  stored: Any  # the state, with OwnedRows for trees like the parameters or masked ones


def trace(
  inner: optax.GradientTransformationExtraArgs, params: Any, extra_args: dict[str, Any]
) -> OptimizerTrace:
  """Traces an optimizer; ValueError for a state of other trees than the parameters'."""
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


def _places(state: Any, params: Any) -> tuple[Any, Any, Any]:
  """Returns the owners and the nodes of a state's leaves, and its stored form."""
  treedef: Any = jax.tree.structure(params, is_leaf=_is_hole)
  leaves = jax.tree.leaves(params, is_leaf=_is_hole)
  places = [i for i, x in enumerate(leaves) if not _is_hole(x)]
  number = {place: i for i, place in enumerate(places)}

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


# JAX's primitives whose results have each element from one element of each argument.
ELEMENTWISE = frozenset(
  "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp conj "
  "convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 "
  "expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max "
  "min mul ne neg nextafter not or pow pvary real reduce_precision rem round rsqrt "
  "select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt "
  "square sub tan tanh xor".split()
)

_CALLS = frozenset(
  "jit pjit closed_call core_call checkpoint custom_jvp_call custom_vjp_call".split()
)


def follow(closed: ClosedJaxpr, given: Sequence[Any], rule: Any) -> list[Any]:
  """Returns the values of a function's results, by a rule, through its calls.

  ``rule.constant(value, aval)`` and ``rule.equation(equation, given)`` give values, and
  ``rule.choice(which, results)`` those of a ``lax.cond`` from those of all branches.
  """
  avals = [x.aval for x in closed.jaxpr.constvars]
  consts = map(rule.constant, closed.consts, avals)
  values = dict(zip(closed.jaxpr.constvars, consts, strict=True))
  values |= zip(closed.jaxpr.invars, given, strict=True)

  given_by = lambda x: rule.constant(x.val, x.aval)
  read = lambda x: given_by(x) if isinstance(x, Literal) else values[x]
  for equation in closed.jaxpr.eqns:
    own = [read(x) for x in equation.invars]
    name, params = equation.primitive.name, equation.params
    found: Sequence[Any]
    if name in _CALLS:
      found = follow(_closed(params.get("jaxpr", params.get("call_jaxpr"))), own, rule)
    elif name == "cond":
      results = [follow(_closed(x), own[1:], rule) for x in params["branches"]]
      found = rule.choice(own[0], results)
    else:
      found = rule.equation(equation, own)
    values |= zip(equation.outvars, found, strict=True)
  return [read(x) for x in closed.jaxpr.outvars]


def _closed(function: ClosedJaxpr | Jaxpr) -> ClosedJaxpr:
  return ClosedJaxpr(function, []) if isinstance(function, Jaxpr) else function


_RANDOM = ("random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform")


class _Value(NamedTuple):
  """Facts about an intermediate result."""

  number: int  # equal for equal computations, of leaves of any shape
  leaf: int | None = None  # the number of the leaf that it depends on
  even: bool = True  # whether all its elements are equal, if it depends on no leaf
  real: bool = True  # whether its imaginary part is known to be zero, if on none


class _Alike:
  """Gives equal numbers to equal computations; ``complexes`` are leaves of pairs."""

  def __init__(self, names: Sequence[str], complexes: frozenset[int]):
    self._names = names
    self._complexes = complexes
    self._numbers: dict[Hashable, int] = {}

  def value(self, *what: Hashable, **facts: Any) -> _Value:
    """Returns the value of a computation, identified by hashable parts."""
    return _Value(self._numbers.setdefault(what, len(self._numbers)), **facts)

  def constant(self, value: Any, aval: Any) -> _Value:
    facts = {"even": not aval.ndim, "real": not jnp.iscomplexobj(aval)}
    key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    if aval.ndim or isinstance(value, jax.core.Tracer) or key:
      return self.value("constant", id(value), **facts)
    number = np.asarray(value)  # JAX computes with none of a mesh's arrays in a map
    facts["real"] = not number.imag
    return self.value(str(aval.dtype), number.tobytes(), **facts)

  def choice(self, which: _Value, results: Sequence[Sequence[_Value]]) -> list[_Value]:
    if which.leaf is not None:
      raise ValueError(
        f"`inner` must not decide by the elements of a leaf, but has a cond "
        f"of {self._names[which.leaf]}; {_CURE}"
      )
    found = []
    for values in zip(*results, strict=True):
      numbers = (which.number, *(x.number for x in values))
      leaf = self._leaf("cond", values)
      even, real = (all(x[i] for x in values) for i in (2, 3))
      found.append(self.value("cond", numbers, leaf=leaf, even=even, real=real))
    return found

  def equation(self, equation: Any, given: Sequence[_Value]) -> list[_Value]:
    name, params = equation.primitive.name, equation.params
    if name.startswith(_RANDOM):
      raise ValueError(
        f"`inner` must draw nothing at random, because every owner of rows would draw "
        f"the same, but computes {name}; put what adds noise, like "
        "optax.add_noise, behind zero or in front of it."
      )
    leaf = self._leaf(name, given)
    if leaf is not None:
      self._check(equation, given, leaf)
    even = all(x.even for x in given)
    if name == "broadcast_in_dim" and (even or leaf is not None):
      return [given[0]]
    even &= name in ELEMENTWISE
    facts = {"leaf": leaf, "real": all(x.real for x in given)}
    what = name, str(sorted(params.items())), tuple(x.number for x in given)
    return [
      self.value(*what, i, even=even or not x.aval.ndim, **facts)
      for i, x in enumerate(equation.outvars)
    ]

  def check_result(self, leaf: int | None, found: _Value) -> None:
    """Raises ValueError for a result of another leaf than it is kept with, if any."""
    if leaf is None and found.leaf is not None:
      raise ValueError(
        f"`inner` must keep numbers that are equal for all elements, but keeps one of "
        f"{self._names[found.leaf]}; {_CURE}"
      )
    if leaf is not None and (
      found.leaf not in (None, leaf) or (found.leaf is None and not found.even)
    ):
      raise ValueError(
        f"`inner` must make what it keeps of {self._names[leaf]}, and its updates, of "
        f"its own elements and of numbers; {_CURE}"
      )

  def _leaf(self, name: str, given: Sequence[_Value]) -> int | None:
    """Returns the one leaf that values depend on, or None; ValueError for several."""
    leaves = sorted({x.leaf for x in given if x.leaf is not None})
    if len(leaves) > 1:
      raise ValueError(
        f"`inner` must treat each leaf by itself, but computes {name} of "
        f"several, {', '.join(self._names[i] for i in leaves)}; {_CURE}"
      )
    return leaves[0] if leaves else None

  def _check(self, equation: Any, given: Sequence[_Value], leaf: int) -> None:
    """Raises ValueError for an operation that is not elementwise."""
    name = equation.primitive.name
    shapes = [x.aval.shape for x in (*equation.invars, *equation.outvars)]
    same = name == "broadcast_in_dim" and shapes[0] == shapes[-1]
    if name not in ELEMENTWISE and not same:
      raise ValueError(
        f"`inner` must treat each element by itself, because a worker sees only those "
        f"that it owns, but computes {name} of {self._names[leaf]}; {_CURE}"
      )
    if not all(x.even for x in given if x.leaf is None):
      raise ValueError(
        f"`inner` must compute with its gradients, its parameters, trees like them and "
        f"numbers, but computes {name} of {self._names[leaf]} and of "
        "another array; keep that in the state, as a tree like the parameters."
      )
    if leaf in self._complexes and not _keeps_parts(name, given):
      raise ValueError(
        f"`inner` must treat the real and the imaginary part of {self._names[leaf]} "
        f"each by itself, because zero cuts complex leaves into pairs, but "
        f"computes {name}; use an optimizer like optax.sgd for complex leaves, by "
        "optax.partition around several of zero, or keep them as pairs of real leaves."
      )


_CURE = (
  "put what needs whole gradients in front of zero, e.g. "
  "gradcomp.wrappers.clip_by_local_norm in place of optax.clip_by_global_norm, or take "
  "an exchange and then the optimizer in place of zero."
)


def kinds_of(
  trace: OptimizerTrace, names: Sequence[str], complexes: Sequence[bool] = ()
) -> tuple[int, ...]:
  """Returns a number for each leaf, equal for leaves that are treated equally.

  ``complexes`` says if a leaf is complex in the trace, and pairs of numbers in rows.
  """
  alike = _Alike(names, frozenset(i for i, x in enumerate(complexes) if x))
  places = list(zip(trace.owners, trace.nodes, strict=True))
  leaves = lambda what: [alike.value(what, leaf=i) for i in range(trace.count)]
  params, grads = leaves("p"), leaves("g")
  first = follow(trace.init, params, alike)
  held = [
    alike.value("s", k, str(x.dtype), leaf=owner, even=not x.ndim)
    for (owner, k), x in zip(places, trace.init.out_avals, strict=True)
  ]
  rest = trace.update.in_avals[2 * trace.count + len(held) :]
  extra = [alike.value("x", i, even=not x.ndim) for i, x in enumerate(rest)]
  found = follow(trace.update, [*grads, *held, *params, *extra], alike)
  marks = [[x.number] for x in found[: trace.count]]
  for i, x in enumerate(found[: trace.count]):
    alike.check_result(i, x)
  for (owner, k), *values in zip(places, first, found[trace.count :], strict=True):
    for x in values:
      alike.check_result(owner, x)
    if owner is not None:
      marks[owner] += [k, *(x.number for x in values)]
  kinds: dict[tuple[int, ...], int] = {}
  return tuple(kinds.setdefault(tuple(mark), len(kinds)) for mark in marks)


def _keeps_parts(name: str, given: Sequence[_Value]) -> bool:
  """Returns True for an operation that acts on real and imaginary parts separately."""
  # That are linear ones with real factors.
  if name in ("mul", "div"):
    own = [x.leaf is not None for x in given]
    real = all(x.real for x in given if x.leaf is None)
    return real and (own == [True, False] or (own == [False, True] and name == "mul"))
  linear = ("add", "add_any", "sub", "neg", "copy", "copy_p", "select_n")
  return name in (*linear, "convert_element_type", "broadcast_in_dim")
