"""Trains an image classifier on several workers and counts the bytes they exchange.

    python examples/image_classification.py --codec qsgd --bits 4
    python examples/image_classification.py --compare f32 qsgd-8 onebit-64 --seeds 3
    python examples/image_classification.py --steps 2000 --checkpoint saved

Without accelerators it emulates eight devices on the CPU; with them it uses all of
them. Under several processes, every process runs the same line with ``--coordinator``,
``--num-processes`` and ``--process-id``, or without them where JAX detects the cluster
(SLURM, Open MPI, Kubernetes, cloud TPU). With ``--checkpoint``, the same line once more
goes on where the last one was stopped, and ends with the same numbers.
"""

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import data
import jax
import jax.numpy as jnp
import optax
import report
from checkpoints import add_arguments, saved_in
from jax.experimental import multihost_utils
from models import MODELS
from progress import Progress
from telemetry import Log
from training import (
  AXIS,
  Run,
  Task,
  compile_inspecting,
  compile_step,
  init_state,
  train,
)

import gradcomp
from gradcomp.codecs import (
  QSGD,
  BlockTop,
  Dense,
  EightBit,
  FloatCast,
  LeafCodec,
  OneBit,
  PowerSGD,
  RandomK,
  Ternary,
  TopK,
)

WIDTHS = (2, 3, 4, 5, 6, 7, 8, 16)
TYPES = ("dynamic_tree", "dynamic_map", "static_tree", "linear", "mantissa")
# What crosses the wire; None is JAX's own mean.
CODECS: dict[str, LeafCodec | None] = {
  "none": None,
  "f32": Dense(),
  "bf16": Dense(dtype=jnp.bfloat16),
  **{f"qsgd-{n}": QSGD(bits=n) for n in WIDTHS},
  **{f"qsgd-{n}-nonuniform": QSGD(bits=n, levels="nonuniform") for n in (2, 3, 4)},
  "onebit-64": OneBit(),
  "onebit-512": OneBit(bucket_size=512),
  "onebit-column": OneBit(per_column=True),
  "terngrad": Ternary(),
  "terngrad-base3": Ternary(packing="base3"),
  "terngrad-noclip": Ternary(clip_sigmas=None),
  **{name.replace("_", "-"): EightBit(data_type=name) for name in TYPES},
  **{
    f"aps-{e}-{m}": FloatCast(exponent_bits=e, mantissa_bits=m)
    for e, m in ((5, 2), (4, 3), (3, 0))
  },
  "topk-1": TopK(density=0.01),
  "topk-1-asq": TopK(density=0.01, quantize="asq"),
  "blocktop": BlockTop(),
  "randomk-1": RandomK(density=0.01),
  **{f"powersgd-{n}": PowerSGD(rank=n) for n in (1, 2, 4)},
}
COMPARED = ("f32", "qsgd-8", "qsgd-4", "qsgd-2")
EXCHANGES = ("auto", "all_gather", "two_shot", "psum")


def main(argv: Sequence[str] | None = None) -> None:
  """Trains with the options given, prints the table and writes the files."""
  parser = make_parser()
  args = parser.parse_args(argv)
  codecs = choose_codecs(parser, args)
  join_processes(args)
  mesh = jax.make_mesh((jax.device_count(),), (AXIS,))
  if args.batch_size % mesh.size:
    parser.error(f"--batch-size must be a multiple of the {mesh.size} workers")
  images = load_everywhere(args.dataset, args.data_dir)
  model = functools.partial(
    MODELS[args.model], images.train.images.shape[1:], images.classes
  )
  task = Task(model, images.test, mesh)
  runs = []
  for name, codec in codecs.items():
    runs += run_codec(name, codec, task, images.train, args)
  if jax.process_index() == 0:
    print(report.table(runs))
    print(footnote(mesh.size))
    written = report.write(runs, args.output, title=f"{args.model} on {args.dataset}")
    print("wrote", *written)


