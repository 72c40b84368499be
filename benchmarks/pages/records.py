"""The tables of the pages that committed records make.

One stands behind each ``<!-- records: NAME -->`` of docs/ when the site is built. In
the tree a mark has its table where that is a page's headline, and ``python -m
benchmarks.pages.records`` writes those anew. Those of the study are in study.py.
"""

import functools
import itertools
import json
import math
import re
import tomllib
from pathlib import Path

import jax

from benchmarks.common.tables import table
from gradcomp import cost
from gradcomp._src.cost.planner.candidates import packaged_speeds

FOLDER = Path(__file__).parents[2] / "docs"
RECORDS = FOLDER.parent / "benchmarks" / "results"
NAMES = tomllib.loads(Path(__file__).with_name("records.toml").read_text())
PARTS, TYPES = NAMES["parts"], NAMES["types"]
MARK = re.compile(r"^<!-- records: (.*) -->\n(\n(?:\|.*\n)+)?", re.M)


def record(name):
  """The text of a record, wherever it lies in the folder; of two, the less deep."""
  return min(RECORDS.rglob(name), key=lambda path: len(path.parts)).read_text()


def load(name):
  return json.loads(record(name))


def rows(name, number=0):
  """The rows of a table of a Markdown record, as dicts by column."""
  (lines, *_) = re.findall(r"(?:^\|.*\n)+", record(name), re.M)[number:]
  cut = lambda line: [cell.strip() for cell in line[1:-1].split("|")]
  header, _, *cells = map(cut, lines.splitlines())
  return [dict(zip(header, row, strict=True)) for row in cells]


def pick(name, number=0, columns="", keep="", **where):
  """A table of a Markdown record, whole or with some of its columns and rows."""
  found = rows(name, number)
  for column, cells in where.items():
    found = [row for row in found if row[column] in cells]
  columns = same(PARTS[columns] if columns else list(found[0]))
  if keep:
    first = next(iter(columns.values()))
    by_name = {row[first]: row for row in found}
    found = [{**by_name[old], first: new} for new, old in same(PARTS[keep]).items()]
  return table(columns, [[row[old] for old in columns.values()] for row in found])


def same(names):
  """The names of the page and of the record, which may be the same."""
  return names if isinstance(names, dict) else {name: name for name in names}


def milliseconds(cell):
  """The two numbers of a cell like ``1,080 (0.8)``, or of an empty one."""
  return cell.replace(",", "").rstrip(")").split(" (") if cell else ["", ""]


def links(names, file="link_speed.md"):
  by_hosts = [{row[""]: row for row in rows(file, number)} for number in (0, 1)]
  empty = {"MB": "", "1gbit": ""}
  lines = []
  for label, name in names.items():
    found = [measured.get(name, empty) for measured in by_hosts]
    cells = [[row["MB"], *milliseconds(row["1gbit"])] for row in found]
    lines.append([label, *cells[0], *cells[1]])
  header = ["", "2 hosts: MB sent", "ms", "x f32", "4 hosts: MB sent", "ms", "x f32"]
  return table(header, lines)


def rates():
  lines, line = [], r"^\* (\w+): raw TCP carries ([\d,]+)"
  tcp = re.findall(line, record("link_speed.md"), re.M)
  tcp = [dict(tcp[:5]), dict(tcp[5:10])]
  names = "plain f32 mean", "qsgd-4 two_shot", "ddp f32", "ddp fp16"
  for number, hosts in ((1, "4"), (0, "2")):
    found = {row[""]: row for row in rows("link_speed.md", number)}
    for rate, label in NAMES["rates"].items():
      if rate in found["plain f32 mean"]:
        plain, ours, theirs, half = (milliseconds(found[x][rate]) for x in names)
        times = [plain[0], *ours, theirs[0], half[0]]
        lines.append([hosts, label, tcp[number][rate], *times])
  columns = ["plain f32", "`two_shot`", "x f32", "PyTorch f32", "its fp16 hook"]
  return table(["hosts", "link", "raw TCP, Mbit/s", *columns], lines)


def activations():
  line = r"^\| gather \| (\S+ \S+) \| (\w+) \| (\S+) \|.*\| (\S+) \| \S+ \|$"
  every = re.findall(line, record("parallel_links.md"), re.M)
  found = {(size, sent): (ms, gain) for size, sent, ms, gain in every}
  lines = []
  for size in dict.fromkeys(size for size, _ in found):
    ours = ["{} ({})".format(*found[size, x]) for x in TYPES.values()]
    lines.append([size, found[size, "lax"][0], *ours])
  return table(["activations", "JAX, f32", *TYPES], lines)


