"""The studies of training say what is sent, and compare ends seed by seed."""

import math

import numpy as np
import pytest

from benchmarks.training import adam_arms, adam_page, model_axes
from tests.plugins.slow_cases import slow


def test_ends_of_adam_are_compared_by_seeds():
  """A constant distance has no interval, however far apart the seeds are."""
  about = {"net": "lstm", "steps": 8, "seeds": 3, "parameters": 4, "workers": 4}
  about |= {"device": "cpu", "bytes_a_step": 8.0, "start": 0.0, "last_quarter": 0.1}
  ends = np.array([1.0, 1.5, 2.0])
  more = {adam_arms.BASELINE: 0.0, "close": math.log(1.005), "far": math.log(1.02)}
  lines = [
    about | {"arm": arm, "test_loss": ends + x, "accuracy": ends + x}
    for arm, x in (more | {"gone": np.array([0, 0, 400])}).items()
  ]
  page = adam_page.markdown(lines)
  assert "| diverged | worse" in page
  assert "+0.50% ± 0.00% | within 1 %" in page
  # Accuracies of these lines are their losses, which the points compare.
  assert "| +1.98 ± 0.00 | +2.00% ± 0.00% | worse" in page


@pytest.mark.parametrize("name", ["tensor parallel", *slow("HSDP", "both")])
def test_no_word_leaves_the_axis_of_the_exchange(name):
  """Elsewhere there is what the model sends without an exchange."""
  sizes = model_axes.QUICK
  sent = [model_axes.sent(name, form, sizes) for form in model_axes.FORMS]
  plain, auto, explicit = sent
  layout = model_axes.LAYOUTS[name]
  first, size = layout.axis_name, layout.axes[layout.axis_name]
  assert auto[first] == explicit[first] and set(auto) == set(layout.axes)
  # The loss is one number, by an all-reduce.
  assert auto[first]["float32"] == 2 * 4 * (size - 1) // size
  others = layout.axes.keys() - {first}
  assert not any(auto[axis]["words"] for axis in others)
  own, before = (sum(x[axis]["float32"] for axis in others) for x in (auto, plain))
  # In the plain step some sums of small leaves and of the loss go over all axes at
  # once, and here over the others alone: of both biases and the loss, in float32.
  small = 4 * (sizes[1] + sizes[2] + 1)
  assert own <= before + (0 if name == "tensor parallel" else 2 * small)
