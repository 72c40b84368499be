"""The validated options of a transformation, and the parts of its steps."""

import dataclasses
import warnings
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath, keystr
from jax.typing import ArrayLike

from gradcomp._src import checks
from gradcomp._src.checks import see
from gradcomp._src.codecs.protocol import LeafCodec, working_dtype
from gradcomp._src.codecs.sums.records import Leaf, Memory
from gradcomp._src.codecs.sums.sum import sum_limit
from gradcomp._src.core import feedback as feedbacks
from gradcomp._src.core import state as states
from gradcomp._src.core.border import pairs
from gradcomp._src.core.feedback import Feedback, as_feedback
from gradcomp._src.core.state import CompressState
from gradcomp._src.exchange import auto, protocol, schedules
from gradcomp._src.exchange import layout as layouts
from gradcomp._src.exchange import plan as plans
from gradcomp._src.exchange.step import Step
from gradcomp._src.kernels.gpu import table
from gradcomp._src.mesh import agreement, study, types
from gradcomp._src.mesh import axes as mesh_axes
from gradcomp._src.mesh.axes import Axes, AxisName, as_axis_name, axes_in, axis_names
from gradcomp._src.mesh.trees import is_box
from gradcomp._src.mesh.types import Place

Dither = Literal["shared", "independent"]

_AXES = checks.optional(checks.Rule(lambda _, x: as_axis_name(axis_names(x))))
_EXCHANGE = checks.Rule(lambda _, x: auto.as_exchange(x))
_SIZE = checks.optional(checks.integer("a number of elements, 0 or more, or None", 0))


def _message_bytes(name: str, value: Any) -> plans.MessageBytes:
  """Returns the option ``message_bytes``; ValueError for values that it cannot have."""
  rule = 'a number of bytes, 0 or more, "auto", or None for one message'
  is_auto = isinstance(value, str) and value == "auto"
  return "auto" if is_auto else checks.static_integer(name, rule, value, least=0)


_BYTES = checks.optional(checks.Rule(_message_bytes))
_AUTO: Any = "auto"  # a feedback, once the codec is known


