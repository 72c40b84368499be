"""The tables of the pages that committed records make.

One stands behind each ``<!-- records: NAME -->`` of docs/ when the site is built. In
the tree a mark has its table where that is a page's headline, and ``python -m
benchmarks.pages.records`` writes those anew. Those of the study are in study.py.
"""

import json
import math
import re
from pathlib import Path

from benchmarks.common.tables import table
from gradcomp._src.cost.planner.candidates import packaged_speeds

FOLDER = Path(__file__).parents[2] / "docs"
RECORDS = FOLDER.parent / "benchmarks" / "results"
MARK = re.compile(r"^<!-- records: (.*) -->\n(\n(?:\|.*\n)+)?", re.M)


def record(name):
  """The text of a record, wherever it lies in the folder; of two, the less deep."""
  return min(RECORDS.rglob(name), key=lambda path: len(path.parts)).read_text()


def load(name):
  return json.loads(record(name))


def rows(name, number=0):
  """The rows of a table of a Markdown record, as dicts by column."""
  (lines, *_) = re.findall(r"(?:^\|.*\n)+", record(name), re.M)[number:]
  header, _, *cells = [
    [cell.strip() for cell in line[1:-1].split("|")] for line in lines.splitlines()
  ]
  return [dict(zip(header, row, strict=True)) for row in cells]


def pick(name, number=0, columns=None, keep=None):
  """A table of a Markdown record.

  Args:
    name: of its file.
    number: which of the file's tables it is.
    columns: those to keep, by their names here; None keeps all.
    keep: the rows to keep, by the names that their first cells have here; None: all.
  """
  found = rows(name, number)
  columns = columns or {column: column for column in found[0]}
  first = next(iter(columns.values()))
  if keep is not None:
    by_name = {row[first]: row for row in found}
    found = [{**by_name[old], first: new} for new, old in keep.items()]
  return table(columns, [[row[old] for old in columns.values()] for row in found])


def same(*names):
  return {name: name for name in names}


def overlaps(*targets):
  found = [row for row in rows("overlap.md") if row["target"] in targets]
  return table(found[0], [row.values() for row in found])


