"""Times training steps that gradcomp.telemetry.inspect looks at now and then.

  python -m benchmarks.codecs.inspect [--runs 25] [--nets lenet ...] [--quick]
    [--output FOLDER]

Runs steps of `gradcomp.make_train_step` on 8 emulated workers, one of each kind in
turn: one as it is, one with `inspect=True`, and one followed by a program of its own
that takes the gradients again for `gradcomp.telemetry.inspect`. The table shows
medians:

  step       milliseconds of a step as it is,
  inspected  what `inspect=True` adds, in steps, and a fiftieth of it: what people pay
             who look at every 50th step. Less than 2 % is the goal.
  apart      what the program of its own adds, in steps: it computes and exchanges the
             gradients a second time.

With --output, writes inspect_cost.json and inspect_cost.md there.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P

import gradcomp
from benchmarks.common import cli, quiet
from benchmarks.common.tables import table
from benchmarks.common.timing import interleaved, machine
from examples.lib.data import images as data
from examples.lib.data import text
from examples.lib.networks import Transformer, for_images
from examples.lib.training import AXIS, Task, init_state
from gradcomp.codecs import QSGD, FloatCast, LeafCodec, OneBit, Ternary, TopK

WORKERS = 8
EVERY = 50
NETS = ("lenet", "resnet", "transformer")
CODECS: dict[str, LeafCodec] = {
  "QSGD, 4 bits": QSGD(bits=4),
  "1-bit SGD": OneBit(),
  "TernGrad": Ternary(),
  "APS (5, 2)": FloatCast(),
  "TopK, 1 %": TopK(density=0.01),
}
QUICK_NETS, QUICK_CODECS = ("transformer",), ("QSGD, 4 bits",)


def problem(net: str, folder: Path) -> tuple[Task, Any]:
  """Returns a task on 8 workers, and a batch of 64 images, or of 16 texts."""
  mesh = jax.make_mesh((WORKERS,), (AXIS,))
  if net == "transformer":
    found = text.load()
    task = Task(Transformer(text.CHARACTERS), text.in_order(found.test, 32), mesh)
    return task, next(text.batches(found.train, 16, 32, seed=0))
  images = data.load("digits", folder)
  model = for_images(net, images.train.images.shape[1:], images.classes)
  return Task(model, images.test, mesh), next(data.batches(images.train, 64, seed=0))


def calls(task: Task, batch: Any, codec: LeafCodec) -> dict[str, Any]:
  """Returns what takes a step of each kind, from where the last one ended."""
  optimizer = optax.chain(gradcomp.compress(codec, axis_name=AXIS), optax.adam(1e-3))
  step = gradcomp.make_train_step(
    task.loss_fn, optimizer, axis_name=AXIS, mesh=task.mesh
  )
  params = task.init_params(0)
  now = [params, init_state(task, optimizer, params)]
  placed = task.place(batch)
  specs = gradcomp.state_specs(now[1], axis_name=AXIS)

  def look(params: Any, state: Any, batch: Any) -> Any:
    _, grads = gradcomp.value_and_grad(task.loss_fn, axis_name=AXIS)(params, batch)
    return gradcomp.telemetry.inspect(optimizer, grads, state, params)

  apart = jax.jit(
    jax.shard_map(look, mesh=task.mesh, in_specs=(P(), specs, P(AXIS)), out_specs=P())
  )

  def take(inspect: bool) -> Any:
    *now[:], metrics = step(*now, placed, inspect=inspect)
    return metrics

  return {
    "step": lambda: take(False),
    "inspected": lambda: take(True),
    "apart": lambda: apart(*now, placed),
  }


def measure(net: str, codec: str, args: argparse.Namespace) -> dict[str, Any]:
  """Times the steps of one net and codec."""
  task, batch = problem(net, args.data_dir)
  seconds = interleaved(calls(task, batch, CODECS[codec]), args.runs)
  plain = seconds["step"]
  leaves = jax.tree.leaves(task.init_params(0))
  return {
    "net": net,
    "codec": codec,
    "leaves": len(leaves),
    "parameters": sum(x.size for x in leaves),
    "step_ms": 1000 * plain,
    "inspected": seconds["inspected"] / plain - 1,
    "apart": seconds["apart"] / plain,
    "load": os.getloadavg()[0],
  }


def page(results: dict[str, Any]) -> str:
  """Writes the table in Markdown."""
  header = ["net", "leaves", "parameters", "codec", "step, ms", "inspected, steps"]
  header += ["of 50 steps", "apart, steps", "load"]
  lines = [
    [
      x["net"],
      f"{x['leaves']}",
      f"{x['parameters']:,}",
      x["codec"],
      f"{x['step_ms']:.1f}",
      f"{x['inspected']:+.2f}",
      f"{x['inspected'] / EVERY:+.2%}",
      f"{x['apart']:.2f}",
      f"{x['load']:.1f}",
    ]
    for x in results["cases"]
  ]
  where = results["machine"]
  return (
    "# What an inspection costs\n\n"
    f"benchmarks/codecs/inspect.py: {WORKERS} workers on {where['cores']} cores, JAX "
    f"{where['jax']}, medians of {results['runs']} steps of each kind.\n\n"
    f"{table(header, lines)}\n"
  )


def main() -> None:
  args = cli.options(
    __doc__,
    "one net, one codec and one step of each kind",
    "folder of the two files",
    runs=cli.Option(25, 1),
    nets=cli.Option([*NETS], QUICK_NETS, choices=NETS),
    codecs=cli.Option([*CODECS], QUICK_CODECS, choices=CODECS),
    data_dir=cli.Option(data.FOLDER, help="of the images"),
  )
  quiet.keep(unless=args.quick)
  jax.config.update("jax_num_cpu_devices", WORKERS)
  results: dict[str, Any] = {"machine": machine(), "runs": args.runs, "cases": []}
  for net in args.nets:
    for codec in args.codecs:
      results["cases"].append(measure(net, codec, args))
      print(results["cases"][-1], flush=True)
  print(page(results))
  cli.write(args.output, "inspect_cost", results, page(results))


if __name__ == "__main__":
  main()
