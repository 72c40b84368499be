"""Compares RedSync with dense training of as many steps (Fang 2018, table 1).

  python benchmarks/redsync_study.py [--tasks digits language] [--seeds 3] [--quick]
    [--output FOLDER]

Trains the examples' LeNet on the embedded digits and their recurrent language model on
Python's standard library, with a rate that falls along a cosine, from the same
initialisations and with the same batches for every method. No method has steps or a
rate of its own, and a warm-up is part of the same steps. The language model's gradients
are clipped. The baseline clips the mean, and the other methods clip each worker's own
gradient before it is sent, at half that norm (rule="root").

  digits             Nesterov's momentum, and the rate of the example.
  language           No momentum, as the paper trains its LSTMs. The rate is the
                     baseline's best of 5, 10 and 20 at a clip of 1. At a rate of 20 and
                     a clip of 0.25 the baseline is better by a sixth, and RedSync is a
                     third worse than it: clipping each worker at half the norm of the
                     mean takes too much where it clips in most steps.
  language-momentum  Nesterov's momentum. The rate is the baseline's best of 0.5, 1, 2
                     and 4.
  digits-long        Three times the steps of digits, for elements that wait long.
  language-long      A model of a third of the size, so that 12000 steps are cheap, with
                     Nesterov's momentum and no clipping. The baseline is better
                     at the rate of 0.5 than at 1, where it is unstable.

The tasks without -long are short: at 0.1 % an element waits for about 1000 steps, so
much of the gradients is never applied. The paper trains until nothing more is learned.

The four workers are a vmap on one device, and a fifth of a run is one scan, so a run is
as fast as two cores allow. Each method compiles once for all seeds, and the study stops
if one compiles again. With --output, writes redsync_study.json there after every run,
and redsync_study.md at the end. It leaves out the runs that the file has already.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
import running
from emulated import POINTS, WORKERS, Method, Setting, Trainer
from tables import spread

import gradcomp
from gradcomp.codecs import RandomK, TopK

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import data  # noqa: E402
import text  # noqa: E402
from methods import output_layer  # noqa: E402
from networks import (
  GRU,  # noqa: E402
  LeNet,  # noqa: E402
)
from training import AXIS, Task  # noqa: E402


def digits(steps: int) -> Setting:
  images = data.load("digits")
  model = functools.partial(LeNet, images.train.images.shape[1:], images.classes)
  return Setting(
    title="LeNet on digits, batches of 32",
    metric="accuracy",
    task=Task(model, images.test, jax.make_mesh((1,), (AXIS,))),
    batches=functools.partial(data.batches, images.train, 32),
    steps=steps,
    learning_rate=0.05,
    momentum=0.9,
    max_norm=None,
  )


def language(
  steps: int,
  *,
  momentum: float | None,
  learning_rate: float,
  max_norm: float | None,
  **sizes: int,
) -> Setting:
  found = text.load()
  model = functools.partial(GRU, text.CHARACTERS, **sizes)
  return Setting(
    title="Recurrent language model, batches of 16 sequences of 32 characters",
    metric="perplexity",
    task=Task(model, text.in_order(found.test, 128), jax.make_mesh((1,), (AXIS,))),
    batches=functools.partial(text.batches, found.train, 16, 32),
    steps=steps,
    learning_rate=learning_rate,
    momentum=momentum,
    max_norm=max_norm,
  )


PLAIN = functools.partial(language, momentum=None, learning_rate=10.0, max_norm=1.0)
MOVING = functools.partial(language, momentum=0.9, learning_rate=2.0, max_norm=1.0)
LONG = functools.partial(
  language, momentum=0.9, learning_rate=0.5, max_norm=None, width=64, hidden=128
)
TASKS = {
  "digits": (digits, 200),
  "language": (PLAIN, 500),
  "language-momentum": (MOVING, 600),
  "digits-long": (digits, 600),
  "language-long": (LONG, 12000),
}


def redsync(setting: Setting, densities: Any, starts: Any, **options: Any) -> Any:
  """Makes RedSync with its warm-up.

  All leaves are below 4 MB, where ``selection="auto"`` sends the same.
  """

  def warmed(**options: Any) -> optax.GradientTransformation:
    choices = [
      gradcomp.redsync(
        density,
        setting.momentum,
        axis_name=AXIS,
        selection="exact",
        **(options if density < 1 else {}),
      )
      for density in densities
    ]
    return (
      gradcomp.wrappers.switch(starts[1:], choices) if len(choices) > 1 else choices[0]
    )

  if not options:
    return clipped(setting, warmed())
  parts = {"rest": warmed(**options), "output": warmed()}
  return clipped(setting, optax.partition(parts, output_layer))


def compressed(
  make: Callable[..., Any], setting: Setting, densities: Any, starts: Any, **options
) -> optax.GradientTransformation:
  """Makes the exchange of a codec with the feedback of the options."""
  (density,) = densities
  if options["feedback"] == "momentum" and setting.momentum is None:
    options = {"feedback": "error"}
  elif options["feedback"] == "momentum":
    options = {**options, "momentum": setting.momentum, "nesterov": True}
  exchange = gradcomp.compress(make(density=density), axis_name=AXIS, **options)
  return clipped(setting, exchange)


def clipped(setting: Setting, exchange: Any) -> optax.GradientTransformation:
  """Clips each worker's own gradient before an exchange, where the task clips."""
  if setting.max_norm is None:
    return exchange
  # The rule that the committed records have.
  clip = gradcomp.wrappers.clip_by_local_norm(
    setting.max_norm, axis_name=AXIS, rule="root"
  )
  return optax.chain(clip, exchange)


