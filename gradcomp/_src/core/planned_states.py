"""Tells whoever asks what transformations planned when they made their states.

A state is plain arrays. What the rows are that its owners keep, and of which leaves,
only the transformation knows.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax

from gradcomp._src.core.state import CompressState
from gradcomp._src.exchange.plan import Plan

# Plans, each with the count of the state that was made for it.
Told = list[tuple[Plan, jax.Array | None]]

_ASKED: ContextVar[Told | None] = ContextVar("asked", default=None)


@contextlib.contextmanager
def asked() -> Iterator[Told]:
  """Collects the plans of all states that are made in the body of a ``with``."""
  told: Told = []
  token = _ASKED.set(told)
  try:
    yield told
  finally:
    _ASKED.reset(token)


def tell(plan: Plan) -> None:
  """Says what is planned for the state that is made next."""
  told = _ASKED.get()
  if told is not None:
    told.append((plan, None))


def tell_of(state: CompressState) -> CompressState:
  """Says that the plan of last was for this state, and returns it."""
  told = _ASKED.get()
  if told:
    told[-1] = told[-1][0], state.count
  return state


def plan_of(state: CompressState, told: Told) -> Plan | None:
  """Returns the plan for a state, by the identity of its count; None if it is gone."""
  return next((plan for plan, count in told if count is state.count), None)
