"""Stores codec memories in the optimizer state, by mesh axes and leaf number."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.codecs.sums.records import Memory
from gradcomp._src.core.state import name_words
from gradcomp._src.exchange.plan import MessagePlan
from gradcomp._src.kernels.common.threefry import fold_key
from gradcomp._src.mesh.axes import Axes
from gradcomp._src.mesh.types import mark_varying

# Trees of arrays by the axes that stack them, and by the numbers of leaves. Names would
# not do: flax.nnx has others for init than for update.
Stored = dict[Axes, dict[int, Any]]


def first_stored(plan: MessagePlan, key: jax.Array) -> Memory | None:
  """Creates the codec memories before the first step; None if no codec has any.

  ``key`` is ``uint32[2]``, equal on all workers. Each leaf folds its name into it.
  """
  if not jax.tree.leaves(_shapes(plan)):
    return None
  words = jnp.array([name_words(name) for name in plan.names], jnp.uint32)
  keys = jax.vmap(lambda own: fold_key(fold_key(key, own[0]), own[1]))(words)
  bound = zip(plan.codecs, plan.leaves, keys, strict=True)
  return _stored(plan, [codec.init(leaf, own) for codec, leaf, own in bound])


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
      found = kept.get(axes, {}).get(i, ())
      # A state made without the number of workers has no memories of their own.
      if jax.tree.leaves(part) and (field == "shared" or jax.tree.leaves(found)):
        _check(f"{field}[{axes!r}][{i}]", found, part, plan, i)
      parts.append(found)
    result.append(Memory(*parts))
  return result


def remember(
  plan: MessagePlan, stored: Memory | None, memory: Sequence[Memory]
) -> Memory | None:
  """Returns the stored memories after a step; unused ones stay as they were."""
  if stored is None:
    return None
  new = _stored(plan, memory) or Memory({}, {})
  if plan.axis_name is not None:
    # Even constants are typed as a worker's own.
    own = {axes: mark_varying(trees, axes) for axes, trees in new.own.items()}
    new = new._replace(own=own)

  def merged(old: Stored, new: Stored) -> Stored:
    return {
      axes: {i: new.get(axes, {}).get(i, tree) for i, tree in kept.items()}
      for axes, kept in old.items()
    }

  return Memory(*map(merged, stored, new))


def used_by_leaf(plan: MessagePlan, stored: Memory) -> dict[int, float]:
  """Returns the entries that a worker sent of each leaf, means over the workers.

  Inside a transformed function they are unknown, and left out.
  """
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
  return jax.eval_shape(
    lambda key: [codec.init(leaf, key) for codec, leaf in bound], key
  )


def _stored(plan: MessagePlan, memory: Sequence[Memory]) -> Memory | None:
  """Returns the memories of all leaves by axes and number; None if all are empty."""
  shared: Stored = {}
  own: Stored = {}
  for i, part in enumerate(memory):
    if jax.tree.leaves(part.shared):
      shared.setdefault(plan.others[i], {})[i] = part.shared
    if jax.tree.leaves(part.own) and plan.of_leaves:
      own.setdefault(plan.own_axes(i), {})[i] = part.own
  return Memory(shared, own) if shared or own else None


def _check(place: str, found: Any, needed: Any, plan: MessagePlan, number: int) -> None:
  shapes = [leaf.shape for leaf in jax.tree.leaves(needed)]
  got = [leaf.shape for leaf in jax.tree.leaves(found)]
  if got != shapes:
    raise ValueError(
      f"`state.memory.{place}` must have arrays of the shapes {shapes} for "
      f"{plan.names[number]} with {plan.codecs[number]}, got {got or 'none'}; make "
      "the state by optimizer.init with this transformation and as many workers, "
      "inside the map or under jax.set_mesh(mesh), and pass it through with "
      "gradcomp.state_specs."
    )
