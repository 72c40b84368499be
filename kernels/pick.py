"""Calls a function of one of several arrays, which a number picks as a program runs."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import batching, mlir

T = TypeVar("T")

# `jax.lax.switch` traces each branch with all arrays, which takes time by the square of
# their number. This traces the function once.
_PICK = Primitive("gradcomp_pick")
_PICK.multiple_results = True


def pick(function: Callable[[Array], T], number: Array, arrays: Sequence[Array]) -> T:
  """Returns ``function(arrays[number])``, of arrays of one type."""
  if len(arrays) == 1:
    return function(arrays[0])
  assert len(set(map(jax.typeof, arrays))) == 1
  closed, like = jax.make_jaxpr(function, return_shape=True)(arrays[0])
  # What the function takes from around it is an operand, too.
  names = [*closed.jaxpr.invars, *closed.jaxpr.constvars]
  body = ClosedJaxpr(closed.jaxpr.replace(constvars=[], invars=names), [])
  number = lax.convert_element_type(number, "int32")  # XLA takes no other
  found = _PICK.bind(number, *arrays, *closed.consts, body=body, count=len(arrays))
  return jax.tree.unflatten(jax.tree.structure(like), found)


@_PICK.def_abstract_eval
def _types(*_: Any, body: ClosedJaxpr, count: int) -> list[Any]:
  return body.out_avals


@_PICK.def_impl
def _switch(number: Array, *operands: Array, body: ClosedJaxpr, count: int) -> Any:
  function, rest = jaxpr_as_fun(body), operands[count:]
  branches = [functools.partial(function, x, *rest) for x in operands[:count]]
  return lax.switch(number, branches)


def _batched(operands: Any, axes: Any, **params: Any) -> tuple[Any, list[int]]:
  found = jax.vmap(functools.partial(_switch, **params), axes)(*operands)
  return found, [0] * len(found)


def _lower(
  ctx: Any, number: Any, *operands: Any, body: ClosedJaxpr, count: int
) -> Sequence[Any]:
  function = jax.jit(jaxpr_as_fun(body))  # which a program then holds once
  lowered = mlir.lower_fun(function)
  same = [*body.jaxpr.outvars] == body.jaxpr.invars[:1]
  types = [mlir.aval_to_ir_type(ctx.module_context, x) for x in ctx.avals_out]
  case = stablehlo.CaseOp(types, index=number, num_branches=count)
  for region, x in zip(case.regions, operands[:count], strict=True):
    own = ctx.replace(avals_in=body.in_avals)  # a context takes results once
    with ir.InsertionPoint(region.blocks.append()):
      found = [x] if same else lowered(own, x, *operands[count:])
      stablehlo.return_(jax.tree.leaves(found))
  return case.results


batching.primitive_batchers[_PICK] = _batched
mlir.register_lowering(_PICK, _lower)
