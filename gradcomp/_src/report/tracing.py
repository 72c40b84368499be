"""Traces an update over an abstract mesh, and reads the bytes of its messages."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import optax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from gradcomp._src.core.inputs import stand_ins
from gradcomp._src.core.state import is_state
from gradcomp._src.exchange.layout import Layout
from gradcomp._src.exchange.notes import FITTING, NOTE, Every, Options, Parts, note
from gradcomp._src.exchange.plan import Message, MessagePlan
from gradcomp._src.mesh.axes import (
  EXPLAINED,
  UnboundAxisError,
  abstract_mesh,
  axis_names,
)
from gradcomp._src.report.collectives import Stage, append, members, span

# What one of N workers sends, as a part of its operand's bytes, by JAX's primitives:
# the best algorithms for a ring, which wire_report counts by as well.
_SENT: dict[str, Callable[[int], Fraction]] = {
  "all_gather": lambda n: Fraction(n - 1),
  "all_to_all": lambda n: Fraction(n - 1, n),
  "pmax": lambda n: Fraction(2 * (n - 1), n),
  "ppermute": lambda n: Fraction(min(n - 1, 1)),
  "psum": lambda n: Fraction(2 * (n - 1), n),
}


@dataclasses.dataclass
class Found:
  """The bytes that one worker sends for one transformation.

  Attributes:
    plan: its messages.
    sizes: the sizes of the axes that it exchanges over.
    state: the number of its state, see :func:`states`; None if the trace hides it.
    by_leaf: the bytes of each leaf.
    inside: the part of these that stays inside the groups of two axes' second.
    fitting: the bytes that fit the codec, on top of these.
    stages: the collectives of the messages, by the messages' numbers in the plan.
    every: n, if it sends in one of n steps.
  """

  plan: MessagePlan
  sizes: tuple[int, ...]
  state: int | None
  by_leaf: list[Fraction]
  inside: Fraction = Fraction(0)
  fitting: Fraction = Fraction(0)
  stages: list[Stage] = dataclasses.field(default_factory=list)
  every: int = 1


class Trace(NamedTuple):
  """The transformations in an update, and the types of a worker's state.

  ``found`` are their bytes, in their order; of branches, the last ones. ``made`` are
  the plan and the options of each transformation, in all branches.
  """

  found: list[Found]
  made: list[tuple[MessagePlan, dict[str, Any]]]
  state: Any


def traced(
  optimizer: optax.GradientTransformation,
  params: Any,
  sizes: tuple[int, ...],
  *,
  bound: Mapping[str, int] | None = None,
  known: Callable[[str], int | None] = lambda name: None,
) -> Trace:
  """Traces an update, and binds each axis that it asks for, until none is missing.

  Args:
    optimizer: an optax transformation with gradcomp's in it.
    params: arrays, or their shapes and dtypes.
    sizes: the sizes of a transformation's axes, if their number is equal; else all
      workers are on its first axis.
    bound: the axes that are bound from the start, in the order of the workers, and
      their sizes.
    known: returns the size of an axis that does not take its size from ``sizes``.
  """
  like = jax.eval_shape(lambda params: params, params)
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
  kept: list[Any] = []
  update_of = optax.with_extra_args_support(optimizer).update

  def update(params: Any) -> Any:
    numbers = itertools.count()

    def numbered(x: Any) -> Any:
      return x._replace(count=note(next(numbers), x.count)[0]) if is_state(x) else x

    state = jax.tree.map(numbered, optimizer.init(params), is_leaf=is_state)
    kept[:] = [jax.tree.map(jax.typeof, state)]
    return update_of(params, state, params, **stand_ins(params))[0]

  order = tuple(bound or {})
  unnamed = sizes if len(sizes) <= len(EXPLAINED) else (math.prod(sizes),)
  bound = dict(zip(EXPLAINED, unnamed, strict=False)) | dict(bound or {})
  while True:
    try:
      mesh = abstract_mesh(bound)
      with use_abstract_mesh(AbstractMesh((), ())), use_abstract_mesh(mesh):
        trace = jax.make_jaxpr(
          jax.shard_map(update, in_specs=P(), out_specs=P(), check_vma=False)
        )(like)
      return Trace(_read(trace.jaxpr, bound, order), _made(trace.jaxpr), *kept)
    except OverflowError as error:  # of the number of a leaf's rows
      most = max(math.prod(x.shape) for x in jax.tree.leaves(like))
      raise ValueError(
        "`params` must have leaves of fewer elements, of which codecs count the rows "
        f"in 32 bits, got {most:.4g} in one; cut it."
      ) from error
    except UnboundAxisError as unbound:
      names = axis_names(unbound.axis_name)
      ones = (1,) * (len(names) - 1)
      fit = sizes if len(sizes) == len(names) else (math.prod(sizes), *ones)
      own = [known(name) or size for name, size in zip(names, fit, strict=True)]
      bound |= zip(names, own, strict=True)


def _read(
  jaxpr: Jaxpr, sizes: Mapping[str, int], order: tuple[str, ...]
) -> list[Found]:
  """Returns the bytes of each transformation in a traced update, inside notes only.

  ``order`` are the axes in the order of the workers, as far as it is known.
  """
  result: list[Found] = []
  now: object = None
  parts: tuple[int, ...] = ()
  every = 1
  for equation, state, times in _told(jaxpr, {}, 1, _last):
    if equation.primitive is not NOTE:
      axes = _axes(equation, sizes)
      nbytes = _sent(equation, axes, sizes)
      if now == FITTING:
        result[-1].fitting += times * nbytes
      elif isinstance(now, Message):
        found = result[-1]
        for i, share in zip(now.leaves, _shares(now.layout, parts), strict=True):
          found.by_leaf[i] += times * nbytes * share
        data = axis_names(found.plan.axis_name or EXPLAINED)
        ordered = order if set(order) >= set(axes) else data
        number = found.plan.messages.index(now)
        permutation = equation.params.get("perm", ())
        x = _operand(equation)
        stage = Stage(
          message=number,
          primitive=equation.primitive.name,
          workers=members(axes, sizes, permutation),
          span=span(axes, ordered, sizes, permutation),
          elements=x.size,
          bytes_in=x.size * x.dtype.itemsize,
          bytes_sent=nbytes,
          times=times,
        )
        append(found.stages, stage)
        if axes == data[1:]:
          found.inside += times * nbytes
    elif isinstance(about := equation.params["about"], Parts):
      parts = about.sizes
    elif isinstance(about, Every):
      every = about.steps
    else:
      now, parts = about, ()
      if isinstance(about, MessagePlan):
        nothing = [Fraction(0)] * len(about.names)
        own = _bound(axis_names(about.axis_name or EXPLAINED[0]), sizes)
        of_axes = tuple(sizes[axis] for axis in own)
        result.append(Found(about, of_axes, state, nothing, every=every))
  return result


def _made(jaxpr: Jaxpr) -> list[tuple[MessagePlan, dict[str, Any]]]:
  """Returns the plan and the options of each transformation."""
  result: list[tuple[MessagePlan, dict[str, Any]]] = []
  options: dict[str, Any] = {}
  for equation, *_ in _told(jaxpr, {}, 1, _all):
    about = equation.params.get("about")
    if isinstance(about, Options):
      options |= about.named
    elif isinstance(about, MessagePlan):
      result.append((about, options))
      options = {}
  return result


def _axes(equation: JaxprEqn, sizes: Mapping[str, int]) -> tuple[str, ...]:
  """Returns the axes of a collective."""
  axes = equation.params.get("axis_name", equation.params.get("axes"))
  return _bound(axes if isinstance(axes, tuple) else (axes,), sizes)


def _bound(axes: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[str, ...]:
  """Returns the axes; UnboundAxisError if one is bound outside explain."""
  if not sizes.keys() >= set(axes):
    raise UnboundAxisError(f"{axes} must be bound, got {sizes}.", axes)
  return axes


def _operand(equation: JaxprEqn) -> ShapedArray:
  (x,) = equation.invars
  assert isinstance(x.aval, ShapedArray)
  return x.aval


def _sent(
  equation: JaxprEqn, axes: tuple[str, ...], sizes: Mapping[str, int]
) -> Fraction:
  """Returns the bytes that a worker sends by a collective."""
  x = _operand(equation)
  workers = math.prod(sizes[axis] for axis in axes)
  return x.size * x.dtype.itemsize * _SENT[equation.primitive.name](workers)


def _shares(layout: Layout, parts: tuple[int, ...]) -> list[Fraction]:
  """Returns each leaf's share of a collective, by its part or by its rows.

  Parts that are neither a leaf's nor a codec's are shared like whole payloads.
  """
  rows, codecs = layout.rows, layout.codecs
  weights = [Fraction(size) for size in parts]
  if len(parts) != len(layout.slots):
    if len(parts) != len(codecs):
      parts = tuple(n * c.row_words for n, c in zip(rows, codecs, strict=True))
    weights = [
      Fraction(parts[group] * (stop - start), rows[group] or 1)
      for group, start, stop in layout.slots
    ]
  total = sum(weights) or 1
  return [weight / total for weight in weights]


_Told = tuple[JaxprEqn, int | None, int]


def _all(branches: list[list[_Told]]) -> list[list[_Told]]:
  return branches


def _last(branches: list[list[_Told]]) -> list[list[_Told]]:
  return list(filter(None, branches))[-1:]


def _told(
  jaxpr: Jaxpr,
  states: dict[Var, int],
  times: int,
  taken: Callable[[list[list[_Told]]], list[list[_Told]]],
) -> Iterator[_Told]:
  """Yields notes and collectives with the number of their state and of their runs.

  Args:
    jaxpr: a function, perhaps inside another one.
    states: the variables that are counts of states, with the numbers of these.
    times: the number of runs of the function.
    taken: picks branches: all, or the last that has notes or collectives.
  """
  for equation in jaxpr.eqns:
    name, params = equation.primitive.name, equation.params
    known = [None if isinstance(x, Literal) else states.get(x) for x in equation.invars]
    if equation.primitive is NOTE and isinstance(params["about"], int):
      states[equation.outvars[0]] = params["about"]
    elif equation.primitive is NOTE or name in _SENT:
      yield equation, known[0] if known else None, times
    else:
      found = []
      for part in _inside(params):
        pairs = zip(reversed(part.invars), reversed(known), strict=False)
        inner = {x: number for x, number in pairs if number is not None}
        again = times * params.get("length", 1)  # of a loop
        found.append(list(_told(part, inner, again, taken)))
      yield from itertools.chain(*(taken(found) if name == "cond" else found))


def _inside(params: Mapping[str, Any]) -> Iterator[Jaxpr]:
  """Yields the functions that an equation calls, which take its last arguments."""
  for part in jax.tree.leaves(tuple(params.values())):
    part = part.jaxpr if isinstance(part, ClosedJaxpr) else part
    if isinstance(part, Jaxpr):
      yield part
