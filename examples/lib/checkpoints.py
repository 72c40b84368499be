"""Checkpoints of a run, from which a later one goes on, to the same bits."""

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import optax

import gradcomp
from examples.lib.parsing import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the options of a trainer that can go on from its last checkpoint."""
  group = parser.add_argument_group("checkpoints")
  group.add_argument(
    "--checkpoint",
    type=Path,
    metavar="DIR",
    help="folder to save to, and to go on from if a run with the same options was "
    "there before",
  )
  group.add_argument(
    "--save-every",
    type=positive,
    default=50,
    help="steps between two checkpoints; the last step has one, too; default: 50",
  )


def orbax() -> ModuleType:
  """Returns Orbax, which takes seconds to import, and which few runs need."""
  import orbax.checkpoint

  return orbax.checkpoint


class Saved:
  """Keeps the state of a run in a folder, or nothing where there is no folder.

  Args:
    folder: the folder of this run alone, or None.
    every: steps between two checkpoints.
    steps: the last step, which is always saved.
    record: what the state belongs to: see ``gradcomp.checkpoint.record``.
  """

  def __init__(
    self,
    folder: Path | None = None,
    *,
    every: int = 1,
    steps: int = 0,
    record: dict[str, Any] | None = None,
  ):
    self._steps, self._record = steps, record
    self._manager = None
    if folder is not None:
      ocp = orbax()
      options = ocp.CheckpointManagerOptions(save_interval_steps=every, max_to_keep=2)
      self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

  def __enter__(self) -> "Saved":
    return self

  def __exit__(self, *_: Any) -> None:
    if self._manager:
      self._manager.close()

  def restore(
    self, state: Any, batches: Iterator[Any], notes: Any = None
  ) -> tuple[int, Any, Any]:
    """Returns the steps done, and the state and the notes after them.

    Batches that were used are drawn again. Where nothing was saved, no step is done.
    """
    step = self._manager.latest_step() if self._manager else None
    if step is None:
      return 0, state, notes
    ocp = orbax()
    beside = ocp.args.Composite(beside=ocp.args.JsonRestore())
    found = self._manager.restore(step, args=beside).beside
    if not isinstance(found, dict) or not found.keys() >= {"record", "notes"}:
      raise ValueError(f"{self._manager.directory} must be whole, got {found!r} of it.")
    if self._record is not None:
      gradcomp.checkpoint.check_record(found["record"], self._record)
    whole = ocp.args.Composite(state=ocp.args.StandardRestore(state))
    state = self._manager.restore(step, args=whole).state
    print(f"goes on after step {step} of {self._manager.directory}", file=sys.stderr)
    for _ in itertools.islice(batches, step):
      pass
    return step, state, found["notes"]

  def save(self, step: int, state: Any, notes: Any = None) -> None:
    """Saves if it is time to. Notes are values that JSON can hold."""
    if not self._manager:
      return
    ocp = orbax()
    args = ocp.args.Composite(
      state=ocp.args.StandardSave(state),
      beside=ocp.args.JsonSave({"record": self._record, "notes": notes}),
    )
    if self._manager.save(step, args=args, force=step == self._steps):
      # The next step takes the memory of these arrays.
      self._manager.wait_until_finished()


def saved_in(
  args: argparse.Namespace,
  run: str = "",
  *,
  optimizer: optax.GradientTransformation | None = None,
  params: Any = None,
  workers: int = 1,
) -> Saved:
  """Makes the keeper of a run, in the folder of the options.

  Args:
    args: the options.
    run: the folder of the run, inside that of the options.
    optimizer: an optimizer with a transformation of gradcomp's in it, or None. With
      another one the run does not go on.
    params: its parameters.
    workers: how many workers there are.
  """
  if args.checkpoint is None:
    return Saved()
  record = optimizer and gradcomp.checkpoint.record(optimizer, params, workers=workers)
  folder = args.checkpoint / run
  return Saved(folder, every=args.save_every, steps=args.steps, record=record)
