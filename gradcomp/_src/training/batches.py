"""Batches among the arguments of a loss on Auto axes: each worker has a part."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from gradcomp._src.core.specs import state_specs
from gradcomp._src.core.state import states_in
from gradcomp._src.mesh import axes
from gradcomp._src.mesh.trees import is_array


def several(numbers: int | tuple[int, ...]) -> tuple[int, ...]:
  return (numbers,) if isinstance(numbers, int) else numbers


def among(name: str, numbers: int | tuple[int, ...], count: int) -> list[int]:
  """Returns positions from 0; ValueError for an argument not given by position."""
  if not all(-count <= i < count for i in several(numbers)):
    raise ValueError(
      f"`{name}` must be among the {count} arguments given by position, got {numbers}."
    )
  return [i % count for i in several(numbers)]


def is_key(x: Any) -> bool:
  """Returns True for one typed PRNG key."""
  return is_array(x) and not x.ndim and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def with_own_keys(tree: Any, axis_name: axes.AxisName) -> Any:
  """Replaces each typed PRNG key by one of this worker's own."""
  index = lax.axis_index(axis_name)
  return jax.tree.map(lambda x: jax.random.fold_in(x, index) if is_key(x) else x, tree)


def check_shared(batch: Any, workers: int) -> None:
  """Raises ValueError for an array that the workers cannot share equally."""
  for path, x in jax.tree_util.tree_leaves_with_path(batch):
    if not is_key(x) and (not jnp.shape(x) or jnp.shape(x)[0] % workers):
      raise ValueError(
        f"`batch`{jax.tree_util.keystr(path)} must have a first axis that {workers} "
        f"workers can share equally, got the shape {jnp.shape(x)}."
      )


def batches_in(
  args: Sequence[Any],
  differentiated: Sequence[int],
  batch_argnums: int | tuple[int, ...] | None,
) -> list[int]:
  """Returns the arguments that are batches: those named, or all that may be one."""
  # An optimizer's state is none: its specs say what a worker has of it.
  count = len(args)
  if batch_argnums is not None:
    named = {*among("batch_argnums", batch_argnums, count)}
    return [i for i in sorted(named) if not states_in(args[i])]
  found = [i for i in range(max(differentiated) + 1, count) if not states_in(args[i])]
  lengths = rows_of([args[i] for i in found])
  if len(lengths) > 1:
    raise ValueError(
      "`batch_argnums` must name the batches where the first axes of the arguments "
      f"after the parameters differ in length, got {sorted(lengths)}: one may be no "
      "batch, like statistics. Every worker has all others whole."
    )
  return found


def rows_of(tree: Any) -> set[int]:
  """Returns the lengths of the first axes of a tree's arrays."""
  return {x.shape[0] for x in jax.tree.leaves(tree) if is_array(x) and x.ndim}


def check_others(rows: Collection[int], others: dict[str, Any]) -> None:
  """Raises ValueError for an array as long as batches that no worker cuts."""
  for name, tree in others.items():
    leaves = [] if states_in(tree) else jax.tree_util.tree_leaves_with_path(tree)
    for path, x in leaves:
      if is_array(x) and x.ndim and x.shape[0] in rows:
        raise ValueError(
          "`batch_argnums` must name the batches where another array has as many rows, "
          f"got None and {x.dtype}{list(x.shape)} in {name}"
          f"{jax.tree_util.keystr(path)}, which every worker has whole. If it is a "
          "batch, pass it by position, after the parameters; if it is none, pass the "
          "positions of the batches, as in batch_argnums=1."
        )


def specs_of(
  given: tuple[Any, Any], cut: Collection[int], axis_name: axes.AxisName, workers: int
) -> list[PartitionSpec | None]:
  """Returns the specs of arguments' leaves, None for other objects than arrays."""
  leaves = jax.tree_util.tree_leaves_with_path(given)
  kept = jax.tree.leaves(state_specs(given, axis_name=axis_name))
  specs: list[PartitionSpec | None] = []
  shared = False
  for (path, x), spec in zip(leaves, kept, strict=True):
    in_batch = path[0].idx == 0 and path[1].idx in cut and is_array(x)
    shared |= in_batch or is_key(x)
    if in_batch and not is_key(x):
      spec = PartitionSpec(axis_name)
      if not x.ndim or x.shape[0] % workers:
        raise ValueError(
          f"argument {path[1].idx} of `loss_fn` must have a first axis that {workers} "
          f"workers can share equally, got {x.dtype} of the shape {x.shape} at "
          f"{jax.tree_util.keystr(path[2:]) or 'its root'}; name the arguments that "
          "are batches by batch_argnums=. Every worker has all others whole, and of a "
          "typed PRNG key, jax.random.key(seed), one of its own."
        )
    specs.append(spec if is_array(x) else None)
  if not shared:
    raise ValueError(
      f"`batch_argnums` must name an argument with arrays that {workers} workers "
      f"share, got {sorted(cut)}: every worker would compute the same gradient. Pass "
      "the batch by position."
    )
  return specs
