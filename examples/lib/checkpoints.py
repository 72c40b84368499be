"""Checkpoints of a run, from which a later one goes on, to the same bits."""

import contextlib
import itertools
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradcomp
from examples.lib.parsing import positive


def add_arguments(parser: ArgumentParser) -> None:
  """Adds the options of a trainer that can go on from its last checkpoint."""
  add = parser.add_argument_group("checkpoints").add_argument
  said = "folder to save to, and to go on from if a run with these options was there"
  add("--checkpoint", type=Path, metavar="DIR", help=said)
  said = "steps between two checkpoints; the last step has one, too"
  add("--save-every", type=positive, default=50, help=said)


class Saved(contextlib.AbstractContextManager["Saved"]):
  """Keeps the state of a run in a folder, or nothing where there is no folder."""

  def __init__(self, folder: Path | None = None, *, every=1, steps=0, record=None):
    self._steps, self._record, self._manager = steps, record, None
    if folder is not None:
      import orbax.checkpoint as ocp  # takes seconds, and few runs need it

      options = ocp.CheckpointManagerOptions(save_interval_steps=every, max_to_keep=2)
      given = {"item_handlers": ocp.StandardCheckpointHandler(), "options": options}
      self._manager = ocp.CheckpointManager(folder.resolve(), **given)
      self._args = ocp.args

  def __exit__(self, *_: Any) -> None:
    if self._manager:
      self._manager.close()

  def restore(self, state: Any, batches: Iterator[Any], notes: Any = None) -> Any:
    """Returns the steps done, their state and notes; used batches are drawn again."""
    step = self._manager.latest_step() if self._manager else None
    if step is None:
      return 0, state, notes
    found = self._manager.metadata(step).custom_metadata
    if not isinstance(found, dict) or not found.keys() >= {"record", "notes"}:
      raise ValueError(f"{self._manager.directory} must be whole, got {found!r} of it.")
    if self._record is not None:
      gradcomp.checkpoint.check_record(found["record"], self._record)
    state = self._manager.restore(step, args=self._args.StandardRestore(state))
    print(f"goes on after step {step} of {self._manager.directory}", file=sys.stderr)
    for _ in itertools.islice(batches, step):
      pass
    return step, state, found["notes"]

  def save(self, step: int, state: Any, notes: Any = None) -> None:
    """Saves if it is time to. Notes are values that JSON can hold."""
    if not self._manager:
      return
    given = {"args": self._args.StandardSave(state), "force": step == self._steps}
    beside = {"record": self._record, "notes": notes}
    if self._manager.save(step, **given, custom_metadata=beside):
      # The next step takes the memory of these arrays.
      self._manager.wait_until_finished()


NOWHERE = Saved()