def seconds(file, name):
  return load(file)[f"{name}, {2**24}"]["seconds"]


def copies(found, *parts):
  """Times as multiples of the copy beside them."""
  return [f"{found[x] / found['copy']:.1f}" for x in parts]


def one_codec():
  kept, started = "codec_speed_jax0.10.2_malloc.json", "codec_speed_jax0.10.2.json"
  lines = []
  for label, (name, part) in NAMES["steps"].items():
    cells = [label]
    for file in (kept, started):
      found = seconds(file, name)
      cells += [f"{1e9 * found[part] / 2**24:.2f}", *copies(found, part)]
    lines.append(cells)
  header = ["QSGD, 4 bits", "pages kept: ns an element", "x copy"]
  return table([*header, "as users start: ns an element", "x copy"], lines)


def every_codec():
  lines = []
  for label, name in NAMES["codecs"].items():
    found = seconds("codec_speed_jax0.10.2_malloc.json", name)
    found["keep"] = found["update and residual"] - found["update"]
    parts = "encode", "decode", "decode and sum, a worker", "keep"
    lines.append([label, *copies(found, *parts)])
  return table(["", "encode", "decode", "decode and add", "keep"], lines)


def gpu_kernels():
  """Encoders of 268 million elements on a GPU, as shares of a copy's speed."""
  found = {
    (row["case"], row["implementation"]): row
    for row in load("gpu_kernels.json")["rows"]
    if row["elements"] == 1 << 28
  }
  lines = []
  for name in [case for case, by in found if by == "pallas"]:
    kernel, xla = (found[name, by] for by in ("pallas", "xla"))
    shares = [f"{100 * x['share_of_copy']:.0f} %" for x in (kernel, xla)]
    lines.append([name, f"{1e6 * kernel['seconds']:,.0f}", *shares])
  return table(["encoder", "kernel, us", "kernel", "XLA's code"], lines)


def gpu_codecs():
  """What codecs take on an H100, in picoseconds an element."""
  speeds = packaged_speeds("H100")
  parts = ("encode", "decode", "add", "keep")
  lines = [
    [name, *(f"{1e12 * getattr(speed, part):.1f}" for part in parts)]
    for name, speed in speeds.items()
  ]
  return table(["", *parts], lines)


def pcie():
  """Predicted milliseconds of exchanges between GPUs of one host, by their bus."""
  params = jax.ShapeDtypeStruct((1 << 14, 1 << 14), "float32")  # as many as were timed
  few = cost.PlanOptions.candidates[:3]
  options = cost.PlanOptions(speeds="H100", candidates=few)
  lines = []
  for (label, rate), workers in itertools.product(NAMES["buses"].items(), (2, 8)):
    link = cost.Link(latency=1e-5, bytes_per_second=1e9 * rate)
    given = {"workers": workers, "link": link, "budget": "tight", "options": options}
    found = cost.plan(params, **given)
    slowest = sorted(found.rows, key=lambda row: -row.step_seconds)
    best = {row.candidate.name: 1e3 * row.step_seconds for row in slowest}
    times = [f"{best[name]:.1f}" for name in ("float32", *(x.name for x in few))]
    lines.append([label, str(workers), *times, found.chosen.name])
  header = ["GB/s of a GPU", "GPUs", "float32", *(x.name for x in few), "`plan` takes"]
  return table(header, lines)


def matrices():
  found = load("matrices_speed_jax0.10.2_malloc.json")["matrices"]["seconds"]
  lines = []
  for step in ("encode", "decode", "exchange"):
    both = [f"{step}, {x}" for x in ("flat", "matrices")]
    ratio = found[both[1]] / found[both[0]]
    lines.append([step, *copies(found, *both), f"{ratio:.2f}"])
  return table(["QSGD, 4 bits", "flat leaf: x copy", "8 matrices", "x flat"], lines)


def selection():
  file = "selection_speed_jax0.10.2_malloc.json"
  found = [load(file)[f"normal, {2**24}, {x}"]["seconds"] for x in (0.001, 0.01)]
  lines = []
  for label, name in NAMES["selections"].items():
    gains = [[*copies(x, name), f"{x['lax.top_k'] / x[name]:.0f}"] for x in found]
    lines.append([label, *gains[0], *gains[1]])
  header = ["selection", "0.1 %: x copy", "x faster than `top_k`"]
  return table([*header, "1 %: x copy", "x faster than `top_k`"], lines)


