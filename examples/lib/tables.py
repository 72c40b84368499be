"""Follows the runs of a comparison, and reports them: a table, CSV files and curves."""

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from tqdm import tqdm

from examples.lib import methods, runs, training
from examples.lib.telemetry import Log

NOTE = """Workers: {}. Bytes: what each sends, read from the compiled step's HLO.
Ratio: to plain f32. Time: the median step, compilation excluded."""
CPU = """The workers share this machine's cores, and no bytes cross a link: the times
say nothing about one."""


class Point(NamedTuple):
  step: int
  bytes_sent: int  # by each worker, in all steps so far
  train_loss: float  # mean over the steps since the point before
  test_loss: float
  test_accuracy: float


class Run(runs.Run):
  """Follows a method from one seed: its curve, its times and its checkpoints.

  It counts steps on the standard error: a bar on a terminal, else at most ten lines.
  """

  def __init__(
    self, args: Namespace, codec: str, seed: int, sent: Any, log: Log, **own: Any
  ):
    self.codec, self.seed = codec, seed
    self.sent = sent  # bytes of a worker in a step, and those of a plain float32 mean
    log = log if seed == args.seed else Log()
    super().__init__(args, codec, log, f"{codec}-{seed}", **own)
    self._curve: Any = {"points": [], "losses": []}
    self._facts: dict[str, str] = {}
    self._seconds: list[float] = []
    shown, self._title = jax.process_index() == 0, f"{codec} seed {seed}"
    off = None if shown else True  # None is off where there is no terminal
    self._bar = tqdm(total=args.steps, desc=self._title, disable=off)
    self._lines = shown and self._bar.disable

  def __exit__(self, *_: Any) -> None:
    super().__exit__()
    self._bar.close()

  @property
  def points(self) -> list[Point]:
    return [Point(*point) for point in self._curve["points"]]

  @property
  def step_ms(self) -> float:
    """The median time of a step; NaN if all steps had been done before."""
    return 1000 * statistics.median(self._seconds or [float("nan")])

  def restore(self, state: Any, batches: Iterator[Any]) -> Any:
    """Returns the last state that was saved, or the one given."""
    state = super().restore(state, batches)
    self._bar.update(self._step)  # of an earlier run
    return state

  def take(self, step: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Takes a step, or one that inspects itself, and notes its time and its loss."""
    start = time.perf_counter()
    step = self.log.step if self.log.takes(self._step) else step
    out = jax.block_until_ready(step(*given, **options))
    self._seconds.append(time.perf_counter() - start)
    # The mean over the workers of this process, where each has a loss of its own.
    losses = [x.data for x in out[-1]["loss"].addressable_shards]
    self._curve["losses"].append(float(np.mean(losses, dtype=np.float64)))
    self.log.keep(self._step, out[-1].get("inspection"))
    return out

  @property
  def is_tested(self) -> bool:
    """Returns True if the curve has a point after this step."""
    every, steps = self._args.evaluate_every, self._args.steps
    return self._step % every == 0 or self._step == steps

  def add_point(self, test_loss: float, accuracy: float) -> float:
    """Adds a point, and returns the mean loss since the one before."""
    loss = statistics.fmean(self._curve["losses"])
    self._curve["losses"] = []
    point = Point(self._step, self._step * self.sent[0], loss, test_loss, accuracy)
    self._curve["points"].append(point)
    self._facts = {"loss": f"{loss:.4f}", "accuracy": f"{accuracy:.2%}"}
    return loss

  def test(self, task: training.Task, params: Any, state: Any) -> Any:
    """Adds a point, and returns a state that knows of it where a plateau counts."""
    tested = task.evaluate(methods.averaged(state, params))
    return methods.observe(state, self.add_point(*tested))

  def save(self, state: Any, loss: Any = None) -> None:
    """Ends a step, whose state is saved if it is time to."""
    super().save(state, loss)
    self._bar.set_postfix(self._facts, refresh=False)
    self._bar.update()
    steps = self._args.steps
    if self._lines and 10 * self._step // steps > 10 * (self._step - 1) // steps:
      known = "".join(f", {name} {value}" for name, value in self._facts.items())
      print(f"{self._title}: {self._step} of {steps}{known}", file=sys.stderr)


def show(
  found: list[Run], args: Namespace, title: str, workers: int, perplexity: bool
) -> None:
  """Prints the table and writes the files, in the first process."""
  if jax.process_index():
    return
  rows = [(x.codec, x.seed, *x.sent, x.step_ms, *x.points[-1]) for x in found]
  names = ("codec", "seed", "bytes_a_step", "f32_bytes_a_step", "step_ms")
  summary = pd.DataFrame(rows, columns=[*names, *Point._fields])
  points = [(x.codec, x.seed, *point) for x in found for point in x.points]
  curves = pd.DataFrame(points, columns=[*names[:2], *Point._fields])
  print(table(summary, perplexity=perplexity))
  print(NOTE.format(workers))
  if jax.default_backend() == "cpu":
    print(CPU)
  args.output.mkdir(parents=True, exist_ok=True)
  paths = [args.output / x for x in ("summary.csv", "curves.csv", "curves.png")]
  for frame, path in zip((summary, curves), paths, strict=False):
    frame.to_csv(path, index=False, na_rep="nan")
  figure(curves, title).savefig(paths[-1], dpi=150)
  print("wrote", *paths)


def table(summary: pd.DataFrame, *, perplexity: bool = False) -> str:
  """Formats a line for each codec: mean and standard deviation of its last points."""

  def spread(values: pd.Series, digits: int) -> str:
    mean = f"{values.mean():.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {values.std():.{digits}f}"

  lines = {}
  for codec, group in summary.groupby("codec", sort=False):
    sent, plain = group[["bytes_a_step", "f32_bytes_a_step"]].iloc[0]
    losses = np.exp(group.test_loss.clip(upper=50)) if perplexity else group.test_loss
    lines[codec] = {
      "test accuracy": spread(100 * group.test_accuracy, 2) + " %",
      "perplexity" if perplexity else "test loss": spread(losses, 4 - perplexity),
      "bytes/step": f"{sent:,}",
      "ratio": f"{sent / plain:.4f}" if plain else "-",  # a single worker sends none
      "ms/step": f"{group.step_ms.median():.1f}",
    }
  return pd.DataFrame(lines.values(), lines).rename_axis(columns="codec").to_string()


def figure(curves: pd.DataFrame, title: str) -> Figure:
  """Draws loss and accuracy against steps and bytes, with a band of the seeds."""
  seeds = curves.seed.nunique()
  if seeds > 1:
    title += f", mean of {seeds} seeds and band from the lowest to the highest"
  drawn = Figure(figsize=(10, 7), layout="constrained")
  drawn.suptitle(title)
  losses, accuracies = drawn.subplots(2, 2, sharex="col", sharey="row")
  for codec, group in curves.groupby("codec", sort=False):
    over = group.drop(columns="codec").groupby("step").agg(["mean", "min", "max"])
    for y, row in ((over.test_loss, losses), (100 * over.test_accuracy, accuracies)):
      for x, ax in zip((over.index, over.bytes_sent["mean"]), row, strict=True):
        (line,) = ax.plot(x, y["mean"], label=codec, linewidth=1.6)
        ax.fill_between(x, y["min"], y["max"], color=line.get_color(), alpha=0.15)
  losses[0].set(ylabel="test loss", yscale="log")
  accuracies[0].set(xlabel="steps", ylabel="test accuracy (%)")
  accuracies[1].set(xlabel="bytes sent by each worker", xscale="log")
  losses[1].legend(title="codec")
  for ax in (*losses, *accuracies):  # a scale that is set drops the grid
    ax.grid(alpha=0.3)
  return drawn