LINKS = {
  "plain f32 mean": "plain f32 mean",
  "`gradcomp.dense()`, `psum`": "f32 psum",
  "bfloat16, `two_shot`": "bf16 two_shot",
  "float16, `ring`": "f16 ring",
  **{
    f"QSGD, {bits} bits, `{exchange}`": f"qsgd-{bits} {exchange}"
    for bits in (8, 4, 2)
    for exchange in ("all_gather", "two_shot", "ring", "hierarchical")
  },
  "QSGD, 2 bits, fitted levels, `two_shot`": "qsgd-2 fitted two_shot",
  "QSGD, 4 bits, shared scales, `two_shot`": "qsgd-4 shared two_shot",
  "QSGD, 4 bits, shared scales, `psum`": "qsgd-4 shared psum",
  "natural, `ring`": "natural ring",
  "1-bit SGD, buckets of 64, with its residual, `two_shot`": "onebit-64 two_shot",
  "1-bit SGD, buckets of 512, with its residual, `two_shot`": "onebit-512 two_shot",
  "TernGrad, `two_shot`": "terngrad two_shot",
  "TernGrad, `psum`": "terngrad psum",
  "8 bits, dynamic tree, `ring`": "dynamic-tree ring",
  "APS (5, 2), `two_shot`": "aps-8 two_shot",
  "APS (5, 2), `ring`": "aps-8 ring",
  "RedSync, 1 %": "redsync-1% all_gather",
  "RedSync, 1 %, selected by sorting": "redsync-1% sorted all_gather",
  "RedSync, 0.1 %": "redsync-0.1% all_gather",
  "RedSync, 0.1 %, ASQ": "redsync-0.1% asq all_gather",
  "RedSync, 0.1 %, selected by sorting": "redsync-0.1% sorted all_gather",
  "PowerSGD, rank 1": "powersgd-1 psum",
  "PowerSGD, rank 4": "powersgd-4 psum",
  "PyTorch DDP, f32": "ddp f32",
  "PyTorch DDP, its fp16 hook": "ddp fp16",
  "PyTorch DDP, its PowerSGD hook, rank 1": "ddp powersgd-1",
  "PyTorch DDP, its PowerSGD hook, rank 4": "ddp powersgd-4",
}
NEWER = {
  "Adam of the plain mean": "adam psum",
  "1-bit Adam, `two_shot`": "1-bit adam two_shot",
  "1-bit Adam, `all_gather`": "1-bit adam all_gather",
  "Lion by votes, `two_shot`": "lion by votes two_shot",
  "Lion by votes, `all_gather`": "lion by votes all_gather",
  "SCAPE, 1 %": "scape-1% psum",
  "Dion, rank 4": "dion-4 psum",
  "signs by votes": "sign by votes two_shot",
  "1-bit SGD, buckets of 512, EF21": "onebit-512 ef21 two_shot",
  "shared top-k, 1 %": "shared top-1% psum",
  "PowerSGD, rank 4, one factor a step": "powersgd-4 alternate psum",
  "MXFP8, `two_shot`": "mxfp8 two_shot",
  "NVFP4, rounded at random, `two_shot`": "nvfp4 two_shot",
}
RATES = {
  "100mbit": "100 Mbit/s",
  "1gbit": "1 Gbit/s",
  "5gbit": "5 Gbit/s",
  "10gbit": "10 Gbit/s",
  "loopback": "loopback",
}
CODECS = {
  **{f"QSGD, {bits} bits": f"qsgd-{bits}" for bits in (2, 4, 8)},
  "QSGD, 4 bits, shared scales": "qsgd-4 shared",
  **{
    f"QSGD, {bits} bits, fitted levels": f"qsgd-{bits} nonuniform" for bits in (2, 3, 4)
  },
  "1-bit SGD, buckets of 64": "onebit-64",
  "1-bit SGD, buckets of 512": "onebit-512",
  "TernGrad, 2 bits": "terngrad",
  "TernGrad, base 3": "terngrad base3",
  "8 bits, dynamic tree": "dynamic_tree",
  "8 bits, linear": "linear",
  "APS (5, 2)": "aps-5-2",
  "APS (4, 3)": "aps-4-3",
  "APS (3, 0)": "aps-3-0",
  "APS (5, 10)": "aps-5-10",
  "the cast (5, 2) alone": "cast-5-2",
  "natural": "natural",
  "MXFP8": "mxfp8",
  "MXFP4": "mxfp4",
  "MXFP4, rotated by 32": "mxfp4 rotate 32",
  "NVFP4, stochastic": "nvfp4 stochastic",
  "Eden, 1 bit": "eden-1",
  **{f"Eden, {bits} bits": f"eden-{bits}" for bits in (2, 4)},
  **{f"BlockTop, {bits} bits a value": f"blocktop-{bits}" for bits in (2, 8, 32)},
  "float32": "dense-f32",
  "bfloat16": "dense-bf16",
  "float16": "dense-f16",
}
TYPES = {
  "dynamic tree": "dynamic_tree",
  "linear": "linear",
  "mantissa": "mantissa",
  "static tree": "static_tree",
}

LOCAL = {
  "DiLoCo, loss": "DiLoCo",
  "DiLoCo with plain SGD outside": "DiLoCo SGD",
  'SparseLoCo, BlockTop, `merge="senders"`': "SparseLoCo",
  'the same, `merge="mean"`': "SparseLoCo mean",
  "the same, one of 16 elements": "SparseLoCo of 16",
  "SparseLoCo, BlockTop, `two_shot`, outer rate 4": "SparseLoCo two_shot",
  'MuLoCo, BlockTop of 256, `merge="senders"`': "MuLoCo BlockTop",
  "Streaming, (3, 0), `all_gather`": "Streaming",
  "MuLoCo, 2 bits, nearest level, `all_gather`": "MuLoCo",
  "the same, `two_shot`": "MuLoCo two_shot",
  "MuLoCo, 2 bits, rounded at random": "MuLoCo at random",
  "MuLoCo, float32": "MuLoCo dense",
}


def milliseconds(cell):
  """The two numbers of a cell like ``1,080 (0.8)``, or of an empty one."""
  return cell.replace(",", "").rstrip(")").split(" (") if cell else ["", ""]


