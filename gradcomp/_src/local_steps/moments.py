"""Moments: means of parts of the inner optimizers' states, on periods of their own."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import GetAttrKey, tree_flatten_with_path

from gradcomp._src.checks import step_count
from gradcomp._src.mesh.axes import AxisName, axis_names
from gradcomp._src.mesh.study import Options, note
from gradcomp._src.mesh.types import mark_varying, other_axes


def checked_periods(periods: Any) -> dict[str, int]:
  """Returns the rounds between two means, by field; ValueError for other values."""
  if periods is None:
    return {}
  if not isinstance(periods, Mapping):
    raise ValueError(
      "`sync_state` must be None, or a dict of rounds by the names of fields, like "
      f'{{"mu": 3, "nu": 6}}, got {periods!r}.'
    )
  return {x: step_count(f"sync_state[{x!r}]", y) for x, y in periods.items()}


def check_fields(periods: Mapping[str, int], inner_state: Any) -> None:
  """Raises ValueError for a field that a state lacks, or that holds other numbers."""
  leaves, _ = tree_flatten_with_path(inner_state)
  under = lambda field: [x for path, x in leaves if field in path]
  floats = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
  keys = dict.fromkeys(key for path, _ in leaves for key in path)
  fields = [key for key in keys if isinstance(key, GetAttrKey)]
  found = [field.name for field in fields if all(map(floats, under(field)))]
  for name in periods:
    if name not in found:
      raise ValueError(
        "`sync_state` must name fields of the state of `inner` that hold floats, got "
        f"{name!r}; it has {found or 'none'}."
      )


@dataclasses.dataclass(frozen=True, eq=False)
class Moments:
  """The exchange of fields of inner states: all workers go on from their means."""

  plain: optax.GradientTransformationExtraArgs  # the dense mean, without a state
  axes: AxisName
  every: int  # H, the steps of a round
  periods: Mapping[str, int]  # rounds between two means, by field

  def synced(self, number: jax.Array, inner_state: Any) -> Any:
    """Replaces each field by its mean in the last step of its period.

    ``number`` is that of this local step, from 1 on. Steps before that all are one.
    """
    for name, period in self.periods.items():
      steps = self.every * period
      due = (number <= 0) | (number % steps == 0)
      mean = functools.partial(self._mean, steps)
      of_field = functools.partial(lax.cond, due, mean, lambda tree: tree)
      inner_state = _map_field(of_field, name, inner_state)
    return inner_state

  def _mean(self, every: int, tree: Any) -> Any:
    note(Options((("every", every), ("stateless", True))))
    mean, _ = self.plain.update(tree, self.plain.init(tree))
    axes = lambda x: (*axis_names(self.axes), *other_axes(x, self.axes))
    return jax.tree.map(lambda x, own: mark_varying(x, axes(own)), mean, tree)


def _map_field(function: Callable[[Any], Any], name: str, tree: Any) -> Any:
  """Applies a function to the trees in a field, wherever a tree has one of the name."""
  children, treedef = tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
  if not children or not children[0][0]:  # a leaf, or an empty node
    return tree
  inner = functools.partial(_map_field, function, name)
  named = lambda path: path == (GetAttrKey(name),)
  new = [function(x) if named(path) else inner(x) for path, x in children]
  return jax.tree.unflatten(treedef, new)