def sparse_parts():
  """Gives the parts of RedSync's codec, as multiples of a copy."""
  _, *rows = load("sparse_speed_jax0.10.2_malloc.json").items()
  parts = "select", "pack", "encode", "unpack"
  lines = [[title, *copies(row["seconds"], *parts)] for title, row in rows]
  return table(["what it sends, elements", *parts], lines)


def rounding():
  found = load("approximation_error.json")["as_paper"]
  lines = []
  for label, name in TYPES.items():
    cells = [label]
    for of in (errors[name] for errors in found.values()):
      cells += [f"{of['relative_percent']:.2f}", f"{of['paper_relative_percent']}"]
    lines.append(cells)
  return table(["", *(x for name in found for x in (name, "paper"))], lines)


def sums():
  found = load("roundoff.json")
  groups = ("4", "8", "16", "32", "64", "128", "256")
  paper = (f"{found['paper'][x]:.0f}" if x in found["paper"] else "" for x in groups)
  lines = [["ResNet-50's first convolution, (5, 2), in the paper", "mean", *paper]]
  for what, way, fmt, length in PARTS["sums"]:
    errors = found["formats"][fmt]["first convolution"]
    numbers = (f"{errors[f'{way} {x}'][length]:.0f}" for x in groups)
    lines.append([what, length, *numbers])
  return table(["", "error", *groups[:-1], "a ring of 256"], lines)


def noise():
  found = load("noise.json")["ratios"]
  lines = [
    [kind.removeprefix("are "), codec]
    + [f"{a:.2f} / {b:.2f}" for a, b in zip(ours, of["Suresh"][codec], strict=True)]
    for kind, of in found.items()
    for codec, ours in of["gradcomp"].items()
  ]
  return table(["gradients", "codec", "N = 2", "3", "4", "8", "16"], lines)


def distortion(keep=None):
  """Errors of one message and of the mean of 16, by the bits of a message."""
  found = load("distortion.json")["rows"]
  lines = []
  for row in sorted(found, key=lambda x: x["bits"]):
    if keep and row["code"] not in keep:
      continue
    errors = [f"{x[0]:.2g} / {x[-1]:.2g}" for x in row["errors"].values()]
    kind = "no" if row["unbiased"] else "yes"
    lost = row["bits"] + math.log2(row["errors"]["Gaussian"][0]) / 2
    lines.append([row["code"], f"{row['bits']:.2f}", kind, f"{lost:.2f}", *errors])
  return table(["code", "bits", "biased", "lost", *found[0]["errors"]], lines)


def local_loss():
  """The losses of methods as differences to DiLoCo's, by the steps of a round."""
  by_steps = [{x["method"]: x for x in rows("local_study.md", i)} for i in range(3)]
  lines = []
  for label, name in NAMES["local"].items():
    found = [measured.get(name) for measured in by_steps]
    key = "loss" if name == "DiLoCo" else "more"
    star = ["*" if x and x["seeds"] == "1" else "" for x in found]
    shown = zip(found, star, strict=True)
    cells = [x[key].split(" ±")[0] + y if x else "" for x, y in shown]
    lines.append([label, *cells, found[1]["fewer"] if found[1] else ""])
  return table(["method", "H = 15", "H = 30", "H = 100", "fewer bytes, H = 30"], lines)


TABLES = {
  **{name: functools.partial(pick, **given) for name, given in NAMES["picked"].items()},
  "links": lambda: links(NAMES["links"]),
  "peers": lambda: links(NAMES["peers"], "peers/link_speed.md"),
  "optimizers on links": lambda: links(NAMES["optimizers"]),
  "rates": rates,
  "activations": activations,
  "one codec": one_codec,
  "every codec": every_codec,
  "gpu kernels": gpu_kernels,
  "gpu codecs": gpu_codecs,
  "pcie": pcie,
  "matrices": matrices,
  "selection": selection,
  "sparse parts": sparse_parts,
  "rounding": rounding,
  "sums": sums,
  "noise": noise,
  "distortion": distortion,
  "distortion, short": lambda: distortion(PARTS["distortion"]),
  "local loss": local_loss,
}


def filled(page, tables, every=True):
  """Returns a page with the table of its name behind each mark, or that has one."""

  def put(found):
    if not every and not found[2]:
      return found[0]
    return f"<!-- records: {found[1]} -->\n\n{tables[found[1]]()}\n"

  return MARK.sub(put, page)


def written(page):
  """Returns a page as it is in the tree."""
  return filled(page, TABLES, every=False)


def main():
  for page in sorted(FOLDER.rglob("*.md")):
    page.write_text(written(page.read_text()))


if __name__ == "__main__":
  main()