@dataclasses.dataclass(frozen=True, eq=False)
class Compression(checks.Checked):
  """The options of :func:`gradcomp.compress`; it resolves short forms to objects."""

  codec: LeafCodec
  axis_name: AxisName | None = checks.field(None, _AXES)
  exchange: auto.Auto | protocol.Exchange = checks.field("auto", _EXCHANGE)
  feedback: Feedback = _AUTO
  min_leaf_size: int | None = checks.field(None, _SIZE)
  message_bytes: plans.MessageBytes = checks.field("auto", _BYTES)
  key: ArrayLike = 0
  dither: Dither = checks.field("shared", checks.choice(Dither))

  def __post_init__(self) -> None:
    super().__post_init__()
    object.__setattr__(self, "feedback", as_feedback(self.feedback, self.codec))
    facts = self.codec.facts
    if not isinstance(self.exchange, auto.Auto):
      if refusal := facts.naming(self.codec).refusals.get(self.exchange.way):
        name = self.exchange.name
        raise ValueError(f'`exchange` must not be "{name}" for {refusal}')
      self.exchange.check_axes(self.axis_name)
    if self.feedback.moves and facts.drops and not self.exchange.of_leaves:
      raise ValueError(
        f'`feedback` must not be "momentum" for a sparse codec in a '
        f'"{self.exchange.name}" exchange, where no worker knows which elements of its '
        f'momentum were sent, got {self.codec}; use feedback="error", and momentum '
        "after the exchange."
      )
    # Only an exchange that gathers payloads knows who sent an element.
    means = self.exchange.sends and getattr(self.exchange, "merge", "mean") == "mean"
    if self.feedback.estimates and self.axis_name and not means:
      raise ValueError(
        '`exchange` must give all workers the mean with feedback="ef21", not "local" '
        f'nor merge="senders", got {self.exchange!r} over {self.axis_name!r}; use '
        'feedback="error".'
      )

  def plan(self, tree: Any, across: Place) -> plans.MessagePlan:
    """Splits leaves into the messages of a step; ValueError for sums beyond 32 bits."""
    # An average has one message, unless `message_bytes` limits its payload, leaves vary
    # over different `others`, or dense leaves or leaves of float64 are added apart from
    # codes.
    codec, exchange, size = self.codec, self.exchange, self.message_bytes
    least, facts = self.min_leaf_size, codec.facts
    workers, others = across.workers, across.others
    leaves, paths = jax.tree.leaves(tree), paths_of(tree)
    wide = lambda x: jax.ShapeDtypeStruct(x.shape, working_dtype(facts, x.dtype))
    like = list(map(wide, leaves))
    addends = workers if exchange.sends else None
    texts = [keystr(path, simple=True, separator="/") for path in paths]
    whole = [Leaf(x.shape, path=text) for x, text in zip(leaves, texts, strict=True)]
    codec.check_leaves(whole)
    decided = None
    if facts.drops:  # one exchange for all, before leaves are split into ranges
      layout = layouts.plan_rows(like, codec, min_leaf_size=least, places=whole)
      exchange, _ = decided = auto.choose(exchange, layout, workers)
    # If workers own shares, every leaf of a sparse codec has a range for each worker.
    ranges = workers if exchange.owners else 1
    bound = [leaf._replace(addends=addends, ranges=ranges) for leaf in whole]
    codecs = layouts.leaf_codecs(bound, codec, min_leaf_size=least)
    for one in dict.fromkeys(codecs):
      sum_limit(one.facts.max_code, workers, one)
    apart = facts.max_code > 0 and isinstance(exchange, schedules.AllReduce | auto.Auto)
    # CPUs compute nothing beside their collectives, and each message takes time.
    hides = exchange.sends and workers > 1 and study.platform() != "cpu"
    size = size if hides or size != "auto" else None
    messages = []
    for kind, parts in plans.kinds_of(codecs, like, others, apart).items():
      turn, varied, plain, is_wide = kind
      sizes = {i: nbytes for i, (_, nbytes) in parts.items()}
      for piece in plans.cut(size, sizes, paths, workers):
        own, coded, counts = zip(*(parts[i][0] for i in piece), strict=True)
        done = [x.size if n is None else n for x, n in zip(own, counts, strict=True)]
        replaced = any(n is not None for n in counts)
        layout = layouts.arrange(own, coded, sum(done) if replaced else None)
        pick = auto.reencoding if plain else auto.choose
        picked, reason = decided or pick(exchange, layout, workers)
        if is_wide and exchange.sends:
          picked, reason = schedules.AllReduce(), "float64 is added as it is"
        of_all = picked, varied, reason, turn
        messages.append(protocol.Message(tuple(piece), layout, *of_all))
    names, rules = tuple(map(keystr, paths)), tuple(map(codec.rule, whole))
    each = tuple(bound), tuple(others), tuple(codecs), rules
    rest = across.axes, workers, across.is_sum, self.feedback.keeps
    return plans.MessagePlan(names, *each, tuple(messages), *rest)

  def init(self, params: Any) -> CompressState:
    """Creates the state; ValueError if parameters are sharded over the workers."""
    if self.axis_name and self.exchange.sends:
      types.check_whole("params", params, self.axis_name)
    params, rule = jax.tree.map(pairs, params), self.feedback
    seed, axis_name = states.seed_words(self.key), study.studied_axes(self.axis_name)
    leaves, treedef = jax.tree.flatten(params)
    names = () if axis_name is None else axis_names(axis_name)
    workers, is_bound = mesh_axes.count(names) if names else (None, False)
    on_mesh = workers is not None and not is_bound
    mesh = jax.sharding.get_abstract_mesh() if on_mesh else types.mesh_of(leaves)
    others = [types.other_axes(leaf, axis_name) for leaf in leaves]

    def part(leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
      """Returns the shape of one device's shard."""
      shape = mesh_axes.shard_shape(getattr(leaf, "shape", ()), spec, mesh)
      return jax.ShapeDtypeStruct(shape, jnp.float32)

    # The second stage is planned from the shapes that update will see: a shard of a
    # leaf if it is typed so, but a whole leaf if Auto axes shard it.
    seen = map(part, leaves, map(types.typed_spec, leaves))
    across = Place(axis_name, workers or 1, others=others)
    plan = self.plan(jax.tree.unflatten(treedef, seen), across)
    study.note((study.PLANNED, plan))
    specs = [*map(types.placed_spec if on_mesh else types.typed_spec, leaves)]
    shapes = [x.shape or (1,) for x in map(part, leaves, specs)]
    places = [(shape, (*names, *at)) for shape, at in zip(shapes, others, strict=True)]
    zeros = lambda shape: jnp.zeros(shape, jnp.float32)
    unsent = lambda shape: feedbacks.first_residual(shape, rule.stored)
    wanted = (unsent, rule.keeps), (zeros, rule.moves)  # trees like the parameters

    def own_arrays(seed: jax.Array) -> Any:
      """Returns owner residuals and memories, each by the axes that stack them."""
      memory = states.first_memory(plan, seed)
      if workers is None:
        return {}, memory.shared, {} if names else memory.own
      owned = plans.owner_shapes(plan).items()
      return {at: tuple(map(zeros, found)) for at, found in owned}, *memory

    def typed(tree: Any, axes: Axes) -> Any:
      known = tuple(x for x in axes if workers is not None or x not in names)
      return types.mark_varying(tree, known)

    def local(seed: jax.Array) -> tuple[Any, Any]:
      each = lambda first: [typed(first(shape), axes) for shape, axes in places]
      like = lambda first: jax.tree.unflatten(treedef, each(first))
      kept = [like(first) if needed else None for first, needed in wanted]
      own = [{at: typed(x, at) for at, x in part.items()} for part in own_arrays(seed)]
      return kept, own

    cut, make = axes_in(specs), local
    if on_mesh or cut:
      specs = [mesh_axes.stack_spec(names, x) if on_mesh else x for x in specs]
      inside = {*mesh.axis_names} if on_mesh else {*cut}
      spec = lambda axes: mesh_axes.restrict_spec(P(axes), inside)
      found = jax.eval_shape(own_arrays, seed)
      own_specs = [{axes: spec(axes) for axes in part} for part in found]
      like = jax.tree.unflatten(treedef, specs)
      out = [like if needed else None for _, needed in wanted], own_specs
      over: Any = {"axis_names": inside, "check_vma": not on_mesh}
      make = jax.jit(jax.shard_map(local, in_specs=P(), out_specs=out, **over))
    (residual, velocity), (owned, *memory) = make(seed)
    (count,) = study.note(study.FIRST, jnp.zeros([], jnp.int32))
    # Estimates are equal on all workers.
    first = lambda x: jnp.zeros_like(x, jnp.float32).reshape(jnp.shape(x) or (1,))
    varies = lambda x: tuple(sorted(types.varying_axes(x).difference(names)))
    equal = lambda x: types.mark_varying(first(x), varies(x))
    estimate = jax.tree.map(equal, params) if rule.estimates else None
    kept = states.as_stored(params, Memory(*memory))
    return CompressState(count, seed, residual, owned or None, kept, velocity, estimate)

  def check(self, across: Place, updates: Any, state: CompressState) -> None:
    """Validates the state of an update; compares options between processes."""
    rule, some = self.feedback, bool(jax.tree.leaves(updates))
    needs = {"residual": rule.keeps, "velocity": rule.moves, "estimate": rule.estimates}
    states.check_type(state, CompressState)
    for name, needed in needs.items():
      if needed and some and getattr(state, name) is None:
        raise ValueError(
          f"`state.{name}` must be kept with feedback={rule} and {self.codec}; "
          f"{states.CURE}."
        )
    if state.estimate is not None and not rule.estimates:
      raise ValueError(
        f"`state.estimate` must be None with feedback={rule}, which does not read it; "
        'make the state with this transformation, or go on with feedback="ef21".'
      )
    if across.axes is not None and self.exchange.sends and not agreement.is_alone():
      told = vars(self) | {"inspected": state.measures is not None}
      told["kernels"] = table.kernel_verdicts()
      agreement.require_agreement("gradcomp.compress", told, updates, across.axes)
    for name in ("codec", "feedback", "min_leaf_size"):
      study.note((name, getattr(self, name)))
    for name in needs:
      tree = getattr(state, name)
      check_own(name, tree, updates, across.axes, across.workers)
    is_leaf, leaves_of = feedbacks.is_stored, jax.tree_util.tree_leaves_with_path
    for path, leaf in leaves_of(state.residual, is_leaf) if rule.keeps else ():
      if (found := feedbacks.kind(leaf)) != rule.stored:
        raise ValueError(
          f"`state.residual`{keystr(path)} must be stored as {rule.stored}, as "
          f"`feedback` has it, got {found}; make the state with this transformation, "
          f"or give feedback=gradcomp.ErrorFeedback(residual_dtype={found!r})."
        )

  def step(self, plan: plans.MessagePlan, state: CompressState) -> Step:
    """Returns the facts of a step; ValueError if the state does not have its arrays."""
    study.note(plan, state.count)
    keys = states.step_keys(state, plan, shared=self.dither == "shared")
    memory, owned = states.recall(plan, state.memory), state.server_residual
    if plan.axis_name is None or not plans.owner_shapes(plan):
      owned = None
    elif owned is None and self.feedback.keeps:
      raise ValueError(self._unknown_owners(plan, ""))
    # Without feedback they may be None: the second stage then rounds as the first does.
    watch = state.measures is not None
    facts = plan, *keys, memory, owned, state.count
    keep, mark = self.feedback.keeps or watch, self.feedback.moves
    return Step(*facts, keep=keep, mark=mark, watch=watch)

  def warn_of_owners(self, plan: plans.MessagePlan, state: CompressState) -> None:
    """Warns if owners keep nothing because ``init`` could not count the workers."""
    known = self.feedback.keeps or state.server_residual is not None or plan.workers < 2
    if known or study.is_study() or not plans.owner_shapes(plan):
      return
    own = type(self.exchange).__name__
    effect = (
      ". It is lost in every step now, and a codec that rounds at random has twice the "
      "variance. To accept this without a warning, pass exchange="
      f"gradcomp.exchange.{own}(feedback=False)"
    )
    warnings.warn(self._unknown_owners(plan, effect), stacklevel=2)

  def _unknown_owners(self, plan: plans.MessagePlan, effect: str) -> str:
    """Returns the text about a state without the owner residuals that a plan needs."""
    assert plan.axis_name is not None
    names = axis_names(plan.axis_name)
    counts = tuple(map(mesh_axes.bound_size, names)) if names[1:] else plan.workers
    given = "" if self.axis_name else f"give axis_name={plan.axis_name!r}, and "
    return (
      f"`state.server_residual` must be kept by the {plan.workers} workers of "
      f"{plan.axis_name!r}, whose second stage loses something; {given}make the state "
      "by optimizer.init inside the map or under jax.set_mesh(mesh); where a program "
      "copies one state to its workers, give it gradcomp.wrappers.replicable("
      f"optimizer, axis_name={plan.axis_name!r}, workers={counts}){effect}."
      f"{see('whose-second-stage-loses-something')}"
    )


def check_own(
  name: str, tree: Any, updates: Any, axis_name: AxisName | None, workers: int
) -> None:
  """Raises ValueError for a worker's own tree that is not like its gradient."""

  def check(path: Any, update: jax.Array, leaf: jax.Array) -> None:
    got, shape, more = leaf.shape, update.shape or (1,), ""
    if got == shape:
      return
    if count := stacked_for(got, shape, workers):
      more = f": as if made for {count} worker{'s' * (count != 1)}, not for {workers}"
    more += (
      "; inside a map, pass the state through with gradcomp.state_specs, and make it "
      "by optimizer.init inside the map or under jax.set_mesh(mesh)."
    )
    longer = [(a, b) for a, b in zip(shape, got, strict=False) if a != b]
    one_axis = len(got) == len(shape) and len(longer) == 1 and longer[0][0] > 0
    if axis_name is not None and one_axis and longer[0][1] % longer[0][0] == 0:
      more += (
        " If the gradient is that of a part of the parameter, sharded over "
        f"{axis_name!r}, {types.GATHER_FIRST}. If it is sharded over another axis, "
        "make the state by gradcomp.init_state."
      )
    raise ValueError(
      f"`state.{name}`{jax.tree_util.keystr(path)} must have the shape of its "
      f"gradient, {shape} here, got {got}{more}"
      f"{see('must-have-the-shape-of-its-gradient')}"
    )

  if tree is not None:
    jax.tree_util.tree_map_with_path(check, updates, feedbacks.shaped(tree))


def stacked_for(
  got: tuple[int, ...], expected: tuple[int, ...], workers: int
) -> int | None:
  """Returns the workers that an array of shape ``got`` was stacked for, or None."""
  if not got or not expected or got[1:] != expected[1:] or not expected[0]:
    return None
  count, rest = divmod(workers * got[0], expected[0])
  return None if rest or count in (0, workers) else count


def paths_of(tree: Any) -> list[KeyPath]:
  """Returns the paths of a tree's leaves."""
  # A box is no part of a leaf's name: nnx's init sees boxes, and its update none.
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box)
  # optax.masked leaves an empty node in the box of an array that it hides.
  return [path for path, x in leaves if jax.tree.leaves(x)]
