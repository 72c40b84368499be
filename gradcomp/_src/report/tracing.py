"""Studies of an update: the bytes of its messages, from a trace over abstract axes.

Results are kept while the optimizer lives, one a tree of shapes and set of axes, and
the last of them only. So ``explain``, ``record``, ``inspect`` and the report of a train
step trace an update once between them, where the workers are on one axis.
"""

import dataclasses
import itertools
import math
import weakref
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Jaxpr, Literal, Var
from jax.sharding import AbstractMesh, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from gradcomp._src.core.inputs import stand_ins
from gradcomp._src.core.state import is_state
from gradcomp._src.exchange.layout import Layout
from gradcomp._src.exchange.plan import Message, MessagePlan
from gradcomp._src.mesh.axes import (
  UnboundAxisError,
  WorkerSizes,
  abstract_mesh,
  axis_names,
  only_named,
  sizes_of,
)
from gradcomp._src.mesh.study import (
  FIRST,
  FITTING,
  NOTE,
  STUDY,
  Options,
  Parts,
  Planned,
  Study,
  note,
)
from gradcomp._src.report.collectives import Collective, span
from gradcomp._src.report.reader import (
  Event,
  axes_of,
  bound_axes,
  collective_of,
  events,
  functions,
)

# The axes, (between, inside) or the first, of a transformation that names none.
UNNAMED = ("gradcomp_between", "gradcomp_inside")


@dataclasses.dataclass
class Found:
  """The bytes that one worker sends for one transformation."""

  plan: MessagePlan
  sizes: tuple[int, ...]  # of the axes that it exchanges over
  state: int | None  # its number in the optimizer; None if the trace hides it
  by_leaf: list[Fraction]
  every: int  # n, if it sends in one of n steps
  inside: Fraction = Fraction(0)  # the part inside the groups of two axes' second
  fitting: Fraction = Fraction(0)  # to fit the codec, on top of these
  collectives: list[Collective] = dataclasses.field(default_factory=list)
  ends_in_sum: bool = False  # whether the last of these is a sum


class Trace(NamedTuple):
  """The transformations in an update, and the types of a worker's state."""

  found: list[Found]  # of branches, the last ones
  made: list[tuple[MessagePlan, dict[str, Any]]]  # plans and options, of all branches
  state: Any


# The results that are kept for an optimizer. Each holds a tree of the user's types.
_MOST = 16

# Of the functions update and init of an optimizer: the results by shapes and axes.
_kept: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def study(
  optimizer: optax.GradientTransformation, params: Any, workers: WorkerSizes
) -> Trace:
  """Returns the transformations in an update of parameters, or of their shapes."""
  sizes, by_name = sizes_of(workers)
  return study_in(optimizer, params, sizes, by_name, only_named(by_name))


def study_in(
  optimizer: optax.GradientTransformation,
  params: Any,
  sizes: tuple[int, ...],
  bound: Mapping[str, int],
  known: Callable[[str], int | None],
) -> Trace:
  """Traces an update, and binds each axis that it asks for, until none is missing.

  ``sizes`` are those of a transformation's axes, if their number is equal; else all
  workers are on its first axis. ``bound`` are bound from the start, in the order of the
  workers. ``known`` returns the size of an axis that has one of its own.
  """
  leaves, treedef = jax.tree.flatten(jax.eval_shape(_same, params))
  like = tuple((x.shape, x.dtype) for x in leaves)
  order = tuple(bound) if len(bound) > 1 else ()  # of one axis there is one order
  axes = UNNAMED[: len(sizes)] if len(sizes) <= len(UNNAMED) else UNNAMED[:1]
  now = dict(bound)
  kept = _kept_of(optimizer)
  while True:
    # A study depends on this, and on nothing else that a caller of an optimizer that
    # stays what it is can change.
    key = treedef, like, tuple(now.items()), order, axes, jnp.result_type(float)
    found = kept.get(key)
    if found is None:
      tree = jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(*x) for x in like])
      try:
        found = _trace(optimizer, tree, now, order, axes)
      except UnboundAxisError as unbound:
        found = axis_names(unbound.axis_name)
      kept[key] = found
      for old in list(kept)[:-_MOST]:
        kept.pop(old, None)
    if isinstance(found, Trace):
      return found
    ones = (1,) * (len(found) - 1)
    fit = sizes if len(sizes) == len(found) else (math.prod(sizes), *ones)
    unnamed = dict(zip(axes, fit, strict=True)) if found == axes else {}
    own = [known(x) or size for x, size in zip(found, fit, strict=True) if not unnamed]
    now |= unnamed or zip(found, own, strict=True)


def _same(tree: Any) -> Any:
  return tree


def _kept_of(optimizer: optax.GradientTransformation) -> dict[Any, Any]:
  """Returns the studies of an optimizer; none for one that cannot be a key."""
  try:
    of_update = _kept.setdefault(optimizer.update, weakref.WeakKeyDictionary())
    return of_update.setdefault(optimizer.init, {})
  except TypeError:
    return {}