def choose_codecs(
  parser: argparse.ArgumentParser, args: argparse.Namespace
) -> dict[str, LeafCodec | None]:
  """Returns the codecs named by the options; QSGD's with their bucket size."""
  if args.compare is None:
    names = [f"qsgd-{args.bits}" if args.codec == "qsgd" else args.codec]
  else:
    names = args.compare or COMPARED
  codecs = {name: CODECS[name] for name in names}
  if args.inspect and None in codecs.values():
    parser.error("--inspect shows what gradcomp sends: leave out none")
  for name, codec in codecs.items():
    if isinstance(codec, OneBit) and args.feedback == "none":
      parser.error(
        f"--feedback none does not go with {name}: two means a bucket leave much of a "
        "gradient out, which later steps must make up for"
      )
    if isinstance(codec, QSGD):
      codecs[name] = dataclasses.replace(codec, bucket_size=args.bucket_size)
  return codecs


def run_codec(
  name: str,
  codec: LeafCodec | None,
  task: Task,
  train_set: data.Split,
  args: argparse.Namespace,
) -> list[Run]:
  """Compiles the step once for all seeds, and trains from each."""
  processes = {"part": jax.process_index(), "parts": jax.process_count()}
  batches = functools.partial(data.batches, train_set, args.batch_size, **processes)
  seeds = range(args.seed, args.seed + args.seeds)
  step, wire = compile_step(
    task, make_optimizer(codec, args, seed=0), next(batches(seed=0))
  )
  log = Log()
  if args.inspect:
    optimizer = make_optimizer(codec, args, seed=0)
    log = Log(args.inspect, compile_inspecting(task, optimizer, next(batches(seed=0))))
  runs = []
  for seed in seeds:
    params = task.init_params(seed)
    optimizer = make_optimizer(codec, args, seed=seed)
    opt_state = init_state(task, optimizer, params)
    saved = saved_in(
      args,
      f"{name}-{seed}",
      optimizer=None if codec is None else optimizer,
      params=params,
      workers=task.mesh.size,
    )
    title, shown = f"{name} seed {seed}", jax.process_index() == 0
    with Progress(title, args.steps, shown=shown) as progress, saved:
      points, step_ms = train(
        task,
        step,
        params,
        opt_state,
        batches(seed=seed),
        steps=args.steps,
        evaluate_every=args.evaluate_every,
        bytes_a_step=wire.bytes_sent,
        progress=progress,
        saved=saved,
        log=log if seed == args.seed else None,
      )
    runs.append(Run(name, seed, wire.bytes_sent, wire.dense_bytes, step_ms, points))
  if jax.process_index() == 0:
    log.write(args.output, name)
  return runs


def make_optimizer(
  codec: LeafCodec | None, args: argparse.Namespace, *, seed: int
) -> optax.GradientTransformation:
  """Chains the exchange and the optimizer. The seed goes into the state alone."""
  schedule = optax.cosine_decay_schedule(args.learning_rate, args.steps)
  if args.optimizer == "adam":
    optimizer = optax.adam(schedule)
  else:
    optimizer = optax.sgd(schedule, momentum=args.momentum)
  return optax.chain(make_exchange(codec, args, seed=seed), optimizer)


def make_exchange(
  codec: LeafCodec | None, args: argparse.Namespace, *, seed: int
) -> optax.GradientTransformation:
  """Makes the transformation that averages the gradients of the workers."""
  if codec is None:
    return optax.stateless(lambda grads, _: jax.lax.pmean(grads, AXIS))
  return gradcomp.compress(
    codec,
    axis_name=AXIS,
    exchange=args.exchange,
    feedback=None if args.feedback == "none" else args.feedback,
    key=seed,
  )


def join_processes(args: argparse.Namespace) -> None:
  """Sets up the devices and joins the other processes.

  Both must happen before JAX's back-end starts.
  """
  jax.config.update("jax_num_cpu_devices", args.devices)
  named = (args.coordinator, args.num_processes, args.process_id)
  try:
    jax.distributed.initialize(*named)
  except ValueError as error:
    # Nothing was named and JAX detects no cluster: this is the only process.
    if named != (None, None, None) or "coordinator_address" not in str(error):
      raise


