"""Stores codec memories in the optimizer state, by mesh axes and leaf number."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.codecs.sums.records import Memory
from gradcomp._src.core.state import text_keys
from gradcomp._src.exchange.plan import MADE_FOR_SHARDS, MessagePlan
from gradcomp._src.mesh.axes import Axes
from gradcomp._src.mesh.types import mark_varying

# Trees of arrays by the axes that stack them, and by the numbers of leaves. Names would
# not do: flax.nnx has others for init than for update.
Stored = dict[Axes, dict[int, Any]]


def first_stored(plan: MessagePlan, key: jax.Array) -> Memory | None:
  """Creates the codec memories, by a key of all workers; None if no codec has any."""
  if not jax.tree.leaves(_shapes(plan)):
    return None
  stored = Memory({}, {})
  encodes = all(message.exchange.of_leaves for message in plan.messages)
  bound = zip(plan.codecs, plan.leaves, text_keys(key, plan.names), strict=True)
  for i, (codec, leaf, key_of_leaf) in enumerate(bound):
    shared, own = codec.init(leaf, key_of_leaf)
    if jax.tree.leaves(shared):
      stored.shared.setdefault(plan.others[i], {})[i] = shared
    if jax.tree.leaves(own) and encodes:
      stored.own.setdefault(plan.own_axes(i), {})[i] = own
  return stored if any(stored) else None


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
    places = Memory(plan.others[i], plan.own_axes(i))
    parts = []
    for field, axes, part in zip(Memory._fields, places, needed, strict=True):
      kept: Stored = {} if stored is None else getattr(stored, field)
      found = kept.get(axes, {}).get(i, ()) if jax.tree.leaves(part) else ()
      # A state made without the number of workers has no memories of their own.
      made = field == "shared" or any(i in trees for trees in kept.values())
      if jax.tree.leaves(part) and made:
        shapes, got = ([x.shape for x in jax.tree.leaves(y)] for y in (part, found))
        if got != shapes:
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
      found = mark_varying(found, axes)  # even constants are typed as a worker's own
    return {i: found[i] if jax.tree.leaves(found[i]) else kept[i] for i in kept}

  shared = {axes: new("shared", axes, kept) for axes, kept in stored.shared.items()}
  return Memory(shared, {x: new("own", x, kept) for x, kept in stored.own.items()})


def used_by_leaf(plan: MessagePlan, stored: Memory) -> dict[int, float]:
  """Returns the mean entries that a worker sent, by leaf; unknown ones are left out."""
  result = {}
  workers = 1 if plan.axis_name is None else plan.workers
  for i, needed in enumerate(_shapes(plan)):
    tree = stored.own.get(plan.own_axes(i), {}).get(i, ())
    codec = plan.codecs[i]
    used = codec.used_entries(Memory(own=tree))
    if used is None or isinstance(used, jax.core.Tracer):
      continue
    rows = sum(x.size for x in [codec.used_entries(needed)] if x is not None)
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
