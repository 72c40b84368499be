"""Steps whose parameters other axes shard send words over the exchange's axis alone."""

import pytest

from benchmarks.compilers import model_axes
from tests.plugins.slow_cases import slow


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
