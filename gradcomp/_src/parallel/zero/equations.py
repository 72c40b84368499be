"""An interpreter of the equations of a traced function, by an abstract rule."""

from collections.abc import Sequence
from typing import Any, Protocol

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

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


class Rule(Protocol):
  """An abstract interpretation: values for constants, and results of equations."""

  def constant(self, value: Any, aval: Any) -> Any:
    """Returns the value of a constant."""

  def equation(self, equation: Any, given: Sequence[Any]) -> Sequence[Any]:
    """Returns the values of the results of an equation, a ``JaxprEqn``."""

  def choice(self, which: Any, results: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """Returns the values of one of several branches."""


def follow(closed: ClosedJaxpr, given: Sequence[Any], rule: Rule) -> list[Any]:
  """Returns the values of a function's results, by a rule, through its calls.

  All branches of a ``lax.cond`` are followed.
  """
  avals = [x.aval for x in closed.jaxpr.constvars]
  consts = map(rule.constant, closed.consts, avals)
  values = dict(zip(closed.jaxpr.constvars, consts, strict=True))
  values |= zip(closed.jaxpr.invars, given, strict=True)

  def read(x: Any) -> Any:
    return rule.constant(x.val, x.aval) if isinstance(x, Literal) else values[x]

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
