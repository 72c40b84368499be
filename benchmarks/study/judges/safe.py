"""Makes the table of the codecs that are safe in each training of a study.

A codec is safe in a training that ends as float32's: by the whole interval of 95 % over
seeds, with at most ``EQUAL`` points less accuracy of images, or at most ``PERCENT``
more perplexity of a text. It loses where the whole interval is beyond that, and else
the seeds cannot tell.
"""

from benchmarks.study.analysis import Group, Study
from benchmarks.study.judges.rules import EQUAL, rule
from benchmarks.study.tasks import TEXTS

PERCENT = 1.0  # of perplexity
CODECS = {
  "QSGD, 8 bits": "qsgd-8",
  "QSGD, 4 bits": "qsgd-4",
  "QSGD, 2 bits, fitted": "qsgd-2-fitted",
  "QSGD, 2 bits": "qsgd-2",
  "QSGD, 2 bits, the paper's": "qsgd-2-paper",
  "TernGrad": "terngrad",
  "1-bit SGD": "onebit-64",
  "8 bits, dynamic tree": "dynamic-tree",
  "APS (5, 2)": "aps-5-2",
  "APS (4, 3)": "aps-4-3",
  "RedSync, 1 %": "redsync-1",
  "RedSync, 0.1 %": "redsync-0.1",
  "PowerSGD, rank 2": "powersgd-2",
}
_ON_IMAGES = "on fashion-mnist/14, N = 8, batch 128"
_ON_TEXT = "on brown, N = 8, batch 32, 0.111 epochs"
TRAININGS = {
  "MLP, 2 epochs": f"mlp {_ON_IMAGES}, 2 epochs",
  "LeNet, 2": f"lenet {_ON_IMAGES}, 2 epochs",
  "6": f"lenet {_ON_IMAGES}, 5.99 epochs",
  "20": f"lenet {_ON_IMAGES}, 20 epochs",
  "by Adam, 2": f"lenet {_ON_IMAGES}, 2 epochs, adam",
  "ResNet, 0.5": f"resnet {_ON_IMAGES}, 0.499 epochs",
  "LSTM, 600 steps": f"lstm {_ON_TEXT}",
  "transformer, 600": f"transformer {_ON_TEXT}",
}


def cell(group: Group, codec: str) -> str:
  """Says how a codec ends in a training: nothing where no two seeds have it."""
  if group.setting.network in TEXTS:
    found, unit = group.perplexity(codec), " %"
    safe = found and rule({"at_most": PERCENT})(found)
  else:
    found, unit = group.difference(codec), ""
    safe = found and rule({"at_least": -EQUAL})(found)
  if safe:
    return "safe"
  return f"{'open: ' if safe is None else ''}{found}{unit}" if found else ""


def table(study: Study) -> tuple[list[str], list[list[str]]]:
  """Returns the table of a study: the header, and a row for each codec."""
  groups = {group.name: group for group in study.groups}
  columns = {x: groups[name] for x, name in TRAININGS.items() if name in groups}
  rows = [
    [name, *(cell(group, codec) for group in columns.values())]
    for name, codec in CODECS.items()
  ]
  return ["", *columns], rows
