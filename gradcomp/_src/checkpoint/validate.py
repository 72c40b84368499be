"""Validates that a state has the shapes ``optimizer.init`` would give for N workers."""

from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from gradcomp._src.core.first_state import stacked_for
from gradcomp._src.core.state import is_state, states_in

_SHOWN = 3  # arrays that differ


def check_concrete(opt_state: Any) -> None:
  """Raises ValueError for a state inside a transformed function."""
  for path, x in jax.tree_util.tree_leaves_with_path(opt_state):
    if isinstance(x, jax.core.Tracer):
      raise ValueError(
        f"`opt_state`{keystr(path)} must be an array, got {x.aval.str_short()} inside "
        "a transformed function; call gradcomp.reshard_state outside of jax.jit."
      )


def check_fits(opt_state: Any, shapes: Any, workers: int) -> None:
  """Raises ValueError for a state in other shapes than ``init`` gives N workers."""
  shapes = _as_forgetful(shapes, opt_state)
  expected = dict(jax.tree_util.tree_leaves_with_path(shapes))
  found = dict(jax.tree_util.tree_leaves_with_path(opt_state))
  wrong = [f"{keystr(path)} is missing" for path in expected if path not in found]
  wrong += [f"{keystr(path)} is too much" for path in found if path not in expected]
  wrong += [
    f"{keystr(path)} must be {_text(expected[path])}, got "
    f"{_text(x)}{_made_for(np.shape(x), expected[path].shape, workers)}"
    for path, x in found.items()
    if path in expected and _differs(x, expected[path])
  ]
  structures: list[Any] = [jax.tree.structure(x) for x in (opt_state, shapes)]
  if not wrong and structures[0] != structures[1]:
    wrong = [f"{structures[0]} must be {structures[1]}"]
  if wrong:
    more = f"; and {len(wrong) - _SHOWN} more" if wrong[_SHOWN:] else ""
    raise ValueError(
      f"`opt_state` must be the global state of {workers} workers with this optimizer "
      f"and these parameters: {'; '.join(wrong[:_SHOWN])}{more}. Pass old_workers=, "
      "optimizer= and params= as they were when the state was made; restore what Orbax "
      "has saved as gradcomp.checkpoint.state_shapes says."
    )


def _as_forgetful(shapes: Any, opt_state: Any) -> Any:
  """Removes owner residuals and own memories that a state lacks without residuals."""
  states = iter(states_in(opt_state))

  def forgotten(node: Any) -> Any:
    state = next(states, None) if is_state(node) else None
    if state is None or state.residual is not None:
      return node
    memory = state.memory and node.memory
    if state.memory and memory and not state.memory.own:
      memory = memory._replace(own=state.memory.own)
    owned = None if state.server_residual is None else node.server_residual
    return node._replace(server_residual=owned, memory=memory)

  return jax.tree.map(forgotten, shapes, is_leaf=is_state)


def _differs(x: Any, like: jax.ShapeDtypeStruct) -> bool:
  return np.shape(x) != like.shape or getattr(x, "dtype", like.dtype) != like.dtype


def _text(x: Any) -> str:
  dtype = getattr(x, "dtype", type(x).__name__)
  return f"{dtype}{list(np.shape(x))}"


def _made_for(got: tuple[int, ...], like: tuple[int, ...], workers: int) -> str:
  count = stacked_for(got, like, workers)
  if count is None or like[0] % workers:
    return ""
  return f", as if made for {count} worker{'s' if count > 1 else ''}"
