"""The states of transformations, the random keys of a step, and codec memories."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike

from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.sums.records import Context, Memory
from gradcomp._src.exchange.plan import MADE_FOR_SHARDS, MessagePlan, OwnerResiduals
from gradcomp._src.kernels.common.dithers import dither, fold_key, key_words
from gradcomp._src.kernels.materialize import unknown
from gradcomp._src.mesh.axes import Axes
from gradcomp._src.mesh.types import mark_varying


class CompressState(NamedTuple):
  """The state of :func:`gradcomp.compress`: plain arrays, which any checkpointer saves.

  Fields other than ``count`` and ``key`` may be None. Arrays like the parameters have
  at least one axis, and one more of size two for complex parameters, as pairs of reals.

  Attributes:
    count: steps so far, ``int32[]``, replicated.
    key: ``uint32[2]``, replicated.
    residual: like the parameters, ``float32`` or as feedback stores them, per worker.
    server_residual: the rows of the owner residuals that a worker owns, ``float32``, by
      the axes that stack them.
    memory: the codecs' state of each leaf, like fitted levels or thresholds, by the
      axes that stack them and by the numbers of leaves.
    velocity: the momentum of each worker, like the residual, ``float32``.
    estimate: with ``feedback="ef21"`` the estimate that workers share, like the
      parameters, ``float32``, replicated.
    measures: sums of each leaf in a step that :mod:`gradcomp.telemetry` inspects,
      replicated; None between steps.

  Example:
    >>> state = gradcomp.onebit_sgd(min_leaf_size=0).init({"w": jnp.ones(2048)})
    >>> int(state.count), state.residual["w"].shape, state.velocity
    (0, (2048,), None)
  """

  count: jax.Array  # type: ignore[assignment]
  key: jax.Array
  residual: Any
  server_residual: OwnerResiduals | None
  memory: Memory | None = None
  velocity: Any = None
  estimate: Any = None
  measures: Any = None


class Kept(NamedTuple):
  """The residual of layers in a scan, stacked, on one worker."""

  leaves: Any  # of each leaf, like the layers, but float32 and of at least one axis
  owners: OwnerResiduals


class ScanState(NamedTuple):
  """The state of :func:`gradcomp.parallel.compress_in_scan`.

  Attributes:
    layers: the count, the key and the residuals of all layers, stacked: ``[L, ...]``
      per worker, also those that owners keep.

  Example:
    >>> tx = gradcomp.parallel.compress_in_scan(
    ...   gradcomp.codecs.QSGD(bits=4), axis_name="data", exchange="all_gather",
    ...   feedback="error")
    >>> with jax.set_mesh(jax.make_mesh((1,), ("data",))):
    ...   state = tx.init({"w": jnp.ones((3, 8, 64))})
    >>> state.layers.residual["w"].shape
    (3, 8, 64)
  """

  layers: CompressState

  @property
  def residual(self) -> Kept | None:
    """The residual, as :func:`gradcomp.parallel.scan` takes it; None without one."""
    if self.layers.residual is None:
      return None
    return Kept(self.layers.residual, self.layers.server_residual or {})


class OwnedRows(NamedTuple):
  """The rows of a leaf that a worker owns in :func:`gradcomp.parallel.zero`."""

  # One array by the axes that stack it, [rows, ...] per worker. Zeros fill up the last.
  arrays: dict[tuple[str, ...], jax.Array]


class OwnSteps(NamedTuple):
  """Each worker's displacement from the shared parameters, and its inner state."""

  # By the axes that stack them, per worker and at least 1-d: the displacement, float32
  # or wider, and the state of the inner optimizer.
  by_axes: dict[tuple[str, ...], tuple[Any, Any]]

  @property
  def moved(self) -> Any:
    """The displacement of the worker's parameters from the shared ones."""
    ((moved, _),) = self.by_axes.values()
    return moved

  @property
  def inner_state(self) -> Any:
    """The state of the worker's inner optimizer, with scalars as arrays of one."""
    ((_, inner_state),) = self.by_axes.values()
    return inner_state


class FragmentState(NamedTuple):
  """The state of one fragment of :func:`gradcomp.local.local_steps`."""

  exchange: CompressState  # its residual and key, and the count of exchanges
  outer_state: Any  # of the outer optimizer, replicated
  arriving: Any  # a mean on its way, like the leaves, replicated; None without delay


class LocalStepsState(NamedTuple):
  """The state of :func:`gradcomp.local.local_steps`: arrays, for any checkpointer.

  Attributes:
    count: steps so far, ``int32[]``, replicated.
    own: the displacement and the inner state of each worker, per worker.
    fragments: the state of each fragment.

  Example:
    >>> options = {"every": 30, "codec": gradcomp.codecs.Dense(), "axis_name": "data"}
    >>> tx = gradcomp.local.local_steps(optax.adam(1e-3), optax.sgd(0.7), **options)
    >>> with jax.set_mesh(jax.make_mesh((1,), ("data",))):
    ...   state = tx.init({"w": jnp.ones(300)})
    >>> int(state.count), state.own.moved["w"].shape, len(state.fragments)
    (0, (300,), 1)
  """

  count: jax.Array  # type: ignore[assignment]
  own: OwnSteps
  fragments: tuple[FragmentState, ...]


