"""Batches among the arguments of a loss on Auto axes: each worker has a part."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from gradcomp._src.core.specs import state_specs
from gradcomp._src.core.state import states_in
from gradcomp._src.mesh import axes
from gradcomp._src.mesh.trees import is_array, split


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


def check_shared(name: str, tree: Any, workers: int, cure: str = "") -> None:
  """Raises ValueError for an array that the workers cannot share equally."""
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    if not is_key(x) and (not jnp.shape(x) or jnp.shape(x)[0] % workers):
      kind = getattr(x, "dtype", type(x).__name__)
      raise ValueError(
        f"{name}{jax.tree_util.keystr(path)} must have a first axis that {workers} "
        f"workers can share equally, got {kind} of the shape {jnp.shape(x)}{cure}."
      )


def cut_specs(tree: Any, axis_name: axes.AxisName) -> Any:
  """Returns the specs of a batch; workers have its keys whole."""
  return jax.tree.map(lambda x: P() if is_key(x) else P(axis_name), tree)


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


def argument_specs(
  given: tuple[list[Any], dict[str, Any]],
  loss_fn: Any,
  differentiated: Sequence[int],
  batch_argnums: int | tuple[int, ...] | None,
  axis_name: axes.AxisName,
  workers: int,
) -> tuple[list[P | None], tuple[int, ...], set[int]]:
  """Returns leaves' specs, None for no array; micro-batches; and rows of batches."""
  (args, kwargs), rows = given, set[int]()
  # An optimizer's state is no batch: its specs say what a worker has of it.
  if batch_argnums is not None:
    named = {*among("batch_argnums", batch_argnums, len(args))}
    cut = [i for i in sorted(named) if not states_in(args[i])]
    micro = several(batch_argnums)
  else:
    later = range(max(differentiated) + 1, len(args))
    cut = [i for i in later if not states_in(args[i])]
    rows = rows_of([args[i] for i in cut])
    if len(rows) > 1:
      raise ValueError(
        "`batch_argnums` must name the batches where the first axes of the arguments "
        f"after the parameters differ in length, got {sorted(rows)}: one may be no "
        "batch, like statistics. Every worker has all others whole."
      )
    # All that workers share is cut into micro-batches, but for keys and numbers.
    micro = tuple(i for i in cut if rows_of(args[i]))
    rows = rows if workers > 1 else set()
    whole = sorted({*range(len(args))}.difference(cut, differentiated))
    others = {f"argument {i}": args[i] for i in whole} | {"`loss_fn` ": loss_fn}
    check_others(rows, others | {f"keyword {name}": x for name, x in kwargs.items()})
  specs: Any = state_specs(given, axis_name=axis_name)
  for i in cut:
    check_shared(
      f"`loss_fn` argument {i}",
      split(args[i], is_array)[0],
      workers,
      "; name the arguments that are batches by batch_argnums=. Every worker has all "
      "others whole, and of a typed PRNG key, jax.random.key(seed), one of its own",
    )
    specs[0][i] = cut_specs(args[i], axis_name)
  leaves, batches = jax.tree.leaves(given), jax.tree.leaves([args[i] for i in cut])
  if not any(map(is_array, batches)) and not any(map(is_key, leaves)):
    raise ValueError(
      f"`batch_argnums` must name an argument with arrays that {workers} workers "
      f"share, got {sorted(cut)}: every worker would compute the same gradient. Pass "
      "the batch by position."
    )
  pairs = zip(leaves, jax.tree.leaves(specs), strict=True)
  return [spec if is_array(x) else None for x, spec in pairs], micro, rows
