"""Keeps the state of a run, so that a later one goes on from it."""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp


class Saved:
  """Keeps the state of a run in a folder, or nothing where there is no folder."""

  def __init__(self, folder: Path | None, every: int):
    self._manager = None
    if folder is not None:
      options = ocp.CheckpointManagerOptions(save_interval_steps=every, max_to_keep=2)
      self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

  def restore(self, state: Any) -> tuple[int, Any]:
    """Returns the steps done and the state after them, or ``state`` as it is."""
    step = self._manager.latest_step() if self._manager else None
    if step is None:
      return 0, state
    return step, self._manager.restore(step, args=ocp.args.StandardRestore(state))

  def save(self, step: int, state: Any) -> None:
    """Saves, if it is time to."""
    if self._manager:
      self._manager.save(step, args=ocp.args.StandardSave(state))
      # The next step takes the memory of these arrays.
      self._manager.wait_until_finished()

  def close(self) -> None:
    if self._manager:
      self._manager.close()
