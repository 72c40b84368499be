"""All processes of a run take the same implementation of a kernel, or fail together."""

import collections
import time

import jax
import pytest

from gradcomp._src.kernels.gpu import verdicts
from gradcomp._src.kernels.gpu.verdicts import Verdict, agreed, of_all
from tests.support.cases.agreement import processes

RIGHT, WRONG = Verdict("", 1.0, 2.0), Verdict("On a, it lies.")
SLOW = Verdict("", 3.0, 2.5)
BOTH = (0, 1)


class PerProcess(collections.defaultdict):
  """A memory of each process, which here is a thread."""

  def own(self, key):
    return key, jax.process_index()

  def __contains__(self, key):
    return super().__contains__(self.own(key))

  def __getitem__(self, key):
    return super().__getitem__(self.own(key))

  def __setitem__(self, key, value):
    super().__setitem__(self.own(key), value)


@pytest.fixture
def together(monkeypatch):
  """Returns what tries a kernel on processes: their verdicts, and their errors."""
  monkeypatch.setattr(verdicts, "_agreed", PerProcess())
  monkeypatch.setattr(verdicts, "_failed", PerProcess(int))
  run = processes(monkeypatch)

  def trying(*tries):
    found = [None] * len(tries)

    def process(own):
      def run():
        found[jax.process_index()] = agreed("a kernel", own, BOTH)

      return run

    errors = run(*map(process, tries))
    return found, errors

  return trying


@pytest.mark.parametrize(
  "one, other, taken",
  [
    *((RIGHT, RIGHT, True), (RIGHT, WRONG, False), (WRONG, RIGHT, False)),
    (RIGHT, SLOW, False),  # 3.0 on the slowest, and 2.5
    *((Verdict(), Verdict(), True), (Verdict(), Verdict(able=False), False)),
  ],
)
def test_processes_agree_on_one_verdict(one, other, taken, together):
  (first, second), errors = together(lambda: one, lambda: other)
  assert errors == [None, None]
  assert first == second == of_all([one, other])
  assert first.for_kernel is taken
  assert first.failure == (one.failure or other.failure)
  assert of_all([SLOW, RIGHT, WRONG]) == Verdict(WRONG.failure, 3.0, float("inf"))


def test_a_kernel_is_tried_once(together):
  tried = []

  def once():
    tried.append(jax.process_index())
    return RIGHT

  for _ in range(2):
    together(once, once)
  assert sorted(tried) == [0, 1]


def test_all_fail_where_one_has_no_room_and_all_may_try_again(together):
  def full():
    raise RuntimeError("no memory is left")

  _, (first, second) = together(lambda: RIGHT, full)
  assert str(first) == "Process 1 did not try a kernel: no memory is left"
  assert str(second) == "no memory is left"
  found, errors = together(lambda: RIGHT, lambda: RIGHT)
  assert errors == [None, None] and found == [RIGHT, RIGHT]


def test_a_process_that_does_not_come_is_named_and_may_be_late(together, monkeypatch):
  """It finds what waited for it, which goes on then."""
  monkeypatch.setenv("GRADCOMP_PATIENCE_SECONDS", "0.05")
  late = lambda: time.sleep(0.5) or RIGHT
  (_, found), (first, second) = together(lambda: RIGHT, late)
  told = "must be tried by all processes, got nothing from process 1 in 0.05 s"
  assert isinstance(first, ValueError) and told in str(first)
  assert second is None and found == RIGHT
  assert together(lambda: RIGHT, late) == ([RIGHT, RIGHT], [None, None])