ASQ = functools.partial(redsync, quantize="asq")
MEAN = functools.partial(redsync, quantize="mean")
TOP = functools.partial(compressed, functools.partial(TopK, selection="exact"))
FALLING = (0.25, 0.0625, 0.015625, 0.004, 0.001)
BASELINE = "f32"
METHODS = {
  BASELINE: Method(lambda *_: gradcomp.dense(axis_name=AXIS), (1,), 0, True, True),
  "RedSync 1 %": Method(redsync, (0.01,)),
  "RedSync 1 %, ASQ": Method(ASQ, (0.01,)),
  "RedSync 1 %, mean": Method(MEAN, (0.01,)),
  "RedSync 1 %, dense first": Method(redsync, (1.0, 0.01), 10),
  "RedSync 1 %, dense first, ASQ": Method(ASQ, (1.0, 0.01), 10),
  "RedSync 0.1 %": Method(redsync, (0.001,)),
  "RedSync 0.1 %, falling": Method(redsync, FALLING, 5),
  "RedSync 0.1 %, dense first": Method(redsync, (1.0, 0.001), 10),
  "RedSync 0.1 %, dense first, ASQ": Method(ASQ, (1.0, 0.001), 10),
  "Top 1 %, momentum behind": Method(
    functools.partial(TOP, feedback="error"), (0.01,), 0, True
  ),
  "Random 1 %": Method(
    functools.partial(compressed, RandomK, feedback="momentum"), (0.01,)
  ),
  "Top 1 %, no residuals": Method(
    functools.partial(TOP, feedback=None), (0.01,), 0, True
  ),
  "Top 0.1 %, no residuals": Method(
    functools.partial(TOP, feedback=None), (0.001,), 0, True
  ),
}


QUICK_TASKS = ("digits",)  # what a quick run takes
QUICK_METHODS = (BASELINE, "RedSync 1 %, dense first")


def study(
  setting: Setting, methods: Sequence[str], seeds: int, table: Any, save: Any
) -> None:
  """Trains the runs that the table does not have yet, and saves after each."""
  trainers = {}
  for seed in range(seeds):
    for name in methods:
      if str(seed) in table["rows"].get(name, {}).get("runs", {}):
        continue
      if name not in trainers:
        trainers[name] = Trainer(setting, METHODS[name])
      start = time.perf_counter()
      run = trainers[name].train(seed)
      row = table["rows"].setdefault(name, {**trainers[name].bytes, "runs": {}})
      row["runs"][str(seed)] = run
      save()
      last = run["points"][-1][setting.metric]
      wall = time.perf_counter() - start
      print(
        f"{name}, seed {seed}: {setting.metric} {last:.2f}, {wall:.0f} s", flush=True
      )


