"""The tables of the pages that committed records make.

One stands behind each ``<!-- records: NAME -->`` of docs/ when the site is built. In
the tree a mark has its table where that is a page's headline, and ``python -m
benchmarks.pages.records`` writes those anew. Those of the study are in study.py.
"""

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


def named(name, /, *given, **options):
  """Has a name stand for the table whose header and lines are yielded."""

  def of(lined):
    def made():
      header, *lines = lined(*given, **options)
      return table(header, lines)

    TABLES[name] = made
    return lined

  return of


TABLES = {}


def pick(name, number=0, columns="", keep="", **where):
  """A table of a Markdown record, whole or with some of its columns and rows."""
  found = rows(name, number)
  for column, cells in where.items():
    found = [row for row in found if row[column] in cells]
  columns = same(PARTS[columns] if columns else list(found[0]))
  yield columns
  if keep:
    first = next(iter(columns.values()))
    by_name = {row[first]: row for row in found}
    found = [{**by_name[old], first: new} for new, old in same(PARTS[keep]).items()]
  yield from ([row[old] for old in columns.values()] for row in found)


for name, given in NAMES["picked"].items():
  named(name, **given)(pick)


def same(names):
  """The names of the page and of the record, which may be the same."""
  return names if isinstance(names, dict) else {name: name for name in names}


def milliseconds(cell):
  """The two numbers of a cell like ``1,080 (0.8)``, or of an empty one."""
  return cell.replace(",", "").rstrip(")").split(" (") if cell else ["", ""]


@named("links", NAMES["links"])
@named("peers", NAMES["peers"], "peers/link_speed.md")
@named("optimizers on links", NAMES["optimizers"])
def links(names, file="link_speed.md"):
  yield "", "2 hosts: MB sent", "ms", "x f32", "4 hosts: MB sent", "ms", "x f32"
  by_hosts = [{row[""]: row for row in rows(file, number)} for number in (0, 1)]
  for label, name in names.items():
    found = [of.get(name, {"MB": "", "1gbit": ""}) for of in by_hosts]
    cells = [[row["MB"], *milliseconds(row["1gbit"])] for row in found]
    yield label, *cells[0], *cells[1]


@named("rates")
def rates():
  columns = "plain f32", "`two_shot`", "x f32", "PyTorch f32", "its fp16 hook"
  yield "hosts", "link", "raw TCP, Mbit/s", *columns
  line = r"^\* (\w+): raw TCP carries ([\d,]+)"
  tcp = re.findall(line, record("link_speed.md"), re.M)
  names = "plain f32 mean", "qsgd-4 two_shot", "ddp f32", "ddp fp16"
  for number, hosts, carried in ((1, "4", tcp[5:10]), (0, "2", tcp[:5])):
    found = {row[""]: row for row in rows("link_speed.md", number)}
    for rate, label in NAMES["rates"].items():
      if rate in found["plain f32 mean"]:
        plain, ours, theirs, half = (milliseconds(found[x][rate]) for x in names)
        yield hosts, label, dict(carried)[rate], plain[0], *ours, theirs[0], half[0]


@named("activations")
def activations():
  yield "activations", "JAX, f32", *TYPES
  line = r"^\| gather \| (\S+ \S+) \| (\w+) \| (\S+) \|.*\| (\S+) \| \S+ \|$"
  every = re.findall(line, record("parallel_links.md"), re.M)
  found = {(size, sent): (ms, gain) for size, sent, ms, gain in every}
  for size in dict.fromkeys(size for size, _ in found):
    ours = ("{} ({})".format(*found[size, x]) for x in TYPES.values())
    yield size, found[size, "lax"][0], *ours


def seconds(file, name):
  return load(file)[f"{name}, {2**24}"]["seconds"]


def copies(found, *parts):
  """Times as multiples of the copy beside them."""
  return [f"{found[x] / found['copy']:.1f}" for x in parts]


@named("one codec")
def one_codec():
  header = "QSGD, 4 bits", "pages kept: ns an element", "x copy"
  yield *header, "as users start: ns an element", "x copy"
  for label, (name, part) in NAMES["steps"].items():
    cells = [label]
    for file in ("codec_speed_jax0.10.2_malloc.json", "codec_speed_jax0.10.2.json"):
      found = seconds(file, name)
      cells += [f"{1e9 * found[part] / 2**24:.2f}", *copies(found, part)]
    yield cells


@named("every codec")
def every_codec():
  yield "", "encode", "decode", "decode and add", "keep"
  for label, name in NAMES["codecs"].items():
    found = seconds("codec_speed_jax0.10.2_malloc.json", name)
    found["keep"] = found["update and residual"] - found["update"]
    yield label, *copies(found, "encode", "decode", "decode and sum, a worker", "keep")


@named("gpu kernels")
def gpu_kernels():
  """Encoders of 268 million elements on a GPU, as shares of a copy's speed."""
  yield "encoder", "kernel, us", "kernel", "XLA's code"
  found = {
    (row["case"], row["implementation"]): row
    for row in load("gpu_kernels.json")["rows"]
    if row["elements"] == 1 << 28
  }
  for name in [case for case, by in found if by == "pallas"]:
    kernel, xla = (found[name, by] for by in ("pallas", "xla"))
    shares = (f"{100 * x['share_of_copy']:.0f} %" for x in (kernel, xla))
    yield name, f"{1e6 * kernel['seconds']:,.0f}", *shares


