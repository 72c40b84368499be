"""Times a whole gradient exchange: from the gradient to its mean.

A cell is a rate, a number of hosts and a gradient. In each cell every host times in
turn the plain f32 mean and every codec with every exchange, in one process of JAX. One
two_shot is also timed part by part. Then every host runs one PyTorch process
(torch_worker.py), which times DistributedDataParallel over gloo with f32, its fp16 and
PowerSGD hooks and one in float8 on the same links, if there is a PyTorch: see --torch.
PyTorch has the threads that torchrun would give it, or more: cores by hosts.

What is measured joins the file of results, so that a run can be cut into pieces: a step
replaces the one of its name in its cell. All codecs run at 1gbit with one leaf, and by
default a choice of them elsewhere. ResNet-50's leaves come with 2 hosts at 1gbit only,
unless they are chosen: most of that time goes to compiling, once a host.

The table also has bytes from the kernel's counters, the CPU time, the error, and
whether all hosts got the same bits. Read two lines first: the probe, and how far plain
f32 is from its wire bound. Where it is far, something other than the link takes the
time, and compression looks better than it is.
"""

import argparse
import functools
import itertools
import math
import operator
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

import gradcomp
from benchmarks.common import cli, shapes, tables
from benchmarks.links import launch, methods, process, results
from benchmarks.links.hosts import Host, bits_per_second
from gradcomp._src.codecs.sums.records import Payload
from gradcomp._src.exchange.collectives import scatter
from gradcomp.codecs import Codec, Context

joined = results.merge
BASELINE = "plain f32 mean"
FILE = "link_speed"
_HOOKS = ("fp16", "fp8", "powersgd-1", "powersgd-2", "powersgd-4")
_RATES = ["100mbit", "1gbit", "5gbit", "10gbit", "loopback"]
_FEW = ["qsgd-4", "terngrad", "aps-8", "redsync-1%"]
QUICK = "2 hosts, 1 MiB, 4 codecs, 1 repeat"
OPTIONS = {
  "rates": cli.Option(_RATES, ["1gbit"], "of each direction, in tc's words"),
  "hosts": cli.Option([2, 4], [2]),
  "leaves": cli.Option(["1", "resnet50"], ["1"], "equal leaves, or resnet50"),
  "mib": cli.Option(64, 1, "size of the equal leaves together, in f32"),
  "repeats": cli.Option(5, 1, "2 at most below 500 Mbit/s"),
  "codecs": cli.Option([*methods.STEPS], _FEW, "all exchanges of these", methods.STEPS),
  "hooks": cli.Option([*_HOOKS], ["fp8"], "of PyTorch's DDP", choices=_HOOKS),
  "torch": cli.Option(sys.executable, help="a Python with PyTorch; empty for none"),
}