def links(names):
  by_hosts = [
    {row[""]: row for row in rows("link_speed.md", number)} for number in (0, 1)
  ]
  empty = {"MB": "", "1gbit": ""}
  lines = []
  for label, name in names.items():
    found = [measured.get(name, empty) for measured in by_hosts]
    cells = [[row["MB"], *milliseconds(row["1gbit"])] for row in found]
    lines.append([label, *cells[0], *cells[1]])
  header = ["", "2 hosts: MB sent", "ms", "x f32", "4 hosts: MB sent", "ms", "x f32"]
  return table(header, lines)


def rates():
  lines = []
  tcp = re.findall(
    r"^\* (\w+): raw TCP carries ([\d,]+)", record("link_speed.md"), re.M
  )
  tcp = [dict(tcp[:5]), dict(tcp[5:10])]
  for number, hosts in ((1, "4"), (0, "2")):
    found = {row[""]: row for row in rows("link_speed.md", number)}
    for rate, label in RATES.items():
      if rate in found["plain f32 mean"]:
        plain, ours, theirs, half = (
          milliseconds(found[name][rate])
          for name in ("plain f32 mean", "qsgd-4 two_shot", "ddp f32", "ddp fp16")
        )
        times = [plain[0], *ours, theirs[0], half[0]]
        lines.append([hosts, label, tcp[number][rate], *times])
  columns = ["plain f32", "`two_shot`", "x f32", "PyTorch f32", "its fp16 hook"]
  return table(["hosts", "link", "raw TCP, Mbit/s", *columns], lines)


def activations():
  found = {
    (row["i"], row["sent"]): row
    for row in (
      dict(zip(("way", "i", "sent", "ms", "x"), cells, strict=True))
      for cells in (
        re.findall(
          r"^\| (gather) \| (\S+ \S+) \| (\w+) \| (\S+) \|.*\| (\S+) \| \S+ \|$",
          record("parallel_links.md"),
          re.M,
        )
      )
    )
  }
  lines = []
  for size in dict.fromkeys(size for size, _ in found):
    ours = [f"{found[size, x]['ms']} ({found[size, x]['x']})" for x in TYPES.values()]
    lines.append([size, found[size, "lax"]["ms"], *ours])
  return table(["activations", "JAX, f32", *TYPES], lines)


def passes():
  columns = ["ahead", "not ahead", "model", "model not ahead"]
  found = [x for x in rows("parallel_links.md", 1) if x["sent"] in ("f32", "linear")]
  return table(
    ["sent", "passes", *columns],
    [[x[y] for y in ("sent", "passes", *columns)] for x in found],
  )


def seconds(file, name, elements=2**24):
  return load(file)[f"{name}, {elements}"]["seconds"]


def one_codec():
  kept, started = "codec_speed_jax0.10.2_malloc.json", "codec_speed_jax0.10.2.json"
  lines = []
  for label, name, part in (
    ("encode, stochastic", "qsgd-4", "encode"),
    ("encode, nearest", "qsgd-4 nearest", "encode"),
    ("encode with its residual", "qsgd-4", "encode and residual"),
    ("decode to a new array", "qsgd-4", "decode"),
    ("decode and add, a worker of 4", "qsgd-4", "decode and sum, a worker"),
  ):
    cells = [label]
    for file in (kept, started):
      found = seconds(file, name)
      cells += [
        f"{1e9 * found[part] / 2**24:.2f}",
        f"{found[part] / found['copy']:.1f}",
      ]
    lines.append(cells)
  header = ["QSGD, 4 bits", "pages kept: ns an element", "x copy"]
  return table([*header, "as users start: ns an element", "x copy"], lines)


def every_codec():
  lines = []
  for label, name in CODECS.items():
    found = seconds("codec_speed_jax0.10.2_malloc.json", name)
    parts = [found[x] for x in ("encode", "decode", "decode and sum, a worker")]
    parts.append(found["update and residual"] - found["update"])
    lines.append([label, *(f"{x / found['copy']:.1f}" for x in parts)])
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


def matrices():
  found = load("matrices_speed_jax0.10.2_malloc.json")["matrices"]["seconds"]
  lines = []
  for step in ("encode", "decode", "exchange"):
    flat, matrices = (found[f"{step}, {x}"] for x in ("flat", "matrices"))
    copies = [f"{x / found['copy']:.1f}" for x in (flat, matrices)]
    lines.append([step, *copies, f"{matrices / flat:.2f}"])
  return table(["QSGD, 4 bits", "flat leaf: x copy", "8 matrices", "x flat"], lines)