def header(setting: Setting) -> dict[str, Any]:
  """Returns a table without rows."""
  params = jax.eval_shape(lambda: setting.task.init_params(0))
  return {
    "title": setting.title,
    "metric": setting.metric,
    "workers": WORKERS,
    "steps": setting.steps,
    "learning_rate": setting.learning_rate,
    "momentum": setting.momentum,
    "max_norm": setting.max_norm,
    "elements": sum(leaf.size for leaf in jax.tree.leaves(params)),
    "rows": {},
  }


def markdown(found: dict[str, Any]) -> str:
  """Writes all tables in Markdown."""
  parts = []
  for table in found.values():
    metric = table["metric"]
    header = f"method,{metric},relative to f32,within 1 %,seeds,bytes a step,mean"
    header = header.split(",")
    rows = table["rows"]
    dense = rows[BASELINE]
    lines = [header, ["---"] * len(header)]
    lines += [line(name, row, dense, metric) for name, row in rows.items()]
    clip = f", gradients clipped at {table['max_norm']}" if table["max_norm"] else ""
    moving = f"Nesterov's momentum {table['momentum']}"
    parts += [
      f"{table['title']}: {table['workers']} workers, {table['elements']:,} "
      f"parameters, {table['steps']} steps, rate {table['learning_rate']} along a "
      f"cosine, {moving if table['momentum'] else 'no momentum'}{clip}. Mean and "
      "standard deviation over the seeds, differences seed by seed.",
      "\n".join(f"| {' | '.join(cells)} |" for cells in lines),
    ]
  parts.append(
    "Relative: positive is worse. Bytes: what a worker sends in a step, at most, after "
    "the warm-up; mean: over all steps."
  )
  return "\n\n".join(parts) + "\n"


def line(name: str, row: Any, dense: Any, metric: str) -> list[str]:
  """Returns the cells of a line of the table."""
  ends = {
    seed: (run["points"][-1][metric], dense["runs"][seed]["points"][-1][metric])
    for seed, run in row["runs"].items()
    if seed in dense["runs"]
  }
  sign = -1 if metric == "accuracy" else 1
  worse = [100 * sign * (a - b) / b for a, b in ends.values()]
  baseline = row is dense
  return [
    name,
    spread([a for a, _ in ends.values()]) + (" %" if metric == "accuracy" else ""),
    "" if baseline else spread(worse, "+") + " %",
    "" if baseline else "yes" if statistics.fmean(worse) <= 1 else "no",
    str(len(ends)),
    f"{row['bytes_a_step']:,}",
    f"{round(row['mean_bytes_a_step']):,}",
  ]


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--tasks", nargs="+", choices=TASKS)
  parser.add_argument("--methods", nargs="+", choices=METHODS)
  parser.add_argument("--seeds", type=int, default=3)
  running.add_quick(parser, "two steps a point of two methods on digits")
  parser.add_argument("--output", type=Path, help="folder of the two files")
  args = parser.parse_args()
  tasks, methods = args.tasks or [*TASKS], args.methods or [*METHODS]
  if args.quick:
    tasks, methods = args.tasks or QUICK_TASKS, args.methods or QUICK_METHODS
    args.seeds = 1
  found: dict[str, Any] = {}
  file = args.output and args.output / "redsync_study.json"
  if file and file.exists():
    found = json.loads(file.read_text())

  def save() -> None:
    if file:
      running.write_json(file, found)

  for name in tasks:
    make, steps = TASKS[name]
    setting = make(2 * POINTS if args.quick else steps)
    print(setting.title, flush=True)
    table = found.setdefault(name, header(setting))
    study(setting, methods, args.seeds, table, save)
  print(markdown(found))
  if file:
    file.with_suffix(".md").write_text(markdown(found))


if __name__ == "__main__":
  main()