@named("gpu codecs")
def gpu_codecs():
  """What codecs take on an H100, in picoseconds an element."""
  parts = "encode", "decode", "add", "keep"
  yield "", *parts
  for name, speed in packaged_speeds("H100").items():
    yield name, *(f"{1e12 * getattr(speed, part):.1f}" for part in parts)


@named("pcie")
def pcie():
  """Predicted milliseconds of exchanges between GPUs of one host, by their bus."""
  params = jax.ShapeDtypeStruct((1 << 14, 1 << 14), "float32")  # as many as were timed
  few = cost.PlanOptions.candidates[:3]
  options = cost.PlanOptions(speeds="H100", candidates=few)
  names = ["float32", *(x.name for x in few)]
  yield "GB/s of a GPU", "GPUs", *names, "`plan` takes"
  for (label, rate), workers in itertools.product(NAMES["buses"].items(), (2, 8)):
    link = cost.Link(latency=1e-5, bytes_per_second=1e9 * rate)
    given = {"workers": workers, "link": link, "budget": "tight", "options": options}
    found = cost.plan(params, **given)
    slowest = sorted(found.rows, key=lambda row: -row.step_seconds)
    best = {row.candidate.name: 1e3 * row.step_seconds for row in slowest}
    times = (f"{best[name]:.1f}" for name in names)
    yield label, str(workers), *times, found.chosen.name


@named("matrices")
def matrices():
  yield "QSGD, 4 bits", "flat leaf: x copy", "8 matrices", "x flat"
  found = load("matrices_speed_jax0.10.2_malloc.json")["matrices"]["seconds"]
  for step in ("encode", "decode", "exchange"):
    both = [f"{step}, {x}" for x in ("flat", "matrices")]
    yield step, *copies(found, *both), f"{found[both[1]] / found[both[0]]:.2f}"


@named("selection")
def selection():
  top = "x faster than `top_k`"
  yield "selection", "0.1 %: x copy", top, "1 %: x copy", top
  record = load("selection_speed_jax0.10.2_malloc.json")
  found = [record[f"normal, {2**24}, {x}"]["seconds"] for x in (0.001, 0.01)]
  for label, name in NAMES["selections"].items():
    gains = [[*copies(x, name), f"{x['lax.top_k'] / x[name]:.0f}"] for x in found]
    yield label, *gains[0], *gains[1]


@named("sparse parts")
def sparse_parts():
  """Gives the parts of RedSync's codec, as multiples of a copy."""
  parts = "select", "pack", "encode", "unpack"
  yield "what it sends, elements", *parts
  _, *rows = load("sparse_speed_jax0.10.2_malloc.json").items()
  yield from ([title, *copies(row["seconds"], *parts)] for title, row in rows)


@named("rounding")
def rounding():
  found = load("approximation_error.json")["as_paper"]
  yield "", *(x for name in found for x in (name, "paper"))
  for label, name in TYPES.items():
    cells = [label]
    for of in (errors[name] for errors in found.values()):
      cells += [f"{of['relative_percent']:.2f}", f"{of['paper_relative_percent']}"]
    yield cells


@named("sums")
def sums():
  groups = "4", "8", "16", "32", "64", "128", "256"
  yield "", "error", *groups[:-1], "a ring of 256"
  found = load("roundoff.json")
  paper = (f"{found['paper'][x]:.0f}" if x in found["paper"] else "" for x in groups)
  yield "ResNet-50's first convolution, (5, 2), in the paper", "mean", *paper
  for what, way, fmt, length in PARTS["sums"]:
    errors = found["formats"][fmt]["first convolution"]
    yield what, length, *(f"{errors[f'{way} {x}'][length]:.0f}" for x in groups)


@named("noise")
def noise():
  yield "gradients", "codec", "N = 2", "3", "4", "8", "16"
  for kind, of in load("noise.json")["ratios"].items():
    for codec, ours in of["gradcomp"].items():
      pairs = zip(ours, of["Suresh"][codec], strict=True)
      yield kind.removeprefix("are "), codec, *(f"{a:.2f} / {b:.2f}" for a, b in pairs)


@named("distortion")
@named("distortion, short", PARTS["distortion"])
def distortion(keep=None):
  """Errors of one message and of the mean of 16, by the bits of a message."""
  found = load("distortion.json")["rows"]
  yield "code", "bits", "biased", "lost", *found[0]["errors"]
  for row in sorted(found, key=lambda x: x["bits"]):
    if keep and row["code"] not in keep:
      continue
    errors = (f"{x[0]:.2g} / {x[-1]:.2g}" for x in row["errors"].values())
    kind = "no" if row["unbiased"] else "yes"
    lost = row["bits"] + math.log2(row["errors"]["Gaussian"][0]) / 2
    yield row["code"], f"{row['bits']:.2f}", kind, f"{lost:.2f}", *errors


@named("local loss")
def local_loss():
  """The losses of methods as differences to DiLoCo's, by the steps of a round."""
  yield "method", "H = 15", "H = 30", "H = 100", "fewer bytes, H = 30"
  by_steps = [{x["method"]: x for x in rows("local_study.md", i)} for i in range(3)]
  for label, name in NAMES["local"].items():
    found = [measured.get(name) for measured in by_steps]
    key = "loss" if name == "DiLoCo" else "more"
    star = ["*" if x and x["seeds"] == "1" else "" for x in found]
    shown = zip(found, star, strict=True)
    cells = (x[key].split(" ±")[0] + y if x else "" for x, y in shown)
    yield label, *cells, found[1]["fewer"] if found[1] else ""


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
