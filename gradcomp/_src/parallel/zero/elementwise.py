"""Runs a trace on rows of its leaves, and refuses all that mixes elements."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from gradcomp._src.mesh import types

# JAX's primitives that compute each element from one element of each argument.
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
    even, real = even and name in ELEMENTWISE, all(x.real for x in given)
    found = _computed(equation, [x.x for x in given])
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
    if leaf in self.pairs and not _keeps_parts(name, given):
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


def _computed(equation: Any, arrays: Sequence[Any]) -> Sequence[Any]:
  """Returns the results of an operation; None where an argument is."""
  if any(x is None for x in arrays):
    return [None] * len(equation.outvars)
  if equation.primitive.name in ELEMENTWISE:
    arrays = alike(*arrays)
  else:
    shapes = [x.aval.shape for x in equation.invars]
    arrays = list(map(jnp.broadcast_to, arrays, shapes))
  found = equation.primitive.bind(*arrays, **equation.params)
  return found if equation.primitive.multiple_results else [found]


def _keeps_parts(name: str, given: Sequence[_Value]) -> bool:
  """Returns True for an operation that acts on real and imaginary parts separately."""
  # These are linear, with real factors.
  if name in ("mul", "div"):
    own = [x.leaf is not None for x in given]
    real = all(x.real for x in given if x.leaf is None)
    return real and (own == [True, False] or (own == [False, True] and name == "mul"))
  linear = ("add", "add_any", "sub", "neg", "copy", "copy_p", "select_n")
  return name in (*linear, "convert_element_type", "broadcast_in_dim")


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
