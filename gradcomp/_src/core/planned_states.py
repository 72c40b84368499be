"""Records each transformation's message plan while ``optimizer.init`` is traced.

``reshard_state`` needs it: a state is plain arrays, and only the plan knows the leaves
of its owner residuals.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax

from gradcomp._src.core.state import CompressState
from gradcomp._src.exchange.plan import MessagePlan

# Plans, each with the count of the state that was made for it.
Told = list[tuple[MessagePlan, jax.Array | None]]

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


def tell(plan: MessagePlan) -> None:
  """Records the plan of the state that is made next."""
  told = _ASKED.get()
  if told is not None:
    told.append((plan, None))


def tell_of(state: CompressState) -> CompressState:
  """Links the last recorded plan to this state, and returns the state."""
  told = _ASKED.get()
  if told:
    told[-1] = told[-1][0], state.count
  return state


def plan_of(state: CompressState, told: Told) -> MessagePlan | None:
  """Returns the plan of a state, by the identity of its count; None if it is gone."""
  return next((plan for plan, count in told if count is state.count), None)
