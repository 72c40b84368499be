"""The examples go on with the batches, the state and the notes that they saved."""

import jax.numpy as jnp
import pytest

import gradcomp
from examples.lib.checkpoints import Saved


def test_the_examples_draw_the_batches_again_that_were_used(tmp_path):

  def resumed(folder):
    batches = iter("abcdef")
    with Saved(folder, every=2, steps=5, record=record) as kept:
      done, state, notes = kept.restore(new, batches, "none yet")
      for step in range(done + 1, 6):
        if step == 4:
          break
        state = {"w": state["w"] + 1}
        kept.save(step, state, {"seen": next(batches)})
    return done, int(state["w"][0]), notes, next(batches)

  new = {"w": jnp.zeros(2)}
  tx = gradcomp.qsgd(bits=4, axis_name="data", feedback="error")
  record = gradcomp.checkpoint.make_record(tx, {"w": jnp.zeros((9, 70))}, workers=4)
  assert resumed(None) == (0, 3, "none yet", "d")
  assert resumed(tmp_path / "a") == (0, 3, "none yet", "d")
  assert resumed(tmp_path / "a") == (2, 3, {"seen": "b"}, "d")
  record = record | {"format": 0}
  with pytest.raises(ValueError, match="of the format 1, .* got 0"):
    resumed(tmp_path / "a")