def cells(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
  for leaves, hosts, rate in itertools.product(args.leaves, args.hosts, args.rates):
    if leaves != "1" and len(args.leaves) > 1 and (rate, hosts) != ("1gbit", 2):
      continue
    speed = bits_per_second(rate)
    size = sum(map(np.prod, shapes_of(leaves, args.mib))) * 4 / 2**20
    yield {
      "hosts": hosts,
      "rate": rate,
      "bits_per_second": speed,
      "mib": round(size, 1) if leaves == "resnet50" else args.mib,
      "leaves": leaves if leaves == "resnet50" else int(leaves),
      "repeats": min(args.repeats, 2) if speed and speed < 5e8 else args.repeats,
      **{"steps": {}, "parts": {}, "failed": {}},
    }


def shapes_of(leaves: int | str, mib: float) -> list[tuple[int, ...]]:
  """Returns the shapes of a gradient's leaves: equal matrices, or ResNet-50's.

  >>> shapes_of(2, mib=1)
  [(256, 512), (256, 512)]
  """
  if leaves == "resnet50":
    return shapes.resnet50_shapes()
  size = int(mib * 2**20) // 4 // int(leaves)
  rows = 2 ** (int(np.log2(size)) // 2)  # of a matrix, which low rank needs
  return [(rows, size // rows)] * int(leaves)


def measure(hosts: list[Host], cell: dict[str, Any], args: argparse.Namespace) -> None:
  given = shapes_of(cell["leaves"], args.mib)
  brief = (cell["rate"], cell["leaves"]) != ("1gbit", 1)
  names = methods.chosen(list(args.codecs), brief, len(given) == 1)
  job, interface = {"shapes": given, "repeats": cell["repeats"]}, hosts[0].interface
  reports = launch.run_workers(hosts, "speed", job | {"steps": names}, args.limit)
  cell |= {x: results.combine(reports, x, interface) for x in ("steps", "parts")}
  has = [args.torch, "-c", "import torch"]
  if args.torch and not subprocess.run(has, capture_output=True).returncode:
    threads = max(1, (os.cpu_count() or 1) // len(hosts))
    own = {"GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": str(threads)}
    way: Any = {"python": args.torch, "environment": launch.MALLOC | own}
    for name in (f"ddp {hook}" for hook in args.hooks):  # each may hang
      job["steps"] = ["ddp f32", name]
      try:
        reports = launch.run_workers(hosts, "torch_worker", job, args.limit, **way)
        cell["steps"] |= results.combine(reports, "steps", interface)
      except RuntimeError as error:  # ours are measured, and worth keeping
        print(f"PyTorch's workers have failed: {error}")
        cell["failed"][name] = "ended with an error"
  load = cell.pop("load_and_cores")
  for entry in (*cell["steps"].values(), *cell["parts"].values()):
    entry["load_and_cores"] = load
  show(cell)
  if differ := [name for name, x in cell["steps"].items() if not x["same_bits"]]:
    sys.exit(f"The hosts of a step did not get the same bits: {', '.join(differ)}.")


def show(run: dict[str, Any]) -> None:
  """Prints the steps and the parts of a run beside what their bytes need."""
  rows = run["steps"] | {f"part: {name}": x for name, x in run["parts"].items()}
  found = pd.DataFrame.from_dict(rows, orient="index")
  report = found["bytes_wire_report"].astype(float).where(lambda known: known > 0)
  shown = {
    "ms": 1e3 * found["median_seconds"],
    "least": 1e3 * found["seconds"].map(min),
    "most": 1e3 * found["seconds"].map(max),
    "x f32": found["baseline_seconds"] / found["median_seconds"],
    "wire ms": 8e3 * report / (run["bits_per_second"] or math.nan),
    "CPU ms": 1e3 * found["cpu_seconds_a_host"],
    "MB sent": found["bytes_sent"] / 1e6,
    "/ HLO": found["bytes_sent"] / report,
    "error": found["error"],
  }
  print(f"\n{run['hosts']} hosts, {run['rate']}, {run['mib']} MiB in {leaves(run)}")
  tables.show(pd.DataFrame(shown).to_dict("index"))


def leaves(run: dict[str, Any]) -> str:
  """Names the gradient's leaves.

  >>> leaves({"leaves": 1}), leaves({"leaves": "resnet50"})
  ('1 leaf', "ResNet-50's 161 leaves")
  """
  named = {"resnet50": "ResNet-50's 161 leaves", 1: "1 leaf"}
  return named.get(run["leaves"], f"{run['leaves']} leaves")


def markdown(found: dict[str, Any]) -> str:
  """Writes a table for each gradient and number of hosts, with a column a rate."""
  cell = lambda run: (str(run["leaves"]), run["mib"], run["hosts"])
  order = lambda run: (cell(run), run["bits_per_second"] or math.inf)
  paragraphs = [tables.page(__file__, "speed")]
  for (_, mib, hosts), group in itertools.groupby(
    sorted(found["runs"], key=order), cell
  ):
    runs = [*group]
    paragraphs += [f"## {hosts} hosts, {mib} MiB in {leaves(runs[0])}"]
    paragraphs += ["\n".join(map(_carried, runs)), _by_rates(runs)]
  return "\n\n".join(paragraphs) + "\n"


def _by_rates(runs: list[dict[str, Any]]) -> str:
  measured = [run for run in runs if run["steps"] or run["failed"]]
  cells = pd.DataFrame({run["rate"]: dict(_cells(run)) for run in measured}).fillna("")
  # PyTorch's behind ours, and parts behind both.
  order = lambda name: name.startswith("ddp ") + 2 * name.startswith("*part")
  lines = []
  for name in sorted(cells.index, key=order):
    sent = [
      run["steps"][name]["bytes_sent"] for run in measured if name in run["steps"]
    ]
    lines.append([name, f"{min(sent) / 1e6:.2f}" if sent else "", *cells.loc[name]])
  return tables.table(["", "MB", *cells.columns], lines)


def _cells(run: dict[str, Any]) -> Iterator[tuple[str, str]]:
  for name, step in run["steps"].items():
    milliseconds = 1e3 * step["median_seconds"]
    digits = 0 if milliseconds >= 10 else 1
    yield name, f"{milliseconds:,.{digits}f} ({results.speed_up(step):.1f})"
  yield from run["failed"].items()
  for name, part in run["parts"].items():
    yield f"*part:* {name}", f"{1e3 * part['median_seconds']:.1f}"


def _carried(run: dict[str, Any]) -> str:
  """States what raw TCP reached on the links of a run."""
  if not run["probe"]:
    return f"* {run['rate']}: not probed."
  least = 8e-6 * min(run["probe"])
  end = "" if run["steps"] else " This machine does not reach the rate."
  return f"* {run['rate']}: raw TCP carries {least:,.0f} Mbit/s or more.{end}"


def steps(
  mesh: jax.sharding.Mesh, grads: list[jax.Array], like: list[Any], names: list[str]
) -> Iterator[tuple[str, process.Timed]]:
  """Compiles the plain mean, and then each step that is named.

  A step takes a gradient and a state, and both are donated: the mean comes back in the
  gradient's place, as in a train step. The state goes on from call to call, so that
  fitted levels, signs that take turns and low-rank factors are those of a training.
  """
  hosts = mesh.size
  copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))

  def timed(update: Any, state: Any, specs: Any, updates: bool) -> process.Timed:
    both = (jax.P("data"), specs)
    step = jax.shard_map(update, mesh=mesh, in_specs=both, out_specs=both)
    step = jax.jit(step, donate_argnums=(0, 1)).lower(grads, state).compile()
    held = [state]
    keep = lambda outputs: held.__setitem__(0, outputs[1])
    return process.Timed(step, lambda: (copy(grads), held[0]), keep, True, updates)

  plain = lambda grads, state: (jax.lax.pmean(grads, "data"), state)
  yield BASELINE, timed(plain, (), (), False)
  for name in names:
    codec, exchange = name.rsplit(" ", 1)
    case = methods.STEPS[codec]
    group = methods.GROUPED.group_size if exchange == methods.GROUPED.name else 1
    if group >= hosts or hosts % group:
      continue
    try:
      tx = case.transformation(exchange)
    except ValueError:  # the library says that these do not go together
      continue
    with jax.set_mesh(mesh):  # owners keep something where their number is known
      specs = gradcomp.state_specs(jax.eval_shape(tx.init, like), axis_name="data")
    # Of parameters that all hosts have alike, as users have them.
    zeros = lambda: tx.init([jnp.zeros(x.shape, x.dtype) for x in like])  # noqa: B023
    state = jax.jit(jax.shard_map(zeros, mesh=mesh, in_specs=(), out_specs=specs))()
    yield name, timed(tx.update, state, specs, case.updates)


def parts(
  mesh: jax.sharding.Mesh, grads: list[jax.Array], like: list[Any], codec: Codec
) -> Iterator[tuple[str, process.Timed]]:
  """Compiles a two_shot exchange of equal leaves as programs that hand results on."""
  hosts, key = mesh.size, jnp.array([1, 2], jnp.uint32)
  rows = -(-like[0].size // codec.tile_size)  # of a leaf

  def encode(*leaves: jax.Array) -> jax.Array:
    matrix = jnp.concatenate([codec.encode(leaf, key=key).rows for leaf in leaves])
    padded = jnp.pad(matrix, ((0, -len(matrix) % hosts), (0, 0)))
    return padded.reshape(hosts, -1, codec.row_words)

  def all_to_all(shares: jax.Array) -> jax.Array:
    return scatter(shares.reshape(hosts, -1), "data").reshape(shares.shape)

  def average_own(received: jax.Array) -> jax.Array:
    total = functools.reduce(operator.add, map(codec.decode_rows, received))
    return codec.encode_rows(total * jnp.float32(1 / hosts), Context(key))

  def all_gather(own: jax.Array) -> jax.Array:
    return jax.lax.all_gather(own, "data", tiled=True)

  def decode(matrix: jax.Array) -> list[jax.Array]:
    payload = lambda i: Payload(matrix[i * rows : (i + 1) * rows])
    return [codec.decode(payload(i), like=leaf) for i, leaf in enumerate(like)]

  values: tuple[jax.Array, ...] = tuple(grads)
  for function in (encode, all_to_all, average_own, all_gather, decode):
    way: Any = {"in_specs": jax.P("data"), "out_specs": jax.P("data")}
    mapped = jax.shard_map(function, mesh=mesh, check_vma=False, **way)
    program = jax.jit(mapped).lower(*values).compile()
    yield function.__name__, process.Timed(program, lambda values=values: values)
    values = (program(*values),)


def report(mesh: jax.sharding.Mesh, options: dict[str, Any]) -> dict[str, Any]:
  """Times exchanges on one host, whose gradients are donated as in a train step."""
  rng = np.random.default_rng(options["rank"])
  own = [rng.standard_normal(shape, np.float32) for shape in options["shapes"]]
  like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in own]
  given = mesh, [process.spread(mesh, x) for x in own], like
  whole = dict(steps(*given, options["steps"]))
  in_parts = "qsgd-4 two_shot" in whole and len({x.shape for x in own}) == 1
  kinds = {"steps": whole}
  kinds["parts"] = dict(parts(*given, methods.IN_PARTS)) if in_parts else {}
  found = process.measure(mesh, whole | kinds["parts"], options)
  return {kind: {name: found[name] for name in own} for kind, own in kinds.items()}