def selection():
  file = "selection_speed_jax0.10.2_malloc.json"
  found = [load(file)[f"normal, {2**24}, {x}"]["seconds"] for x in (0.001, 0.01)]
  lines = []
  for label, name in {
    "`threshold`": "threshold",
    "`sampled`, threshold used again": "sampled, again",
    "`trimmed`": "trimmed",
    "`exact`": "exact",
  }.items():
    copies = [f"{x[name] / x['copy']:.1f}" for x in found]
    gains = [f"{x['lax.top_k'] / x[name]:.0f}" for x in found]
    lines.append([label, copies[0], gains[0], copies[1], gains[1]])
  header = ["selection", "0.1 %: x copy", "x faster than `top_k`"]
  return table([*header, "1 %: x copy", "x faster than `top_k`"], lines)


def rounding():
  found = load("approximation_error.json")["as_paper"]
  lines = []
  for label, name in TYPES.items():
    cells = [label]
    for errors in found.values():
      of = errors[name]
      cells += [f"{of['relative_percent']:.2f}", f"{of['paper_relative_percent']}"]
    lines.append(cells)
  return table(["", *(x for name in found for x in (name, "paper"))], lines)


def sums():
  found = load("roundoff.json")
  groups = ("4", "8", "16", "32", "64", "128", "256")
  by_format = found["formats"]
  lines = [["ResNet-50's first convolution, (5, 2), in the paper", "mean"]]
  lines[0] += [
    f"{found['paper'][x]:.0f}" if x in found["paper"] else "" for x in groups
  ]
  for what, kind, way, fmt, length in (
    (
      "LeNet's first convolution, (5, 2)",
      "first convolution",
      "sequential",
      "(5, 2)",
      "mean",
    ),
    ("the same, Kahan", "first convolution", "kahan", "(5, 2)", "mean"),
    (
      "LeNet's first convolution, (5, 2)",
      "first convolution",
      "sequential",
      "(5, 2)",
      "length",
    ),
    ("the same, (4, 3)", "first convolution", "sequential", "(4, 3)", "length"),
    ("the same, (5, 2), Kahan", "first convolution", "kahan", "(5, 2)", "length"),
  ):
    errors = by_format[fmt][kind]
    lines.append(
      [what, length, *(f"{errors[f'{way} {x}'][length]:.0f}" for x in groups)]
    )
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
  kinds = found[0]["errors"]
  return table(["code", "bits", "biased", "lost", *kinds], lines)


def memory(exchange):
  found = [x for x in rows("memory.md") if x["exchange"] == f"`{exchange}`"]
  return table(found[0], [row.values() for row in found])


def digits(number):
  """Four digits, or all of a large number."""
  return f"{number:,.0f}" if abs(number) >= 1e4 else f"{number:.4g}"


def local_loss():
  """The losses of methods as differences to DiLoCo's, by the steps of a round."""
  by_steps = [{x["method"]: x for x in rows("local_study.md", i)} for i in range(3)]
  lines = []
  for label, name in LOCAL.items():
    found = [measured.get(name) for measured in by_steps]
    key = "loss" if name == "DiLoCo" else "more"
    star = ["*" if x and x["seeds"] == "1" else "" for x in found]
    shown = zip(found, star, strict=True)
    cells = [x[key].split(" ±")[0] + y if x else "" for x, y in shown]
    lines.append([label, *cells, found[1]["fewer"] if found[1] else ""])
  return table(["method", "H = 15", "H = 30", "H = 100", "fewer bytes, H = 30"], lines)


