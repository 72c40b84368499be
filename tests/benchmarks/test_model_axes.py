"""Shards of a model are encoded where they lie: bytes over each axis, by the HLO."""

import pytest

from benchmarks.training import model_axes
from tests.plugins.slow_cases import slow

SIZES = model_axes.QUICK


@pytest.mark.parametrize("name", ["tensor parallel", *slow("HSDP", "both")])
def test_no_word_leaves_the_axis_of_the_exchange(name):
  """Over it go the words of the Explicit form and the loss.

  Elsewhere there is what the model sends without an exchange.
  """
  plain, auto, explicit = (
    model_axes.sent(name, form, SIZES) for form in model_axes.FORMS
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
  small = 4 * (SIZES[1] + SIZES[2] + 1)
  assert own(auto) <= own(plain) + 2 * small
  if name == "tensor parallel":
    assert own(auto) == own(plain)
