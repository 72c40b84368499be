"""The tables of trainings whose scripts are gone, made of their records.

Differences to float32 are those seed by seed, with intervals of 95 %.
"""

import functools
import statistics

from scipy import stats

from benchmarks.common.tables import table
from benchmarks.pages.records import NAMES, TYPES, load
from benchmarks.study.analysis import spread


def trained(rows, metric, **columns):
  """A table of arms: means, what they are above float32's, and how rows are written."""
  lines, full = [], rows["f32"]["ends"]
  unit = " %" if metric == "perplexity" else ""
  for name, row in rows.items():
    ends = row["ends"]
    more = [100 * (x / full[k] - 1) if unit else x - full[k] for k, x in ends.items()]
    above = "" if name == "f32" else f"{spread(more)}{unit}"
    cells = [text.format(row[column]) for column, text in columns.items()]
    lines.append([name, f"{statistics.fmean(ends.values()):.2f}", above, *cells])
  names = [x.replace("_", " ") for x in columns]
  return table(["", metric, "above f32", *names], lines)


def codecs(name, number):
  arm = lambda x: x | {"ends": dict(enumerate(x["accuracy_percent"]))}
  rows = {x["codec"]: arm(x) for x in load(f"{name}.json")[number]["rows"]}
  return trained(rows, "accuracy", bytes_a_step="{:,}", ratio="{:.3f}")


def runs(found, metric, **columns):
  """The same of runs by seeds."""
  rows = {}
  for name, row in found["rows"].items():
    ends = {seed: x["points"][-1][metric] for seed, x in row["runs"].items()}
    rows[name] = row | {"ends": ends, "seeds": len(ends)}
  return trained(rows, metric, seeds="{}", **columns, bytes_a_step="{:,}")


def types(arms):
  """The means of types of 8 bits, with what they are above float32's in brackets."""
  cells = [f"{statistics.fmean(arms['f32']):.2f}"]
  for name in TYPES.values():
    more = spread([a - b for a, b in zip(arms[name], arms["f32"], strict=True)])
    cells.append(f"{statistics.fmean(arms[name]):.2f} ({more})")
  return [*cells, f"{stats.friedmanchisquare(*arms.values()).pvalue:.3f}"]


def sharded_layers():
  sent = {"data": "gradients", "model": "activations and errors"}
  found = load("model_parallel.json")["types"]
  lines = [[x["unit"], sent[x["way"]], *types(x["accuracy_percent"])] for x in found]
  return table(["units", "sent", *_TYPES], lines)


def sharded_nets():
  found = load("model_parallel_nets.json")["accuracy_percent"]
  return table(["net", *_TYPES], [[name, *types(x)] for name, x in found.items()])


redsync = lambda name, metric: runs(load("redsync_study.json")[name], metric)
_TYPES = ("f32", *TYPES.values(), "p")
TABLES = {
  **{x: functools.partial(codecs, **given) for x, given in NAMES["trained"].items()},
  "sparse words": lambda: redsync("language-long", "perplexity"),
  "sparse digits": lambda: redsync("digits-long", "accuracy"),
  "sharded layers": sharded_layers,
  "sharded nets": sharded_nets,
  "sharded optimizers": lambda: runs(
    load("parallel_study.json"), "perplexity", bits="{:.2f}"
  ),
}