_STUDY = same("codec", "test accuracy", "points to f32", "bytes a step", "ratio")
_SPARSE = ("method", "accuracy", "relative to f32", "seeds", "bytes a step")
_WORDS = ("method", "perplexity", "relative to f32", "seeds", "bytes a step")
_LENET = "small lenet"
_SMALL = ("small transformer", "small lstm", _LENET, f"{_LENET} of few images")
_LOCAL = {
  **same("method", "tokens/s", "x f32", "in communication"),
  "MB in 30 steps": "MB a round",
  "fewer bytes": "fewer",
}
_QSGD = ("QSGD, 4 bits", "QSGD, `ring`", "QSGD, error feedback")
_COMPILED = same("plain mean", *_QSGD, "TernGrad")
_DISTORTION = (
  "top-k, 1/64",
  *(f"Eden, {bits}" for bits in ("1 bit", "2 bits", "4 bits", "8 bits")),
  *("1-bit SGD, buckets of 512", "TernGrad", "QSGD, 2 bits, buckets of 128"),
  *("QSGD, 2 bits, buckets of 128, fitted", "QSGD, 4 bits", "QSGD, 4 bits, fitted"),
  *("MXFP4", "NVFP4", "float (5, 2)", "8 bits, dynamic tree", "QSGD, 8 bits"),
)
_TYPES = ("f32", *TYPES.values(), "p")
TABLES = {
  "overlap, TPU slices": lambda: overlaps("v5e", "v6e", "v5p", "tpu7x"),
  "overlap, several slices": lambda: overlaps("2 slices of v5e"),
  "overlap, GPUs": lambda: overlaps("H100", "H200", "B200"),
  "layers, 1 Gbit/s": lambda: pick("layers_links.md", 0),
  "layers, 100 Mbit/s": lambda: pick("layers_links.md", 1),
  "predicted steps": lambda: pick("predicted_steps.md"),
  "links": lambda: links(LINKS),
  "optimizers on links": lambda: links(NEWER),
  "rates": rates,
  "activations": activations,
  "passes": passes,
  "one codec": one_codec,
  "every codec": every_codec,
  "gpu kernels": gpu_kernels,
  "gpu codecs": gpu_codecs,
  "matrices": matrices,
  "selection": selection,
  "compile": lambda: pick("growth.md", 0),
  "compile, short": lambda: pick("growth.md", 0, keep=_COMPILED),
  "trace": lambda: pick("growth.md", 1),
  "temporaries": lambda: pick("growth.md", 2),
  "memory": lambda: pick("memory.md"),
  "memory, two_shot": lambda: memory("two_shot"),
  "model axes": lambda: pick("model_axes.md"),
  "rounding": rounding,
  "sums": sums,
  "noise": noise,
  "distortion": distortion,
  "distortion, short": lambda: distortion(_DISTORTION),
  "trainers": lambda: pick("trainers.md"),
  "ways to round": lambda: pick("rounding_study.md"),
  "quantizing": lambda: pick("codec_study.md", 0, _STUDY),
  "400 steps": lambda: pick("codec_study.md", 1, _STUDY),
  "few images": lambda: pick("codec_study.md", 2, _STUDY),
  "floats": lambda: pick("aps_study.md", 0, _STUDY),
  "small gradients": lambda: pick("aps_study.md", 1, _STUDY),
  "lars": lambda: pick("aps_study.md", 2, _STUDY),
  "sizes of gradients": lambda: pick("aps_study.md", 3, same("codec", "test accuracy")),
  "4 bits": lambda: pick("aps_study.md", 4, _STUDY),
  "sparse words": lambda: pick("redsync_study.md", 3, same(*_WORDS)),
  "sparse digits": lambda: pick("redsync_study.md", 4, same(*_SPARSE)),
  "sharded layers": lambda: pick(
    "model_parallel.md", 0, same("units", "sent", *_TYPES)
  ),
  "sharded nets": lambda: pick("model_parallel_nets.md", 0, same("net", *_TYPES)),
  "sharded optimizers": lambda: pick("parallel_study.md"),
  "local, 2 hosts": lambda: pick("local_links_2.md", 0, _LOCAL),
  "local, 4 hosts": lambda: pick("local_links_4.md", 0, _LOCAL),
  "local loss": local_loss,
  **{
    f"adam, {net}": lambda k=k: pick("adam_study.md", k)
    for k, net in enumerate(("transformer", "lstm", "lenet", *_SMALL))
  },
  **{
    f"allocated {what}": lambda k=k: pick("allocate_study.md", k)
    for k, what in enumerate(("bits", "transformer", "lenet", "resnet"))
  },
  "lossless": lambda: pick("lossless_overflow.md"),
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
