"""Asks a transformation what it would send, without sending it: for explain alone."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from gradcomp.codecs import Codec
from gradcomp.exchange import Message


class Plan(NamedTuple):
  """The messages of one transformation.

  Attributes:
    paths: the paths of the leaves that it was given.
    messages: the messages, with the numbers of those leaves.
    group_size: workers in a group of ``hierarchical`` over one axis.
    codec: the codec of the large leaves.
    planner: the function that made the messages; each transformation has one.
    used: entries that a worker sent of each leaf in the last step, if that is known.
  """

  paths: tuple[str, ...]
  messages: tuple[Message, ...]
  group_size: int | None
  codec: Codec
  planner: Any
  used: Mapping[int, float]


class Study(NamedTuple):
  """The number of workers to plan for, and the plans so far."""

  workers: int
  plans: list[Plan]

  def add(
    self,
    updates: Any,
    plan: Callable[..., tuple[Message, ...]],
    group_size: int | None,
    codec: Codec,
    used: Callable[[tuple[Message, ...]], Mapping[int, float]],
  ) -> None:
    """Adds what a transformation would do with these gradients.

    Some of optax's transformations, like MultiSteps, trace what they hold twice. It
    counts once.
    """
    if not jax.tree.leaves(updates):
      return
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(updates), strict=True)
    messages = plan(leaves, [()] * len(leaves), workers=self.workers)
    names = tuple(map(jax.tree_util.keystr, paths))
    if not any(p.planner is plan and p.paths == names for p in self.plans):
      found = Plan(names, messages, group_size, codec, plan, used(messages))
      self.plans.append(found)


_current: contextvars.ContextVar[Study | None] = contextvars.ContextVar(
  "study", default=None
)


def current() -> Study | None:
  """Returns the study to add plans to, in place of any exchange; None outside one."""
  return _current.get()


@contextlib.contextmanager
def planning(workers: int) -> Iterator[list[Plan]]:
  """Collects the plans of the transformations that are called inside."""
  study = Study(workers, [])
  token = _current.set(study)
  try:
    yield study.plans
  finally:
    _current.reset(token)