def load_everywhere(name: str, data_dir: Path) -> data.ImageSet:
  """Loads the data in every process, after the first process has prepared it."""
  first = jax.process_index() == 0
  if first:
    images = data.load(name, data_dir)
  multihost_utils.sync_global_devices("data is prepared")
  return images if first else data.load(name, data_dir)


def footnote(workers: int) -> str:
  """Explains the columns of the table."""
  text = (
    f"Workers: {workers}. Bytes: what each sends, read from the compiled step's HLO.\n"
    "Ratio: to a plain f32 mean. Time: the median step, compilation excluded."
  )
  if jax.default_backend() == "cpu":
    text += (
      "\nThe workers are emulated on this machine's cores, and no bytes cross a link: "
      "the\ntimes say nothing about one."
    )
  return text


def make_parser() -> argparse.ArgumentParser:
  """Makes the parser of the command line."""
  parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )

  group = parser.add_argument_group("task")
  group.add_argument(
    "--dataset",
    choices=("digits", "mnist", "fashion_mnist", "cifar10"),
    default="digits",
    help="digits (default) is embedded, the others download once",
  )
  group.add_argument("--data-dir", type=Path, default=data.FOLDER, help=data.HELP)
  group.add_argument(
    "--model", choices=tuple(MODELS), default="lenet", help="default: lenet"
  )
  group.add_argument(
    "--optimizer", choices=("sgd", "adam"), default="sgd", help="default: sgd"
  )
  group.add_argument("--momentum", type=float, default=0.9, help="of sgd; default: 0.9")
  group.add_argument(
    "--learning-rate", type=float, default=0.05, help="at the start; default: 0.05"
  )
  group.add_argument(
    "--batch-size", type=positive, default=64, help="of all workers; default: 64"
  )
  group.add_argument("--steps", type=positive, default=200, help="default: 200")
  group.add_argument(
    "--seed", type=int, default=0, help="of parameters, batches and rounding"
  )

  group = parser.add_argument_group("exchange")
  group.add_argument(
    "--codec",
    choices=("qsgd", *CODECS),
    default="qsgd",
    metavar="CODEC",
    help=f"qsgd (default) with --bits, or one of {', '.join(CODECS)}; f32 is the plain "
    "mean, none the same without gradcomp",
  )
  group.add_argument(
    "--bits", type=int, choices=WIDTHS, default=4, help="of --codec qsgd; default: 4"
  )
  group.add_argument(
    "--bucket-size", type=positive, default=512, help="of qsgd; default: 512"
  )
  group.add_argument(
    "--exchange", choices=EXCHANGES, default="auto", help="default: auto"
  )
  group.add_argument(
    "--feedback",
    choices=("auto", "error", "none"),
    default="auto",
    help="whether workers keep what they did not send; auto (default): biased codecs",
  )

  group = parser.add_argument_group("comparison")
  group.add_argument(
    "--compare",
    nargs="*",
    choices=CODECS,
    metavar="CODEC",
    help=f"train several from one initialisation; without names: {' '.join(COMPARED)}",
  )
  group.add_argument(
    "--seeds", type=positive, default=1, help="repeat from as many seeds; default: 1"
  )
  group.add_argument(
    "--evaluate-every",
    type=positive,
    default=10,
    help="steps between two points of the curves; default: 10",
  )
  group.add_argument(
    "--inspect",
    type=positive,
    metavar="K",
    help="show what compression does to each leaf every K steps: a table at the end, "
    "and three plots for each codec",
  )
  group.add_argument(
    "--output",
    type=Path,
    default=Path("results"),
    help="folder of summary.csv, curves.csv and curves.png; default: results",
  )

  group = parser.add_argument_group("devices and processes")
  group.add_argument(
    "--devices",
    type=positive,
    default=8,
    help="CPU devices to emulate in each process, where there are no accelerators; "
    "default: 8",
  )
  group.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
  group.add_argument("--num-processes", type=positive)
  group.add_argument("--process-id", type=int)
  add_arguments(parser)
  return parser


def positive(text: str) -> int:
  """Parses a number that must be at least 1."""
  value = int(text)
  if value < 1:
    raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
  return value


if __name__ == "__main__":
  main()
