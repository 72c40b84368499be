"""Reads what a traced program sends: each collective, with its dtype and bytes.

What a program sends is decided when it is traced, and tracing takes a tenth of the time
that compiling takes. That XLA keeps the collectives as they are, the tests of the
optimized HLO show.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr


class Sent(NamedTuple):
  """A collective of a program.

  Attributes:
    kind: the name in HLO, such as ``"all-gather"``.
    dtype: of the operand, as in HLO: ``"u32"``, ``"s8"``, ``"f32"``.
    nbytes: what each worker sends, by the arithmetic of the best algorithm for a ring.
  """

  kind: str
  dtype: str
  nbytes: float


# From JAX's primitives, whose names in typed maps end otherwise.
_KINDS = {
  "all_gather": "all-gather",
  "all_to_all": "all-to-all",
  "pmax": "all-reduce",
  "ppermute": "collective-permute",
  "psum": "all-reduce",
  "reduce_scatter": "reduce-scatter",
}


def collectives(traced: jax.stages.Traced) -> list[Sent]:
  """The collectives of a traced function, those of loops as often as they run."""
  return list(_walk(traced.jaxpr.jaxpr, dict(), 1))


def _walk(jaxpr: Jaxpr, sizes: dict[str, int], times: int) -> Iterator[Sent]:
  for equation in jaxpr.eqns:
    name = equation.primitive.name.removesuffix("_invariant")
    params = equation.params
    if name in _KINDS:
      yield from _sent(name, equation, sizes) * times
    inside, again = sizes, times
    if name == "shard_map":
      inside = {**sizes, **dict(params["mesh"].shape)}
    if name == "scan":
      again = times * params["length"]
    for value in params.values():
      for part in value if isinstance(value, tuple | list) else (value,):
        if isinstance(part, ClosedJaxpr):
          part = part.jaxpr
        if isinstance(part, Jaxpr):
          yield from _walk(part, inside, again)


def _sent(name: str, equation, sizes: dict[str, int]) -> list[Sent]:
  params = equation.params
  axes = params.get("axis_name", params.get("axes"))
  groups = params.get("axis_index_groups")
  workers = math.prod(sizes[a] for a in (axes if isinstance(axes, tuple) else (axes,)))
  workers = len(groups[0]) if groups else workers
  others = workers - 1
  found = []
  for operand in equation.invars:
    nbytes = operand.aval.size * operand.aval.dtype.itemsize
    share = {
      "all_gather": others,
      "ppermute": 1 if others else 0,
      "psum": 2 * others / workers,
      "pmax": 2 * others / workers,
    }.get(name, others / workers)
    dtype = operand.aval.dtype.name
    for long, short in (("uint", "u"), ("int", "s"), ("float", "f")):
      dtype = dtype.replace(long, short)
    found.append(Sent(_KINDS[name], dtype, share * nbytes))
  return found
