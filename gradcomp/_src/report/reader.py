"""Reader of traces: the collectives of a function, and the notes of a study in it."""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh, PartitionSpec, use_abstract_mesh

from gradcomp._src.mesh.axes import UnboundAxisError, abstract_mesh
from gradcomp._src.mesh.study import NOTE
from gradcomp._src.report import collectives


class Place(NamedTuple):
  """The place of an equation."""

  scope: str = ""  # the names of the scopes around it
  times: int = 1  # the number of its runs
  in_loop: bool = False
  trips_unknown: bool = False  # of one of the loops
  branches: tuple[collectives.Branch, ...] = ()


class Event(NamedTuple):
  """A note or a collective in a trace."""

  equation: JaxprEqn
  place: Place
  state: int | None  # the number of the state that a note is about, if it is known
  shown: bool = True  # whether its branches are the last ones that have events


def traced(
  function: Callable[..., Any], sizes: Mapping[str, int], *args: Any, **options: Any
) -> Jaxpr:
  """Traces a function in a map over axes of these sizes, for which no device is."""
  mesh = abstract_mesh(sizes)
  spec: Any = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec()}
  with use_abstract_mesh(AbstractMesh((), ())), use_abstract_mesh(mesh):
    mapped = jax.shard_map(function, **spec, **options) if sizes else function
    return jax.make_jaxpr(mapped)(*args).jaxpr


def events(jaxpr: Jaxpr) -> list[Event]:
  """Returns the notes and collectives of a function, and of those that it calls."""
  quiet, conds = set[int](), itertools.count()  # functions without events, conditionals

  def walk(jaxpr: Jaxpr, states: dict[Var, int], around: Place) -> list[Event]:
    """Returns the events of a function at a place, by the variables of counts."""
    result: list[Event] = []
    for equation in jaxpr.eqns:
      name, params = equation.primitive.name.removesuffix("_invariant"), equation.params
      is_event = equation.primitive is NOTE or name in collectives.KINDS
      called = [] if is_event else [*functions(equation)]
      inside = [(i, x) for i, x in enumerate(called) if id(x) not in quiet]
      if not is_event and not inside:
        continue
      args = equation.invars
      known = [None if isinstance(x, Literal) else states.get(x) for x in args]
      here = around._replace(
        scope=f"{around.scope}/{equation.source_info.name_stack}".strip("/"),
        times=around.times * params.get("length", 1),  # of a loop
        in_loop=around.in_loop or name in ("scan", "while"),
        trips_unknown=around.trips_unknown or name == "while",
      )
      if is_event and isinstance(params.get("about"), int):
        states[equation.outvars[0]] = params["about"]
      elif is_event:
        result.append(Event(equation, here, known[0] if known else None))
      conditional = f"cond.{next(conds)}" if name == "cond" else ""
      found: list[list[Event]] = []
      for i, part in inside:
        if conditional:
          branch = conditional, i, len(called)
          here = here._replace(branches=(*around.branches, branch))
        # A function takes the last arguments of its equation.
        pairs = zip(reversed(part.invars), reversed(known), strict=False)
        inner = {x: number for x, number in pairs if number is not None}
        if not (its := walk(part, inner, here)):
          quiet.add(id(part))
        found.append(its)
      if conditional:
        *others, last = list(filter(None, found)) or [[]]
        found = [*([x._replace(shown=False) for x in y] for y in others), last]
      result += itertools.chain(*found)
    return result

  return walk(jaxpr, {}, Place())


def functions(equation: JaxprEqn) -> Iterator[Jaxpr]:
  """Yields the functions that an equation calls."""
  for value in equation.params.values():
    for part in value if isinstance(value, tuple | list) else (value,):
      part = part.jaxpr if isinstance(part, ClosedJaxpr) else part
      if isinstance(part, Jaxpr):
        yield part


def collective_of(event: Event, sizes: Mapping[str, int]) -> collectives.Collective:
  """Returns the record of a collective in a map over axes of these sizes."""
  params = event.equation.params
  axes = bound_axes(axes_of(event.equation), sizes)
  groups = params.get("axis_index_groups")
  if "perm" in params:
    workers = max(map(len, collectives.connected(params["perm"])), default=1)
  else:
    workers = len(groups[0]) if groups else math.prod(sizes[axis] for axis in axes)
  types: list[Any] = [x.aval for x in event.equation.invars]
  return collectives.Collective(
    kind=collectives.KINDS[event.equation.primitive.name.removesuffix("_invariant")],
    operands=spelled(types),
    workers=workers,
    axis=",".join(axes) if workers > 1 else "",
    **event.place._asdict(),
  )


def axes_of(equation: JaxprEqn) -> tuple[str, ...]:
  """Returns the axes of a collective."""
  axes = equation.params.get("axis_name", equation.params.get("axes"))
  return axes if isinstance(axes, tuple) else (axes,)


def bound_axes(axes: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[str, ...]:
  """Returns the axes; UnboundAxisError if one is bound outside of the trace."""
  if not sizes.keys() >= set(axes):
    raise UnboundAxisError(f"{axes} must be bound, got {sizes}.", axes)
  return axes


def spelled(types: Iterable[Any]) -> collectives.Shapes:
  """Returns dtypes and shapes in HLO's spelling, as u32 and bf16."""
  names = {"uint": "u", "int": "s", "float": "f", "complex": "c", "bool": "pred"}
  short = lambda x: re.sub("|".join(names), lambda match: names[match[0]], x.dtype.name)
  return tuple((short(x).replace("_", ""), x.shape) for x in types)
