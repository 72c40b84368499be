"""The validated options of a transformation, and the parts of its steps."""

import dataclasses
import warnings
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath, keystr
from jax.typing import ArrayLike

from gradcomp._src import checks
from gradcomp._src.checks import see
from gradcomp._src.codecs.protocol import LeafCodec, working_dtype
from gradcomp._src.codecs.sums.records import Leaf, Memory
from gradcomp._src.codecs.sums.sum import sum_limit
from gradcomp._src.core import codec_memory, first_state, residual_storage
from gradcomp._src.core import state as states
from gradcomp._src.core.feedback import Feedback, as_feedback
from gradcomp._src.core.inputs import pairs
from gradcomp._src.core.state import CompressState
from gradcomp._src.exchange import auto, one_stage, protocol
from gradcomp._src.exchange import layout as layouts
from gradcomp._src.exchange import plan as plans
from gradcomp._src.exchange.step import Step
from gradcomp._src.kernels.gpu import table
from gradcomp._src.mesh import agreement, study
from gradcomp._src.mesh.axes import AxisName, as_axis_name, axis_names, bound_size
from gradcomp._src.mesh.place import Place, check_whole
from gradcomp._src.mesh.platforms import platform
from gradcomp._src.mesh.trees import is_box

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
    apart = facts.max_code > 0 and isinstance(exchange, one_stage.AllReduce | auto.Auto)
    # CPUs compute nothing beside their collectives, and each message takes time.
    hides = exchange.sends and workers > 1 and platform() != "cpu"
    size = size if hides or size != "auto" else None
    messages = []
    for turn, parts in enumerate(plans.averages(codecs, like)):
      for kind, sizes in plans.kinds_of(parts, others, apart).items():
        varied, plain, is_wide = kind
        for piece in plans.cut(size, sizes, paths, workers):
          own, coded, counts = zip(*(parts[i] for i in piece), strict=True)
          done = [x.size if n is None else n for x, n in zip(own, counts, strict=True)]
          replaced = any(n is not None for n in counts)
          layout = layouts.arrange(own, coded, sum(done) if replaced else None)
          pick = auto.reencoding if plain else auto.choose
          picked, reason = decided or pick(exchange, layout, workers)
          if is_wide and exchange.sends:
            picked, reason = one_stage.AllReduce(), "float64 is added as it is"
          of_all = picked, varied, reason, turn
          messages.append(protocol.Message(tuple(piece), layout, *of_all))
    names, rules = tuple(map(keystr, paths)), tuple(map(codec.rule, whole))
    each = tuple(bound), tuple(others), tuple(codecs), rules
    rest = across.axes, workers, across.is_sum, self.feedback.keeps
    return plans.MessagePlan(names, *each, tuple(messages), *rest)

  def init(self, params: Any) -> CompressState:
    """Creates the state; ValueError if parameters are sharded over the workers."""
    if self.axis_name and self.exchange.sends:
      check_whole("params", params, self.axis_name)
    params = jax.tree.map(pairs, params)
    seed, axes = states.seed_words(self.key), study.studied_axes(self.axis_name)
    zeros = lambda shape: jnp.zeros(shape, jnp.float32)

    def own(like: Any, others: Any, workers: int | None) -> Any:
      """Returns a maker of owner residuals and memories, by the seed, each by axes."""
      known = 1 if axes is None else workers
      across = Place(axes, known or 1, others=others)
      plan = self.plan(like, across)
      study.note((study.PLANNED, plan))
      shapes = {} if known is None or axes is None else plans.owner_shapes(plan)

      def make(seed: jax.Array) -> first_state.Own:
        shared, own = codec_memory.first_stored(plan, seed) or ({}, {})
        owned = {at: tuple(map(zeros, found)) for at, found in shapes.items()}
        return owned, shared, {} if known is None else own

      return make

    firsts: dict[str, Any] = {}
    if self.feedback.keeps:
      firsts["residual"] = self.feedback.first
    if self.feedback.moves:
      firsts["velocity"] = zeros
    trees, (owned, *memory) = first_state.first_state(params, axes, firsts, own, seed)
    (count,) = study.note(study.FIRST, jnp.zeros([], jnp.int32))
    kept = codec_memory.as_stored(params, Memory(*memory))
    estimates = self.feedback.estimates
    estimate = first_state.first_estimate(params, axes) if estimates else None
    residual, velocity = trees.get("residual"), trees.get("velocity")
    return CompressState(count, seed, residual, owned or None, kept, velocity, estimate)

  def check(self, across: Place, updates: Any, state: CompressState) -> None:
    """Validates the state of an update; compares options between processes."""
    rule, some = self.feedback, bool(jax.tree.leaves(updates))
    needs = {"residual": rule.keeps, "velocity": rule.moves, "estimate": rule.estimates}
    states.check_type(state, CompressState)
    for name, needed in needs.items():
      if needed and some and getattr(state, name) is None:
        kept = f"`state.{name}` must be kept with feedback={rule} and {self.codec}"
        raise ValueError(f"{kept}; {states.CURE}.")
    if state.estimate is not None and not rule.estimates:
      raise ValueError(
        f"`state.estimate` must be None with feedback={rule}, which does not read it; "
        'make the state with this transformation, or go on with feedback="ef21".'
      )
    if across.axes is not None and self.exchange.sends:
      told = vars(self) | {"inspected": state.measures is not None}
      told |= {} if agreement.is_alone() else {"kernels": table.kernel_verdicts()}
      agreement.require_agreement("gradcomp.compress", told, updates, across.axes)
    for name in ("codec", "feedback", "min_leaf_size"):
      study.note((name, getattr(self, name)))
    for name in needs:
      tree = residual_storage.shaped(getattr(state, name))
      first_state.check_own(name, tree, updates, across.axes, across.workers)
    if rule.keeps:
      residual_storage.check_kind(state.residual, rule.first)

  def step(self, plan: plans.MessagePlan, state: CompressState) -> Step:
    """Returns the facts of a step; ValueError if the state does not have its arrays."""
    study.note(plan, state.count)
    keys = states.step_keys(state, plan, shared=self.dither == "shared")
    memory, owned = codec_memory.recall(plan, state.memory), state.server_residual
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
    counts = tuple(map(bound_size, names)) if names[1:] else plan.workers
    given = "" if self.axis_name else f"give axis_name={plan.axis_name!r}, and "
    return (
      f"`state.server_residual` must be kept by the {plan.workers} workers of "
      f"{plan.axis_name!r}, whose second stage loses something; {given}make the state "
      "by optimizer.init inside the map or under jax.set_mesh(mesh); where a program "
      "copies one state to its workers, give it gradcomp.wrappers.replicable("
      f"optimizer, axis_name={plan.axis_name!r}, workers={counts}){effect}."
      f"{see('whose-second-stage-loses-something')}"
    )


def paths_of(tree: Any) -> list[KeyPath]:
  """Returns the paths of a tree's leaves."""
  # A box is no part of a leaf's name: nnx's init sees boxes, and its update none.
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box)
  # optax.masked leaves an empty node in the box of an array that it hides.
  return [path for path, x in leaves if jax.tree.leaves(x)]
