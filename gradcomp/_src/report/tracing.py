"""Studies of an update: the bytes of its messages, from a trace over abstract axes."""

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
from jax.extend.core import Jaxpr, JaxprEqn

from gradcomp._src.core.border import stand_ins
from gradcomp._src.core.state import is_state
from gradcomp._src.exchange.layout import Layout
from gradcomp._src.exchange.plan import MessagePlan, own_axes
from gradcomp._src.exchange.protocol import Message
from gradcomp._src.mesh import axes as mesh_axes
from gradcomp._src.mesh import study as studies
from gradcomp._src.mesh import trees
from gradcomp._src.report import reader
from gradcomp._src.report.collectives import Collective, span

# The axes, (between, inside) or the first, of a transformation that names none.
UNNAMED = ("gradcomp_between", "gradcomp_inside")

_Sizes = Mapping[str, int]
_Axes = tuple[str, ...]
_Made = tuple[MessagePlan, dict[str, Any]]


@dataclasses.dataclass
class Found:
  """The bytes that one worker sends for one transformation."""

  plan: MessagePlan
  sizes: tuple[int, ...]  # of the axes that it exchanges over
  state: int | None  # its number in the optimizer; None if the trace hides it
  by_leaf: list[Fraction]
  every: int  # n, if it sends in one of n steps
  layers: tuple[int, ...]  # (L,) if it exchanges L layers, one after the other
  inside: Fraction = Fraction(0)  # the part inside the groups of two axes' second
  fitting: Fraction = Fraction(0)  # to fit the codec, on top of these
  collectives: list[Collective] = dataclasses.field(default_factory=list)
  ends_in_sum: bool = False  # whether the last of these is a sum


class Trace(NamedTuple):
  """The transformations in an update, and the types of a worker's state."""

  found: list[Found]  # of branches, the last ones
  made: list[_Made]  # plans and options, of all branches
  state: Any


# The results that are kept for an optimizer. Each holds a tree of the user's types.
_MOST = 16

# Of the functions update and init of an optimizer, while these live: the results by
# shapes and axes. Its readers trace an update once if the workers are on one axis.
_kept: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

_same = lambda tree: tree  # one function, so that JAX caches its traces


def study(
  optimizer: optax.GradientTransformation, params: Any, workers: mesh_axes.WorkerSizes
) -> Trace:
  """Returns the transformations in an update of parameters, or of their shapes."""
  return study_in(optimizer, params, *mesh_axes.sizes_of(workers))


def study_in(
  optimizer: optax.GradientTransformation,
  params: Any,
  sizes: tuple[int, ...],
  bound: Mapping[str, int],
  known: Callable[[str], int | None] = lambda axis: None,
) -> Trace:
  """Traces an update, and binds each axis that it asks for, until none is missing."""
  # Sizes are those of a transformation's axes, if their number is equal; else all
  # workers are on its first axis. `bound` axes are in the order of the workers.
  leaves, treedef = jax.tree.flatten(jax.eval_shape(_same, trees.trainable(params)))
  like = tuple((x.shape, x.dtype) for x in leaves)
  order = tuple(bound) if len(bound) > 1 else ()  # of one axis there is one order
  axes = UNNAMED[: len(sizes)] if len(sizes) <= len(UNNAMED) else UNNAMED[:1]
  now = dict(bound)
  try:
    of_update = _kept.setdefault(optimizer.update, weakref.WeakKeyDictionary())
    kept = of_update.setdefault(optimizer.init, {})
  except TypeError:  # of an optimizer that cannot be a key
    kept = {}
  while True:
    # A study depends on this and on the optimizer alone.
    place = jnp.result_type(float), studies.platform()
    key = treedef, like, tuple(now.items()), order, axes, place
    found = kept.get(key)
    if found is None:
      tree = jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(*x) for x in like])
      try:
        found = _trace(optimizer, tree, now, order, axes)
      except mesh_axes.UnboundAxisError as unbound:
        found = mesh_axes.axis_names(unbound.axis_name)
      kept[key] = found
      for old in list(kept)[:-_MOST]:
        kept.pop(old, None)
    if isinstance(found, Trace):
      return found
    ones = (1,) * (len(found) - 1)
    fit = sizes if len(sizes) == len(found) else (math.prod(sizes), *ones)
    if bound and found != axes:
      raise ValueError(
        f"`workers` must have the size of each axis that is exchanged over, got "
        f"{bound} and an exchange over {found[0]!r}; add its size."
      )
    pairs = zip(found, fit, strict=True)
    now |= pairs if found == axes else [(x, known(x) or size) for x, size in pairs]


