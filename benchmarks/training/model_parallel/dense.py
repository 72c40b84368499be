"""Trains with 8-bit gradients, activations and errors (Dettmers 2016, section 3.4).

  python -m benchmarks.training.model_parallel.dense [--seeds 5] [--steps 300]
    [--hidden 256] [--quick] [--output FOLDER]

Trains a net of two hidden layers on the embedded digits, with dropout of 0.2, 0.3 and
0.3 and RMSProp at 0.003, as the paper does on MNIST, from the same initializations and
with the same batches for every arm. Four workers are a vmap on one device.

  data   Each worker has a quarter of the batch, and workers send gradients once,
         without feedback.
  model  Layers are cut by outputs. Workers send activations after the unit, and the
         partial errors of the inputs. Their own part is rounded, too, which the paper
         calls pure 8 bits. Tests use the same cut net and the same codec.

Each data type has one scale a matrix. Friedman's analysis of variance over five arms,
f32 and the four types, says whether they differ: its blocks are the seeds. Coarse
codecs follow: on activations and errors, and on gradients with feedback. The last table
has relative errors of the activations and errors of a net trained in float32, beside
the paper's table 2. With --output, writes model_parallel.json and model_parallel.md
there.
"""

import time
from collections.abc import Callable
from typing import Any, Literal

from benchmarks.common import cli
from benchmarks.common.tables import spread, table
from benchmarks.training.model_parallel.data_types import (
  ARMS,
  accuracies,
  beside,
  friedman,
)
from benchmarks.training.model_parallel.layer_errors import error_lines, relative_errors
from benchmarks.training.model_parallel.ways import (
  Arm,
  cut_layers,
  digits,
  of_dense_layers,
  options,
)
from gradcomp.codecs import QSGD, Codec, Dense, OneBit, Ternary

HIDDEN = 256
COARSE: dict[str, Codec] = {
  "1 bit": OneBit(),
  "QSGD, 2 bits": QSGD(bits=2, bucket_size=128),
  # The record has buckets of 512, whose residual grows, as feedback knows today.
  "Ternary": Ternary(share_scale=False, bucket_size=128),
}
WAYS: tuple[Literal["data", "model"], ...] = ("data", "model")
UNITS: tuple[cut_layers.Unit, ...] = ("relu", "logistic")


def compare(
  arms: dict[str, Arm], unit: cut_layers.Unit, sets: Any, args: Any
) -> dict[str, list[float]]:
  """Trains all arms from all seeds: accuracies in percent, a list for each arm."""
  return {
    name: accuracies(
      f"{unit}, {arm.way}, {name}", of_dense_layers(arm, unit, sets, args), args.seeds
    )
    for name, arm in arms.items()
  }


def compare_coarse(sets: Any, args: Any) -> dict[str, dict[str, list[float]]]:
  """Trains with coarse codecs on gradients, on activations and errors, or on one."""
  ways: dict[str, Callable[[Codec], Arm]] = {
    "gradients, with feedback": lambda codec: Arm("data", codec, "error"),
    "activations and errors": lambda codec: Arm("model", codec),
    "activations": lambda codec: Arm("model", codec, errors=Dense()),
  }
  taken = [*COARSE][: 1 if args.quick else None]
  return {
    title: compare({name: way(COARSE[name]) for name in taken}, "relu", sets, args)
    for title, way in ways.items()
  }


def markdown(found: dict[str, Any]) -> str:
  """Writes all tables in Markdown."""
  about = found["options"]
  parts = [
    f"A net of {about['sizes']} on digits: {about['workers']} emulated workers, "
    f"batches of {about['batch']}, {about['steps']} steps of RMSProp at "
    f"{about['rate']} along a cosine, dropout of 0.2, 0.3 and 0.3; "
    f"{about['images']} images to train on and {about['tested']} to test on. Test "
    "accuracies in percent, mean and standard deviation over "
    f"{about['seeds']} seeds, and in brackets less f32 seed by seed. p is that "
    "of Friedman's analysis of variance over the five arms, whose blocks are the "
    f"seeds. All of it took {found['seconds']} s.",
    table(
      ["units", "sent", *found["types"][0]["accuracy_percent"], "p"],
      [
        [
          row["unit"],
          "gradients" if row["way"] == "data" else "activations and errors",
          *beside(row["accuracy_percent"]),
          f"{friedman(row['accuracy_percent'].values()):.3f}",
        ]
        for row in found["types"]
      ],
    ),
    "Coarse codecs, ReLU. Where activations alone are coarse, errors are float32.",
    table(
      ["sent", *found["coarse"]["activations"]],
      [[title, *map(spread, arms.values())] for title, arms in found["coarse"].items()],
    ),
    "Mean relative errors of rounding in percent, by layer, ReLU, in nets trained in "
    "f32: mean over the seeds. Activations are the inputs, both hidden layers and the "
    "logits; the paper's three stand beside the last three. Gradients are those of the "
    "three weights, errors those of the activations. Scales are the largest element of "
    "a matrix. Ratio: the largest to the paper's, or of the paper's to ours.",
    table(
      ["", "type", "ours", "paper", "ratio"],
      [
        line
        for kind, types in found["errors"].items()
        for line in error_lines(kind, types)
      ],
    ),
  ]
  return "\n\n".join(parts) + "\n"


def main() -> None:
  args = options(
    __doc__,
    "two steps of small nets, with few of the codecs",
    hidden=cli.Option(HIDDEN, 16, "units of a layer"),
  )
  sets, about = digits(args)
  sizes = sets[0].x.shape[1], args.hidden, args.hidden, sets[2]
  start = time.perf_counter()
  found: dict[str, Any] = {
    "options": {"sizes": "-".join(map(str, sizes))} | about,
    "types": [],
  }
  for unit in UNITS[: 1 if args.quick else None]:
    for way in WAYS:
      taken = [*ARMS][: 3 if args.quick else None]
      arms = {name: Arm(way, ARMS[name]) for name in taken}
      accuracy = compare(arms, unit, sets, args)
      found["types"].append({"unit": unit, "way": way, "accuracy_percent": accuracy})
  found["coarse"] = compare_coarse(sets, args)
  found["errors"] = relative_errors(sets, args)
  found["seconds"] = round(time.perf_counter() - start)
  print(markdown(found))
  cli.write(args.output, "model_parallel", found, markdown(found))


if __name__ == "__main__":
  main()
