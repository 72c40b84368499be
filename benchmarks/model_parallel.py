"""Trains with 8-bit gradients, activations and errors (Dettmers 2016, section 3.4).

  python benchmarks/model_parallel.py [--seeds 5] [--steps 300] [--hidden 256] [--quick]
    [--output FOLDER]

Trains a net of two hidden layers on the embedded digits, with dropout of 0.2, 0.3 and
0.3 and RMSProp at 0.003, as the paper does on MNIST, from the same initialisations and
with the same batches for every arm. Four workers are a vmap on one device.

  data   Each worker has a quarter of the batch, and workers send gradients once,
         without feedback.
  model  Layers are cut by outputs. Workers send activations after the unit, and the
         partial errors of the inputs. Their own part is rounded, too, which the paper
         calls pure 8 bits. Tests use the same cut net and the same codec.

Each data type has one scale a matrix. A one-way ANOVA over five arms, f32 and the four
types, says whether their means differ. Coarse codecs follow: on activations and errors,
and on gradients with feedback. The last table has relative errors of the activations
and errors of a net trained in float32, beside the paper's table 2. With --output,
writes model_parallel.json and model_parallel.md there.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import running
from cut_training import BATCH, WORKERS, Arm, Trainer, halves, loss, rounded
from jax.scipy.special import betainc
from tables import spread, table

from gradcomp.codecs import QSGD, Codec, Dense, EightBit, OneBit, Ternary

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import cut_layers  # noqa: E402
import data  # noqa: E402

HIDDEN = 256
TYPES = ("dynamic_tree", "linear", "mantissa", "static_tree")
ARMS: dict[str, Codec] = {
  "f32": Dense(),
  **{name: EightBit(data_type=name) for name in TYPES},
}
COARSE: dict[str, Codec] = {
  "1 bit": OneBit(),
  "QSGD, 2 bits": QSGD(bits=2, bucket_size=128),
  "Ternary": Ternary(share_scale=False, bucket_size=512),
}
WAYS: tuple[Literal["data", "model"], ...] = ("data", "model")
UNITS: tuple[cut_layers.Unit, ...] = ("relu", "logistic")
# Mean relative errors in percent of three layers, from table 2 of the paper.
PAPER = {
  "activations": {
    "dynamic_tree": (0.5, 2, 2),
    "linear": (1, 2, 3),
    "mantissa": (1.5, 2, 8),
    "static_tree": (1, 2, 6),
  },
  "gradients": {
    "dynamic_tree": (3, 4, 5),
    "linear": (5, 6, 6),
    "mantissa": (4.5, 4.5, 6),
    "static_tree": (4, 4, 5),
  },
}


def compare(
  arms: dict[str, Arm], unit: cut_layers.Unit, sets: Any, args: Any
) -> dict[str, list[float]]:
  """Trains all arms from all seeds: accuracies in percent, a list for each arm."""
  found = {}
  for name, arm in arms.items():
    start = time.perf_counter()
    trainer = Trainer(arm, unit, sets, args)
    found[name] = [trainer.train(seed)[0] for seed in range(args.seeds)]
    seconds = time.perf_counter() - start
    mean = statistics.fmean(found[name])
    print(f"{unit}, {arm.way}, {name}: {mean:.2f} %, {seconds:.0f} s", flush=True)
  return found


def anova(groups: Sequence[Sequence[float]]) -> dict[str, float]:
  """Returns F and p of a one-way analysis of variance.

  Example:
    >>> found = anova([[6, 8, 4, 5, 3, 4], [8, 12, 9, 11, 6, 8], [13, 9, 11, 8, 7, 12]])
    >>> round(found["F"], 3), round(found["p"], 4)
    (9.265, 0.0024)
  """
  count = sum(map(len, groups))
  mean = statistics.fmean([x for group in groups for x in group])
  means = [statistics.fmean(group) for group in groups]
  between = sum(
    len(group) * (own - mean) ** 2 for group, own in zip(groups, means, strict=True)
  )
  within = sum(
    (x - own) ** 2 for group, own in zip(groups, means, strict=True) for x in group
  )
  a, b = len(groups) - 1, count - len(groups)
  ratio = (between / a) / (within / b) if within else 0.0
  p = float(betainc(b / 2, a / 2, b / (b + a * ratio)))
  return {"F": ratio, "p": p}


def relative_errors(sets: Any, args: Any) -> dict[str, dict[str, list[list[float]]]]:
  """Measures rounding in nets trained in float32.

  Returns:
    For each kind and type, a list for each seed, with the mean relative error in
    percent of each layer. Zeros do not count. Activations begin with the inputs and end
    with the logits; gradients are those of weights; errors are those of activations.
  """
  train, _, classes = sets
  trainer = Trainer(Arm("data", Dense()), "relu", sets, args)
  net = functools.partial(cut_layers.apply, classes=classes)
  images = jax.tree.map(lambda x: x[:BATCH], train)

  @jax.jit
  def arrays(layers: cut_layers.Layers, key: jax.Array) -> Any:
    shapes = [(BATCH, layer["b"].size) for layer in layers]

    def with_sums(layers: Any, added: Any) -> Any:
      seen = []

      def gather(y: jax.Array, layer: int) -> jax.Array:
        seen.append(y)
        return y + added[layer]  # its gradient is the error of these activations

      keys = {"key": key, "own_key": key}
      return loss(layers, net, images, gather=gather, **keys), seen

    zeros = [jnp.zeros(shape) for shape in shapes]
    (grads, errors), seen = jax.grad(with_sums, (0, 1), has_aux=True)(layers, zeros)
    weights = [layer["w"] for layer in grads]
    inputs = cut_layers.dropped(images.x, cut_layers.DROPOUT[0], key)
    return {
      "activations": [inputs, *seen],
      "gradients": weights,
      "errors": errors,
    }

  @functools.partial(jax.jit, static_argnums=0)
  def percent(codec: Codec, x: jax.Array) -> jax.Array:
    distance = jnp.abs(rounded(codec, x) - x)
    ratio = jnp.where(x == 0, 0.0, distance / jnp.where(x == 0, 1.0, jnp.abs(x)))
    return 100 * ratio.sum() / (x != 0).sum()

  found: dict[str, dict[str, list[list[float]]]] = {}
  for seed in range(args.seeds):
    _, layers = trainer.train(seed)
    for kind, each in arrays(layers, jax.random.key(seed)).items():
      for name in TYPES:
        row = [float(percent(EightBit(data_type=name), x)) for x in each]
        found.setdefault(kind, {}).setdefault(name, []).append(row)
  return found


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
  options = found["options"]
  parts = [
    f"A net of {options['sizes']} on digits: {options['workers']} emulated workers, "
    f"batches of {options['batch']}, {options['steps']} steps of RMSProp at "
    f"{options['rate']} along a cosine, dropout of 0.2, 0.3 and 0.3; "
    f"{options['images']} images to train on and {options['tested']} to test on. Test "
    "accuracies in percent, mean and standard deviation over "
    f"{options['seeds']} seeds, and in brackets less f32 seed by seed. p is that "
    f"of a one-way ANOVA over the five arms. All of it took {found['seconds']} s.",
    table(
      ["units", "sent", *found["types"][0]["accuracy_percent"], "F", "p"],
      [
        [
          row["unit"],
          "gradients" if row["way"] == "data" else "activations and errors",
          *beside(row["accuracy_percent"]),
          f"{row['anova']['F']:.2f}",
          f"{row['anova']['p']:.2f}",
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


def error_lines(kind: str, types: dict[str, list[list[float]]]) -> list[list[str]]:
  """Returns a line for each type, beside the paper's where it has one."""
  lines = []
  for name, rows in types.items():
    means = [statistics.fmean(x) for x in zip(*rows, strict=True)]
    paper = PAPER.get(kind, {}).get(name, ())
    pairs = zip(means[-3:], paper, strict=False)
    worst = [max(ours / his, his / ours) for ours, his in pairs]
    ours = " / ".join(f"{x:.1f}" for x in means)
    theirs = " / ".join(f"{x:g}" for x in paper)
    lines.append([kind, name, ours, theirs, f"{max(worst):.1f}" if worst else ""])
  return lines


