"""The tables of trainings whose scripts are gone, made of their records.

Differences to float32 are those seed by seed, with intervals of 95 %.
"""

import statistics

from scipy import stats

from benchmarks.pages.records import NAMES, TYPES, load, named
from benchmarks.study.analysis import spread

_TYPES = ("f32", *TYPES.values(), "p")


def trained(rows, metric, **columns):
  """A table of arms: means, what they are above float32's, and how rows are written."""
  full, unit = rows["f32"]["ends"], " %" if metric == "perplexity" else ""
  yield "", metric, "above f32", *(x.replace("_", " ") for x in columns)
  for name, row in rows.items():
    ends = row["ends"]
    more = [100 * (x / full[k] - 1) if unit else x - full[k] for k, x in ends.items()]
    above = "" if name == "f32" else f"{spread(more)}{unit}"
    cells = (text.format(row[column]) for column, text in columns.items())
    yield name, f"{statistics.fmean(ends.values()):.2f}", above, *cells


def codecs(name, number):
  arm = lambda x: x | {"ends": dict(enumerate(x["accuracy_percent"]))}
  rows = {x["codec"]: arm(x) for x in load(f"{name}.json")[number]["rows"]}
  return trained(rows, "accuracy", bytes_a_step="{:,}", ratio="{:.3f}")


for name, given in NAMES["trained"].items():
  named(name, **given)(codecs)


@named("sparse words", "redsync_study", "perplexity", "language-long")
@named("sparse digits", "redsync_study", "accuracy", "digits-long")
@named("sharded optimizers", "parallel_study", "perplexity", bits="{:.2f}")
def runs(file, metric, part="", **columns):
  """The same of runs by seeds."""
  rows, found = {}, load(f"{file}.json")
  for name, row in (found[part] if part else found)["rows"].items():
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


@named("sharded layers")
def sharded_layers():
  yield "units", "sent", *_TYPES
  sent = {"data": "gradients", "model": "activations and errors"}
  for x in load("model_parallel.json")["types"]:
    yield x["unit"], sent[x["way"]], *types(x["accuracy_percent"])


@named("sharded nets")
def sharded_nets():
  yield "net", *_TYPES
  for name, x in load("model_parallel_nets.json")["accuracy_percent"].items():
    yield name, *types(x)