def _trace(
  tx: optax.GradientTransformation, like: Any, sizes: _Sizes, order: _Axes, axes: _Axes
) -> Trace:
  """Traces an update in a map over axes of these sizes; UnboundAxisError for others."""
  types: list[Any] = []
  update_of = optax.with_extra_args_support(tx).update

  def update(params: Any) -> Any:
    numbers = itertools.count()
    one = lambda x: x._replace(count=studies.note(next(numbers), x.count)[0])
    numbered = lambda x: one(x) if is_state(x) else x
    state = jax.tree.map(numbered, tx.init(params), is_leaf=is_state)
    types.append(jax.tree.map(jax.typeof, state))
    return update_of(params, state, params, **stand_ins(params))[0]

  try:
    with studies.STUDY(studies.Study(mesh_axes.as_axis_name(axes), frozenset(sizes))):
      jaxpr = reader.traced(update, sizes, like, check_vma=False)
  except OverflowError as error:  # of the number of a leaf's rows
    most = max(math.prod(x.shape) for x in jax.tree.leaves(like))
    raise ValueError(
      "`params` must have leaves of fewer elements, because codecs count rows in 32 "
      f"bits, got {most:.4g} in one; cut it."
    ) from error
  return Trace(*_read(jaxpr, sizes, order), types[0])


def _read(jaxpr: Jaxpr, sizes: _Sizes, order: _Axes) -> tuple[list[Found], list[_Made]]:
  """Returns the bytes, and the plans and options, of transformations in a study."""
  result, made, options = list[Found](), list[_Made](), dict[str, Any]()
  now: object = None
  parts: tuple[int, ...] = ()

  def add(found: Found, event: reader.Event) -> None:
    """Adds a collective of a message, or of the fit of codecs, to a transformation."""
    one = reader.collective_of(event, sizes)
    sent = one.times * one.exact_bytes_sent
    if not isinstance(now, Message):
      found.fitting += sent
      return
    for i, share in zip(now.leaves, _shares(now.layout, parts), strict=True):
      found.by_leaf[i] += sent * share
    data, axes = own_axes(found.plan.axis_name, ()), reader.axes_of(event.equation)
    if axes == data[1:]:
      found.inside += sent
    ranks = order if set(order) >= set(axes) else data
    row = span(axes, ranks, sizes, event.equation.params.get("perm", ()))
    one = dataclasses.replace(one, message=found.plan.messages.index(now), span=row)
    is_sum = str(event.equation.primitive) == "psum"
    alike = lambda x: (x.message, x.workers, x.span, x.times)
    if is_sum and found.ends_in_sum and alike(found.collectives[-1]) == alike(one):
      last = found.collectives.pop()  # XLA joins consecutive sums to one
      one = dataclasses.replace(last, operands=last.operands + one.operands)
    found.collectives.append(one)
    found.ends_in_sum = is_sum

  for event in reader.events(jaxpr):
    match event.equation.params.get("about"):
      case studies.PARTS, sent if event.shown:
        parts = sent
      case str(name), value:
        options[name] = value
      case MessagePlan() as plan:
        made.append((plan, options))
        if event.shown:
          now, parts, nothing = plan, (), [Fraction(0)] * len(plan.names)
          names = reader.bound_axes(own_axes(plan.axis_name, ()), sizes)
          of_axes = tuple(sizes[axis] for axis in names)
          every, layers = options.get("every", 1), options.get("layers", ())
          result.append(Found(plan, of_axes, event.state, nothing, every, layers))
        options = {}
      case about if event.shown and event.equation.primitive is studies.NOTE:
        now, parts = about, ()
      case _ if event.shown and (now == studies.FITTING or isinstance(now, Message)):
        add(result[-1], event)
  return result, made


def _shares(layout: Layout, parts: tuple[int, ...]) -> list[Fraction]:
  """Returns each leaf's share of a collective, by its part or by its rows."""
  rows, codecs = layout.rows, layout.codecs
  weights = [Fraction(size) for size in parts]
  if len(parts) != len(layout.slots):
    if len(parts) != len(codecs):  # they are shared like whole payloads
      parts = tuple(n * c.row_words for n, c in zip(rows, codecs, strict=True))
    of_slot = lambda i, start, stop: Fraction(parts[i] * (stop - start), rows[i] or 1)
    weights = list(itertools.starmap(of_slot, layout.slots))
  total = sum(weights) or 1
  return [weight / total for weight in weights]


def first_plans(init: Callable[[Any], Any], like: Any) -> list[MessagePlan | None]:
  """Returns the plans of first states by the counts of ``init``; None if unseen."""
  with studies.STUDY(studies.Study()):
    jaxpr = jax.make_jaxpr(init)(like).jaxpr
  plan, plans = None, dict[int, MessagePlan | None]()  # by the equation of a count
  for event in reader.events(jaxpr):
    match event.equation.params.get("about"):
      case studies.PLANNED, plan:
        pass
      case studies.FIRST:
        plans[id(event.equation)] = plan
  return [plans.get(id(_source(jaxpr, x))) for x in jaxpr.outvars]


def _source(jaxpr: Jaxpr, value: Any) -> JaxprEqn | None:
  """Returns the note that a result has passed last, also inside of functions."""
  for equation in jaxpr.eqns:
    if value in equation.outvars:
      number = equation.outvars.index(value)
      parts = reader.functions(equation)
      found = (_source(x, y) for x in parts for y in x.outvars[number : number + 1])
      is_note = equation.primitive is studies.NOTE
      return equation if is_note else next(filter(None, found), None)
  return None