def beside(arms: dict[str, list[float]]) -> list[str]:
  """Returns the accuracies of the arms, and the differences to f32 seed by seed."""
  cells = [spread(arms["f32"])]
  for values in [*arms.values()][1:]:
    less = [a - b for a, b in zip(values, arms["f32"], strict=True)]
    cells.append(f"{spread(values)} ({spread(less, '+')})")
  return cells


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--seeds", type=int, default=5)
  parser.add_argument("--steps", type=int, default=300)
  parser.add_argument("--hidden", type=int, default=HIDDEN, help="units of a layer")
  parser.add_argument("--rate", type=float, default=0.003)
  running.add_quick(parser, "two steps of small nets, with few of the codecs")
  parser.add_argument("--data-dir", type=Path, default=data.FOLDER, help=data.HELP)
  parser.add_argument("--output", type=Path, help="folder of the two files")
  args = parser.parse_args()
  if args.quick:
    running.compile_fast()
    args.seeds, args.steps, args.hidden = 2, 2, 16
  images = data.load("digits", args.data_dir)
  train, test = halves(images)
  sets = train, test, images.classes
  start = time.perf_counter()
  found: dict[str, Any] = {
    "options": {
      "sizes": f"{train.x.shape[1]}-{args.hidden}-{args.hidden}-{images.classes}",
      "workers": WORKERS,
      "batch": BATCH,
      "steps": args.steps,
      "rate": args.rate,
      "seeds": args.seeds,
      "images": len(train.labels),
      "tested": len(test.labels),
    },
    "types": [],
  }
  for unit in UNITS[: 1 if args.quick else None]:
    for way in WAYS:
      taken = [*ARMS][: 2 if args.quick else None]
      arms = {name: Arm(way, ARMS[name]) for name in taken}
      accuracy = compare(arms, unit, sets, args)
      found["types"].append(
        {
          "unit": unit,
          "way": way,
          "accuracy_percent": accuracy,
          "anova": anova([*accuracy.values()]),
        }
      )
  found["coarse"] = compare_coarse(sets, args)
  found["errors"] = relative_errors(sets, args)
  found["seconds"] = round(time.perf_counter() - start)
  print(markdown(found))
  if args.output:
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / "model_parallel.json"
    file.write_text(json.dumps(found, indent=1) + "\n")
    file.with_suffix(".md").write_text(markdown(found))


if __name__ == "__main__":
  main()
