"""Trains a language model with each way to round: shared dithers, and means to nearest.

  python benchmarks/rounding_study.py [--seeds 5] [--quick] [--output FOLDER]

The recurrent language model of the examples, four emulated workers, Nesterov's momentum
behind the exchange, 300 steps, from the same initialisations and with the same batches
for every way:

  default      All workers round by the same random bits, each with its mask. Owners
               round means to nearest, and keep what that loses.
  forgetful    The same, but owners round means at random, and keep nothing.
  independent  Every worker and every owner rounds by random bits of its own.

With --output, writes rounding_study.json and rounding_study.md there.
"""

import argparse
import functools
from pathlib import Path
from typing import Any

import running
from emulated import AXIS, WORKERS, Method, Setting, Trainer
from redsync_study import language
from tables import spread

import gradcomp
from gradcomp.codecs import QSGD, Codec, Dense, Ternary
from gradcomp.exchange import TwoShot

CODECS: dict[str, Codec] = {
  "QSGD, 4 bits": QSGD(bits=4),
  "QSGD, 2 bits, buckets of 128": QSGD(bits=2, bucket_size=128),
  "TernGrad": Ternary(),
}
WAYS: dict[str, dict[str, Any]] = {
  "default": {},
  "forgetful": {"exchange": TwoShot(feedback=False)},
  "independent": {"exchange": TwoShot(feedback=False), "dither": "independent"},
}
BASELINE = "f32"


def method(codec: Codec, **options: Any) -> Method:
  """Puts momentum and clipping behind an exchange of a codec's payloads."""
  make = lambda *_: gradcomp.compress(codec, axis_name=AXIS, **options)
  return Method(make, (1,), momentum_behind=True, clip_behind=True)


def losses(setting: Setting, way: Method, seeds: int) -> list[float]:
  """Returns the test loss in nats a character at the end of training, by seed."""
  trainer = Trainer(setting, way)
  return [trainer.train(seed)["points"][-1]["test_loss"] for seed in range(seeds)]


def markdown(found: dict[str, dict[str, list[float]]], setting: Setting) -> str:
  """Writes the table of mean losses."""
  seeds = len(found[BASELINE][BASELINE])
  (baseline,) = found[BASELINE].values()
  lines = [
    f"{setting.title}, {WORKERS} workers, {setting.steps} steps, momentum "
    f"{setting.momentum}; test loss in nats a character, mean and standard deviation "
    f"over {seeds} seeds. The plain mean in float32 has {spread(baseline, digits=3)}.",
    "",
    f"| codec | {' | '.join(WAYS)} |",
    f"| --- {'| --- ' * len(WAYS)}|",
  ]
  for name in filter(found.__contains__, CODECS):
    cells = [spread(found[name][way], digits=3) for way in WAYS]
    lines.append(f"| {name} | {' | '.join(cells)} |")
  return "\n".join(lines) + "\n"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--seeds", type=int, default=5)
  running.add_quick(parser, "ten steps of a small model, one codec and one seed")
  parser.add_argument("--output", type=Path, help="folder of the two files")
  options = parser.parse_args()
  steps, sizes, codecs = 300, {}, CODECS
  if options.quick:
    steps, sizes, options.seeds = 10, {"width": 16, "hidden": 16}, 1
    codecs = dict(list(CODECS.items())[:1])
    running.compile_fast()
  make = functools.partial(language, momentum=0.9, learning_rate=2.0, max_norm=1.0)
  setting = make(steps, **sizes)
  found = {BASELINE: {BASELINE: losses(setting, method(Dense()), options.seeds)}}
  for name, codec in codecs.items():
    found[name] = {}
    for way, choices in WAYS.items():
      found[name][way] = losses(setting, method(codec, **choices), options.seeds)
      print(f"{name}, {way}: {spread(found[name][way], digits=3)}", flush=True)
  if options.output:
    page = markdown(found, setting)
    running.write(options.output, "rounding_study", found, page)


if __name__ == "__main__":
  main()