def _trace(
  optimizer: optax.GradientTransformation,
  like: Any,
  sizes: Mapping[str, int],
  order: tuple[str, ...],
  unnamed: tuple[str, ...],
) -> Trace:
  """Traces an update in a map over axes of these sizes; UnboundAxisError for others."""
  types: list[Any] = []
  update_of = optax.with_extra_args_support(optimizer).update

  def update(params: Any) -> Any:
    numbers = itertools.count()

    def numbered(x: Any) -> Any:
      return x._replace(count=note(next(numbers), x.count)[0]) if is_state(x) else x

    state = jax.tree.map(numbered, optimizer.init(params), is_leaf=is_state)
    types.append(jax.tree.map(jax.typeof, state))
    return update_of(params, state, params, **stand_ins(params))[0]

  mesh = abstract_mesh(sizes)
  kind = Study(unnamed if len(unnamed) > 1 else unnamed[0], frozenset(sizes))
  mapped = jax.shard_map(update, in_specs=P(), out_specs=P(), check_vma=False)
  outside = use_abstract_mesh(AbstractMesh((), ()))
  try:
    with STUDY(kind), outside, use_abstract_mesh(mesh):
      jaxpr = jax.make_jaxpr(mapped if sizes else update)(like).jaxpr
  except OverflowError as error:  # of the number of a leaf's rows
    most = max(math.prod(x.shape) for x in jax.tree.leaves(like))
    raise ValueError(
      "`params` must have leaves of fewer elements, of which codecs count the rows "
      f"in 32 bits, got {most:.4g} in one; cut it."
    ) from error
  return Trace(*_read(jaxpr, sizes, order), types[0])


def _read(
  jaxpr: Jaxpr, sizes: Mapping[str, int], order: tuple[str, ...]
) -> tuple[list[Found], list[tuple[MessagePlan, dict[str, Any]]]]:
  """Returns the bytes, and the plans and options, of transformations in a study.

  ``order`` are the axes in the order of the workers, as far as it is known.
  """
  result: list[Found] = []
  made: list[tuple[MessagePlan, dict[str, Any]]] = []
  options: dict[str, Any] = {}
  now: object = None
  parts: tuple[int, ...] = ()
  for event in events(jaxpr):
    about = event.equation.params.get("about")
    if isinstance(about, Options):
      options |= about.named
    elif isinstance(about, MessagePlan):
      made.append((about, options))
      if event.shown:
        now, parts, nothing = about, (), [Fraction(0)] * len(about.names)
        of_axes = tuple(sizes[axis] for axis in bound_axes(_data_axes(about), sizes))
        every = options.get("every", 1)
        result.append(Found(about, of_axes, event.state, nothing, every))
      options = {}
    elif event.shown and isinstance(about, Parts):
      parts = about.sizes
    elif event.shown and event.equation.primitive is NOTE:
      now, parts = about, ()
    elif event.shown and (now == FITTING or isinstance(now, Message)):
      _add(result[-1], now, parts, event, sizes, order)
  return result, made


def _add(
  found: Found,
  about: object,
  parts: tuple[int, ...],
  event: Event,
  sizes: Mapping[str, int],
  order: tuple[str, ...],
) -> None:
  """Adds a collective of a message, or of the fit of codecs, to a transformation."""
  collective = collective_of(event, sizes)
  sent = event.place.times * collective.exact_bytes_sent
  if not isinstance(about, Message):
    found.fitting += sent
    return
  for i, share in zip(about.leaves, _shares(about.layout, parts), strict=True):
    found.by_leaf[i] += sent * share
  data, axes = _data_axes(found.plan), axes_of(event.equation)
  if axes == data[1:]:
    found.inside += sent
  ranks = order if set(order) >= set(axes) else data
  one = dataclasses.replace(
    collective,
    message=found.plan.messages.index(about),
    span=span(axes, ranks, sizes, event.equation.params.get("perm", ())),
  )
  is_sum = str(event.equation.primitive) == "psum"
  last = found.collectives[-1] if is_sum and found.ends_in_sum else one
  joined = (last.message, last.workers, last.span, last.times)
  if last is not one and joined == (one.message, one.workers, one.span, one.times):
    # XLA joins consecutive sums to one.
    operands = last.operands + one.operands
    found.collectives[-1] = dataclasses.replace(last, operands=operands)
  else:
    found.collectives.append(one)
  found.ends_in_sum = is_sum


def _data_axes(plan: MessagePlan) -> tuple[str, ...]:
  return () if plan.axis_name is None else axis_names(plan.axis_name)


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


def first_plans(
  init: Callable[[Any], list[jax.Array]], like: Any
) -> list[MessagePlan | None]:
  """Traces a function that makes first states and returns the counts of these.

  Returns the plan that each state was made for; None where the trace does not show it.
  """
  with STUDY(Study()):
    jaxpr = jax.make_jaxpr(init)(like).jaxpr
  plans = _planned(jaxpr)
  return [None if isinstance(x, Literal) else plans.get(x) for x in jaxpr.outvars]


def _planned(jaxpr: Jaxpr) -> dict[Var, MessagePlan]:
  """Returns the plans of the first states in a trace, by the counts of these."""
  result: dict[Var, MessagePlan] = {}
  plan: Any = None
  for equation in jaxpr.eqns:
    about = equation.params.get("about")
    if equation.primitive is not NOTE:
      for part in functions(equation):
        inner = _planned(part)
        pairs = zip(part.outvars, equation.outvars, strict=False)
        result |= {x: inner[y] for y, x in pairs if isinstance(y, Var) and y in inner}
    elif isinstance(about, Planned):
      plan = about.plan
    elif about == FIRST:
      result[equation.outvars[0]] = plan
  return result
