"""The study of allocated bits compares ends seed by seed."""

import numpy as np

from benchmarks.training import adam, allocate, allocate_page


def line(arm, seed, loss):
  return {"net": "lenet", "arm": arm, "steps": 8, "workers": 4, "device": "cpu"} | {
    "parameters": 100,
    "seed": seed,
    "bytes_a_step": 30.0 if arm == "allocated" else 40.0,
    "taken": [8],
    "test_loss": loss,
    "accuracy": 1 - loss,
  }


def cells(page, arm):
  (row,) = (x for x in page.splitlines() if x.startswith(f"| {arm} "))
  return [cell.strip() for cell in row.strip("|").split("|")]


def test_ends_are_compared_by_seeds():
  """A constant distance has no interval; a seed that one arm lacks does not count."""
  ends = {0: 0.25, 1: 0.5, 2: 0.75}
  lines = [line("uniform", seed, loss) for seed, loss in ends.items()]
  lines += [line("allocated", seed, ends[seed] + 0.125) for seed in (2, 0)]
  page = allocate_page.markdown(lines)
  assert cells(page, "uniform")[1:4] == ["3", "40", ""]
  found = cells(page, "allocated")
  assert found[1:4] == ["2", "30", "0.750"]
  assert found[-3:] == ["+0.1250 ± 0.0000", "+12.5000 ± 0.0000", ""]


def test_codecs_that_change_are_counted_over_all_steps():
  """Bytes are a mean over seeds, and shares those of all their steps."""
  lines = [line("uniform", seed, 0.5) for seed in (0, 1)]
  steps = {0: ([8, 0], 40.0), 1: ([4, 4], 60.0)}
  for seed, (taken, sent) in steps.items():
    own = {"taken": taken, "bytes_a_step": sent}
    lines.append(line("adaptive", seed, 0.5) | own)
  found = cells(allocate_page.markdown(lines), "adaptive")
  assert found[2:4] == ["50", "1.250"] and found[-1] == "75%, 25%"


def test_bits_are_compared_with_uniform_ones():
  pilot = {"payload": 60, "uniform_payload": 80, "early_error": 1, "late_error": 0.5}
  page = allocate_page.markdown([line("pilot", allocate.PILOT, 0.0) | pilot])
  assert cells(page, "lenet, 8 steps") == [
    *("lenet, 8 steps", "100", "60"),
    *("0.750", "1.000", "0.500"),
  ]


def test_images_are_halved():
  images = np.arange(16, dtype=np.uint8).reshape(1, 4, 4, 1)
  halved = adam.smaller({"images": images, "images_test": images})["images"]
  np.testing.assert_array_equal(halved[0, :, :, 0], [[2, 4], [10, 12]])
