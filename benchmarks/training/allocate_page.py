"""Writes the page about the lines of benchmarks.training.allocate."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.common.tables import table
from benchmarks.training.adam_page import Line, interval


def markdown(lines: Sequence[Line]) -> str:
  """Writes a table for each net and training."""
  paragraphs = [
    "# Bits for each leaf",
    "`python -m benchmarks.training.allocate` writes this file, and says what it "
    "trains. *More loss* and *less accuracy* are against 4 bits for each leaf, at the "
    "end, seed by seed, with an interval of 95 %; points are of a hundred. *Steps by "
    "bits* are the shares of the steps with 2, 3, 4 and 8 bits.",
  ]
  header = ["net", "parameters", "payload", "of 4 bits", "of its error", "at the end"]
  pilots = [x for x in lines if x["arm"] == "pilot"]
  paragraphs += [
    "The allocated bits alone, and their error for the gradients that they were "
    "allocated from, and for those at the end of the pilot run:",
    table(header, [_bits(line) for line in pilots]),
  ]
  apart = ("net", "steps", "workers", "parameters", "device")
  groups: dict[Any, dict[str, list[Line]]] = {}
  for line in sorted(lines, key=lambda line: line["seed"]):
    if line["arm"] != "pilot":
      arms = groups.setdefault(tuple(line[x] for x in apart), {})
      arms.setdefault(line["arm"], []).append(line)
  for (net, steps, workers, parameters, device), arms in groups.items():
    title = f"{net}, {parameters:,} parameters, {steps} steps, {workers} workers"
    paragraphs.append(f"## {title}, on {device}")
    header = ["arm", "seeds", "bytes a step", "of uniform", "loss", "accuracy"]
    header += ["more loss", "less accuracy, points", "steps by bits"]
    rows = [_row(arm, own, arms.get("uniform", [])) for arm, own in arms.items()]
    paragraphs.append(table(header, rows))
  return "\n\n".join(paragraphs) + "\n"


def _bits(line: Line) -> list[str]:
  share = line["payload"] / line["uniform_payload"]
  errors = (f"{line[name]:.3f}" for name in ("early_error", "late_error"))
  return [
    f"{line['net']}, {line['steps']} steps",
    f"{line['parameters']:,}",
    f"{line['payload']:,}",
    f"{share:.3f}",
    *errors,
  ]


def _row(arm: str, own: Sequence[Line], uniform: Sequence[Line]) -> list[str]:
  losses, right = (_ends(own, name) for name in ("test_loss", "accuracy"))
  sent = float(np.mean([line["bytes_a_step"] for line in own]))
  row = [arm, str(len(own)), f"{sent:,.0f}", ""]
  mean = lambda ends: float(np.mean([*ends.values()]))
  row += [f"{mean(losses):.4f}", f"{mean(right):.2%}", "", "", ""]
  if uniform and arm != "uniform":
    row[3] = f"{sent / uniform[0]['bytes_a_step']:.3f}"
    taken = np.sum([line["taken"] for line in own], axis=0)
    if len(taken) > 1:
      row[8] = ", ".join(f"{share:.0%}" for share in taken / taken.sum())
    for place, name, ends, sign in (
      (6, "test_loss", losses, 1),
      (7, "accuracy", right, -100),
    ):
      theirs = _ends(uniform, name)
      apart = [sign * (ends[seed] - theirs[seed]) for seed in ends if seed in theirs]
      if apart:
        row[place] = "{:+.4f} ± {:.4f}".format(*interval(apart))
  return row


def _ends(lines: Sequence[Line], name: str) -> dict[int, float]:
  """Returns the numbers of all seeds."""
  return {line["seed"]: line[name] for line in lines}