def _of_kind(kind: type) -> Callable[[Any], bool]:
  return lambda node: isinstance(node, kind)


# Each returns True for a node of its type, and is meant for ``is_leaf``.
is_state, is_scan, is_rows, is_own_steps = map(
  _of_kind, (CompressState, ScanState, OwnedRows, OwnSteps)
)


def states_in(opt_state: Any) -> list[CompressState]:
  """Returns the states of gradcomp's transformations, in the order of their numbers."""
  return list(filter(is_state, jax.tree.leaves(opt_state, is_leaf=is_state)))


def collects(node: Any) -> bool:
  """Returns True for MultiSteps around an exchange; it is meant for ``is_leaf``."""
  # The gradients that it has collected are each worker's own.
  several = isinstance(node, optax.MultiStepsState)
  return several and bool(states_in(node.inner_opt_state))


def steps_alone(opt_state: Any) -> bool:
  """Returns True if workers take local steps, with a displacement each."""
  return any(map(is_own_steps, jax.tree.leaves(opt_state, is_leaf=is_own_steps)))


CURE = "make the state with this transformation"


def check_type(state: Any, kind: type) -> None:
  """Raises TypeError for the state of another transformation."""
  if not isinstance(state, kind):
    raise TypeError(
      f"`state` must be a gradcomp.state.{kind.__name__}, got {type(state).__name__}; "
      f"{CURE}, and take its own part from the state of an optax.chain."
    )


def seed_words(key: ArrayLike) -> jax.Array:
  """Returns the ``uint32[2]`` of a seed or of a threefry key, a copy."""
  seed = not isinstance(key, int) or -(2**63) <= key < 2**63
  if not seed or not isinstance(key, int | jax.Array | np.ndarray | np.generic):
    raise ValueError(
      "`key` must be a seed of at most 64 bits, or one threefry2x32 key, got "
      f"{key!r}; make it with jax.random.key(seed)."
    )
  if not isinstance(key, int | jax.Array):
    key = jnp.asarray(key)
  if isinstance(key, int) or (not key.shape and jnp.issubdtype(key.dtype, jnp.integer)):
    key = jax.random.key(key, impl="threefry2x32")
  return jnp.array(key_words(key))


def step_keys(
  state: CompressState, plan: MessagePlan, *, shared: bool
) -> tuple[list[Context], list[list[Context]]]:
  """Returns the keys of a step: of each leaf, and of each codec of each message."""
  # Each worker has its own, except for codecs that select equally, and shared dithers.
  # A key derives from the names of its own leaves: so transformations of different
  # leaves, as in optax.partition, draw apart, and a new leaf changes no bits of others.
  leaves: dict[int, Codec] = {}
  stages: list[tuple[str, Codec]] = []
  for message in plan.messages:
    codecs = message.layout.codecs
    texts = [""] * len(codecs)
    for i, slot in zip(message.leaves, message.layout.slots, strict=True):
      leaves[i] = codecs[slot.group]
      texts[slot.group] += f"{plan.names[i]}\n"
    stages += zip(texts, codecs, strict=True)
  users = [(name, leaves[i]) for i, name in enumerate(plan.names)] + stages
  numbers = [i for i, (_, codec) in enumerate(users) if codec.needs_key]
  contexts = [Context()] * len(users)
  if numbers:
    worker = 0 if plan.axis_name is None else lax.axis_index(plan.axis_name)
    step_key = fold_key(state.key, state.count)
    common = text_keys(step_key, [users[i][0] for i in numbers])
    own = jax.vmap(fold_key, (0, None))(common, worker)
    dithers = jax.vmap(dither, (0, None))(common, worker) if shared else None
    # So leaves of one shape have equal programs, and XLA compiles one.
    kinds = {"keepdims": False, "allow_negative_indices": False}
    for k, i in zip(unknown(range(len(numbers)), common), numbers, strict=True):
      row = lambda keys, k=k: lax.dynamic_index_in_dim(keys, k, **kinds)
      mine = row(common if users[i][1].facts.same_draws else own)
      contexts[i] = Context(mine, None if dithers is None else row(dithers))
  rest = iter(contexts[len(plan.names) :])
  later = [[next(rest) for _ in x.layout.codecs] for x in plan.messages]
  return contexts[: len(plan.names)], later


def residual_key(state: CompressState, plan: MessagePlan, leaf: int) -> jax.Array:
  """Returns a worker's key for rounding the residual of a leaf, ``uint32[2]``."""
  worker = 0 if plan.axis_name is None else lax.axis_index(plan.axis_name)
  step_key = fold_key(state.key, state.count)
  (common,) = text_keys(step_key, [f"residual\n{plan.names[leaf]}"])
  return fold_key(common, worker)


