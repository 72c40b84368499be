"""The studies of training say what is sent, and compare ends seed by seed."""

import math

import numpy as np
import pytest

from benchmarks.training import adam_arms, adam_page, model_axes
from tests.plugins.slow_cases import slow

NAMES = ["tensor parallel", *slow("HSDP", "both")]


def test_ends_of_adam_are_compared_by_seeds():
  """A constant distance has no interval, however far apart the seeds are."""
  about = {"net": "lstm", "steps": 8, "seeds": 3, "parameters": 4, "workers": 4}
  about |= {"device": "cpu", "bytes_a_step": 8.0, "start": 0.0, "last_quarter": 0.1}
  ends = np.array([1.0, 1.5, 2.0])
  lines = [
    about | {"arm": arm, "test_loss": ends + more, "accuracy": ends + more}
    for arm, more in (
      (adam_arms.BASELINE, 0.0),
      ("close", math.log(1.005)),
      ("far", math.log(1.02)),
      ("gone", np.array([0, 0, 400])),
    )
  ]
  page = adam_page.markdown(lines)
  assert "| diverged | worse" in page
  assert "+0.50% ± 0.00% | within 1 %" in page
  # Accuracies of these lines are their losses, which the points compare.
  assert "| +1.98 ± 0.00 | +2.00% ± 0.00% | worse" in page


@pytest.mark.parametrize("name", NAMES)
def test_no_word_leaves_the_axis_of_the_exchange(name):
  """Over it go the words of the Explicit form and the loss.

  Elsewhere there is what the model sends without an exchange.
  """
  sizes = model_axes.QUICK
  plain, auto, explicit = (
    model_axes.sent(name, form, sizes) for form in model_axes.FORMS
  )
  layout = model_axes.LAYOUTS[name]
  first, size = layout.axis_name, layout.axes[layout.axis_name]
  loss = 2 * 4 * (size - 1) // size  # of one number, by an all-reduce
  assert auto[first] == explicit[first]
  assert auto[first]["float32"] == loss
  assert set(auto) == set(layout.axes)
  own = lambda found: sum(
    part["float32"] for axis, part in found.items() if axis != first
  )
  others = {axis: part for axis, part in auto.items() if axis != first}
  assert not any(part["words"] for part in others.values())
  # In the plain step some sums of small leaves and of the loss go over all axes at
  # once, and here over the others alone: of both biases and the loss, in float32.
  small = 4 * (sizes[1] + sizes[2] + 1)
  assert own(auto) <= own(plain) + 2 * small
  if name == "tensor parallel":
    assert own(auto) == own(plain)