def text_keys(key: jax.Array, texts: Sequence[str]) -> jax.Array:
  """Returns a key for each text, equal on all workers, ``uint32[texts, 2]``."""
  words = jnp.array([name_words(text) for text in texts], jnp.uint32)
  return jax.vmap(lambda word: fold_key(fold_key(key, word[0]), word[1]))(words)


def name_words(text: str) -> np.ndarray:
  """Returns the first two words of a text's SHA-256, big-endian."""
  return np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], ">u4")


def first_memory(plan: MessagePlan, key: jax.Array) -> Memory:
  """Creates the codec memories, by a key of all workers: empty if no codec has any."""
  # Trees of arrays by the axes that stack them, and by the numbers of leaves. Names
  # would not do: flax.nnx has others for init than for update.
  stored = Memory({}, {})
  if not jax.tree.leaves(_shapes(plan)):
    return stored
  encodes = all(message.exchange.of_leaves for message in plan.messages)
  bound = zip(plan.codecs, plan.leaves, text_keys(key, plan.names), strict=True)
  for i, (codec, leaf, key_of_leaf) in enumerate(bound):
    shared, own = codec.init(leaf, key_of_leaf)
    if jax.tree.leaves(shared):
      stored.shared.setdefault(plan.others[i], {})[i] = shared
    if jax.tree.leaves(own) and encodes:
      stored.own.setdefault(plan.own_axes(i), {})[i] = own
  return stored


def as_stored(params: Any, memory: Memory) -> Any:
  """Returns a memory as a state stores it: None for an empty one."""
  # optax.tree.map_params asks for the state of a node without leaves, which stands for
  # any parameters. One array stands for the memories of these.
  known = isinstance(params, Mapping | Sequence | None) or jax.tree.leaves(params)
  if not known:
    return jnp.zeros([])
  return memory if any(memory) else None


def recall(plan: MessagePlan, stored: Memory | None) -> list[Memory]:
  """Returns each leaf's codec memory, perhaps empty; ValueError for other shapes."""
  result = []
  for i, needed in enumerate(_shapes(plan)):
    parts, places = [], (plan.others[i], plan.own_axes(i))
    for field, axes, part in zip(Memory._fields, places, needed, strict=True):
      kept = {} if stored is None else getattr(stored, field)
      found = kept.get(axes, {}).get(i, ()) if jax.tree.leaves(part) else ()
      # A state made without the number of workers has no memories of their own.
      made = field == "shared" or any(i in trees for trees in kept.values())
      shapes, got = ([x.shape for x in jax.tree.leaves(y)] for y in (part, found))
      if made and got != shapes:
        raise ValueError(
          f"`state.memory.{field}[{axes!r}][{i}]` must have arrays of the shapes "
          f"{shapes} for {plan.names[i]} with {plan.codecs[i]}, got {got or 'none'}; "
          f"{MADE_FOR_SHARDS}"
        )
      parts.append(found)
    result.append(Memory(*parts))
  return result


def remember(
  plan: MessagePlan, stored: Memory | None, memory: Sequence[Memory]
) -> Memory | None:
  """Returns the stored memories after a step; unused ones stay as they were."""
  if stored is None:
    return None

  def new(field: str, axes: Axes, kept: dict[int, Any]) -> dict[int, Any]:
    found = {i: getattr(memory[i], field) for i in kept}
    if field == "own" and plan.axis_name is not None:
      found = mark_varying(found, axes)  # even constants are a worker's own
    return {i: found[i] if jax.tree.leaves(found[i]) else kept[i] for i in kept}

  parts = zip(Memory._fields, stored, strict=True)
  return Memory(*({at: new(x, at, y) for at, y in part.items()} for x, part in parts))


def used_by_leaf(plan: MessagePlan, stored: Memory) -> dict[int, float]:
  """Returns the mean entries that a worker sent, by leaf; unknown ones are left out."""
  result = {}
  workers = 1 if plan.axis_name is None else plan.workers
  for i, needed in enumerate(_shapes(plan)):
    tree = stored.own.get(plan.own_axes(i), {}).get(i, ())
    used = plan.codecs[i].used_entries(Memory(own=tree))
    if used is None or isinstance(used, jax.core.Tracer):
      continue
    of_one = plan.codecs[i].used_entries(needed)
    rows = 0 if of_one is None else of_one.size
    if used.size != workers * rows:
      raise ValueError(
        f"`opt_state` must be that of {workers} workers with {rows} rows of "
        f"{plan.names[i]} each, got {used.size} rows."
      )
    result[i] = float(np.asarray(used).sum() / workers)
  return result


def _shapes(plan: MessagePlan) -> list[Memory]:
  """Returns the shapes of the codec memory of each leaf."""
  key = jax.ShapeDtypeStruct((2,), np.uint32)
  bound = list(zip(plan.codecs, plan.leaves, strict=True))
  return jax.eval_shape(lambda key: [x.init(leaf, key) for x, leaf in bound], key)
