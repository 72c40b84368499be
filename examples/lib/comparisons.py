"""Comparisons of methods: their command line, their compiled steps, and their runs."""

from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh

import gradcomp
from examples.lib import checkpoints, cut_layers, methods, parsing, tables, training
from examples.lib.methods import EXCHANGES, METHODS, SCHEDULES, WIDTHS
from examples.lib.telemetry import Log

Names = Sequence[str]


def make_parser(
  doc: str | None, models: dict[str, Any], defaults: dict[str, Any], *own: Any
) -> ArgumentParser:
  """Makes the parser of a trainer of images or of text; ``own`` add its own options."""
  parser = ArgumentParser(description=doc, formatter_class=parsing.Help)
  parser.set_defaults(scan=False, parallel="data", models=models)
  add_training(parser, models)
  add_exchange(parser)
  add_comparison(parser, (*METHODS,), defaults["compared"])
  add = add_devices(parser)
  add("--coordinator", metavar="HOST:PORT", help="address of process 0")
  add("--num-processes", type=parsing.positive)
  add("--process-id", type=parsing.natural)
  for add_own in own:
    add_own(parser)
  parser.set_defaults(**defaults)
  return parser


def add_training(parser: ArgumentParser, models: dict[str, Any]) -> None:
  """Adds the network, the optimizer, and how long to train."""
  add = parser.add_argument_group("training").add_argument
  add("--model", choices=tuple(models), default=next(iter(models)), help="network")
  dropping = ", ".join(x for x in models if training.takes_dropout(models[x]))
  said = f"of {dropping}; default: its own"
  add("--dropout", type=parsing.share, metavar="RATE", help=said)
  add("--optimizer", choices=("sgd", "adam"), default="sgd", help="after the exchange")
  add("--momentum", type=parsing.share, default=0.9, help="of sgd")
  said = "whether momentum of sgd is Nesterov's"
  add("--nesterov", action=BooleanOptionalAction, help=said)
  said = "at first; default: each optimizer's own"
  add("--learning-rate", type=parsing.positive_float, help=said)
  said = (
    "how the rate falls: to zero along a cosine or as the root of the steps left, by "
    "half whenever the training loss between evaluations stops falling, or not at all"
  )
  add("--schedule", choices=SCHEDULES, default="cosine", help=said)
  add("--weight-decay", type=parsing.at_least_0, default=0.0, help="of weights")
  said = "norm that gradients are clipped at; None: at none"
  add("--clip", type=parsing.positive_float, metavar="NORM", help=said)
  said = "test the moving average of the parameters; 0.9999 in Wen et al."
  add("--ema", type=parsing.fraction, metavar="DECAY", help=said)
  add("--batch-size", type=parsing.positive, help="of all workers")
  add("--steps", type=parsing.positive, help="of the training")
  said = "of parameters, batches, dropout and rounding"
  add("--seed", type=parsing.seed, default=0, help=said)


def add_exchange(parser: ArgumentParser) -> None:
  """Adds the options of codec and exchange."""
  add = parser.add_argument_group("exchange").add_argument
  said = f"qsgd with --bits, or one of {', '.join(METHODS)}; f32 is the plain mean, "
  said += "none the same without gradcomp"
  add("--codec", choices=("qsgd", *METHODS), metavar="CODEC", help=said)
  add("--bits", type=int, choices=WIDTHS, default=4, help="of qsgd")
  add("--bucket-size", type=parsing.bucket, default=512, help="of qsgd")
  add("--exchange", choices=EXCHANGES, default="auto", help="how payloads travel")
  said = "whether workers keep what they did not send; auto: with biased codecs"
  add("--feedback", choices=("auto", "error", "none"), default="auto", help=said)
  said = (
    "take as many steps alone before each exchange, whose outer optimizer is DiLoCo's, "
    "or SparseLoCo's with topk and blocktop"
  )
  add("--local-steps", type=parsing.positive, metavar="H", help=said)
  add("--density", type=parsing.part, default=0.01, help="of redsync")
  add("--warmup", type=parsing.natural, default=0, help="dense steps of redsync")
  said = (
    "show what compression does to each leaf every K steps, with --local-steps in the "
    "last step of a round: a table at the end, and two plots for each codec"
  )
  add("--inspect", type=parsing.positive, metavar="K", help=said)


def add_parallel(parser: ArgumentParser) -> None:
  """Adds the options of what is sharded, and of layers in a loop."""
  group = parser.add_argument_group("sharded optimizer or parameters, and layers")
  add, bits = group.add_argument, (*range(2, 9), 16)
  said = "exchange the blocks of a transformer in the loop of its backward pass"
  add("--scan", action="store_true", help=said)
  said = "what is sharded: nothing, the optimizer, or the parameters, too; by Adam"
  add("--parallel", choices=("data", "zero", "fsdp"), default="data", help=said)
  add("--grads", type=int, choices=bits, default=4, help="bits")
  said = "bits of parameters, or of what changes in them; default: 8, with zero 4"
  add("--weights", type=int, choices=bits, help=said)


def add_comparison(parser: ArgumentParser, names: Names, compared: Names) -> None:
  """Adds the options of a comparison and of its output."""
  add = parser.add_argument_group("comparison").add_argument
  parser.set_defaults(compared=compared)
  said = f"train several from one initialization; without names: {' '.join(compared)}"
  add("--compare", nargs="*", choices=names, metavar="CODEC", help=said)
  add("--seeds", type=parsing.positive, default=1, help="repeat from as many")
  said = "steps between two points of the curves"
  add("--evaluate-every", type=parsing.positive, default=10, help=said)
  said = "folder of summary.csv, curves.csv and curves.png"
  add("--output", type=Path, default=Path("results"), help=said)


def add_devices(parser: ArgumentParser) -> Any:
  """Adds devices and checkpoints, and returns what adds to the group of devices."""
  add = parser.add_argument_group("devices and processes").add_argument
  said = "CPU devices to emulate in each process, where there are no accelerators"
  add("--devices", type=parsing.devices, default=8, help=said)
  checkpoints.add_arguments(parser)
  return add


def complete(parser: ArgumentParser, args: Namespace) -> Namespace:
  """Fills in the rate of the chosen optimizer, and refuses options that do not fit."""
  given, other = [], f"--parallel {args.parallel}"
  if args.parallel != "data":
    plain = parser.parse_args([])
    refused = "compare ema weight_decay warmup codec clip local_steps scan".split()
    given = [x for x in refused if getattr(args, x) != getattr(plain, x)]
    if args.schedule == "plateau":
      given.append("schedule plateau")
    args.optimizer = "adam"
    if args.parallel == "fsdp" and (args.dropout or args.model == "lstm"):
      parser.error("--parallel fsdp draws no numbers for dropout")
  elif args.scan:
    given, other = [x for x in ("local_steps", "inspect") if getattr(args, x)], "--scan"
    if args.model != "transformer":
      parser.error("--scan does not go with a model without blocks: choose transformer")
  for name in given:
    parser.error(f"--{name.replace('_', '-')} does not go with {other}")
  if args.learning_rate is None:
    args.learning_rate = args.rates[args.optimizer]
  if (got := args.local_steps or 0) > (most := args.steps):
    said = f"at most the {most} steps, or nothing is ever sent, got {got}"
    parser.error(f"--local-steps must be {said}")
  number, count = args.process_id, args.num_processes
  if None not in (number, count) and number >= count:
    parser.error(f"--process-id must be below the {count} processes, got {number}")
  if args.local_steps and args.schedule == "plateau":
    parser.error("--schedule plateau does not go with --local-steps: losses differ")
  if args.dropout is not None and not training.takes_dropout(args.models[args.model]):
    parser.error(f"--dropout does not go with {args.model}, which has no dropout")
  return args


def join_processes(args: Namespace) -> None:
  """Sets up the devices and joins processes, before JAX's back-end starts."""
  jax.config.update("jax_num_cpu_devices", args.devices)
  named = (args.coordinator, args.num_processes, args.process_id)
  try:
    jax.distributed.initialize(*named)
  except ValueError as error:
    # Nothing was named and JAX detects no cluster: this is the only process.
    if named != (None, None, None) or "coordinator_address" not in str(error):
      raise


class Comparison:
  """The methods that a command line names, by their names, and their runs on a mesh."""

  def __init__(self, args: Namespace, mesh: Mesh, chosen: dict[str, Any]):
    self.args, self.mesh, self.methods = args, mesh, chosen
    # Which part of each batch this process draws.
    self.part = {"part": jax.process_index(), "parts": jax.process_count()}
    self._done: list[tables.Run] = []

  def make_task(self, model: Any, test: Any, known: Any = None) -> training.Task:
    """Makes the task of a model, whose parameters are sharded by FSDP alone."""
    spec = jax.P(training.AXIS) if self.args.parallel == "fsdp" else jax.P()
    self.task = training.Task(model, test, self.mesh, spec, known)
    return self.task

  def optimizer(self, name: str, compress: Callable[..., Any]) -> Callable[[int], Any]:
    """Returns what makes a method's optimizer of a seed, a codec's by ``compress``."""
    given = self.methods[name], self.args, compress
    return lambda seed: methods.make_optimizer(*given, seed=seed)

  def adam(self) -> optax.GradientTransformation:
    """Makes Adam with the schedule of the options."""
    return optax.adam(methods.make_schedule(self.args))

  def prepare(self, name: str, step: Any, make: Callable[..., Any], batch: Any) -> Any:
    """Compiles a step, whose optimizers ``make`` makes from seeds; see ``runs``."""
    args, task, method, log = self.args, self.task, self.methods[name], Log()
    compiled, wire = training.compile_step(task, make(0), batch, step)
    if args.inspect:
      look, _ = training.compile_step(task, make(0), batch, step, inspect=True)
      log = Log(args.inspect, look, round_steps=args.local_steps or 1)
    sent, dense = wire.bytes_sent, wire.dense_bytes
    warmed = isinstance(method, methods.Redsync) and args.warmup
    if warmed or args.local_steps:
      params = jax.eval_shape(task.init_params, 0)
      plan = gradcomp.explain(make(0), params, workers=self.mesh.size)
    if warmed:
      # The compiled step has a branch for the warm-up, too; this is what follows it.
      sent, dense = plan.bytes_sent, round(plan.bytes_sent / plan.ratio)
    if args.local_steps:
      sent = round(sent / args.local_steps)
      if jax.process_index() == 0:
        print(plan)

    def start(seed: int) -> tuple[Any, Any]:
      params, optimizer = task.init_params(seed), make(seed)
      recorded = getattr(optimizer, "exchange", optimizer)
      # Of JAX's own mean there is no record.
      whose = {"optimizer": None if method is None else recorded, "params": params}
      return (params, training.init_state(task, optimizer, params)), whose

    return compiled, start, (sent, dense), log

  def runs(
    self, name: str, step: Any, start: Callable[[int], Any], sent: Any = None, log=None
  ) -> Iterator[tuple[tables.Run, Any]]:
    """Yields the run of each seed, and its parameters and state from ``start``."""
    if sent is None:
      wire = gradcomp.wire_report(step)
      sent = wire.bytes_sent, wire.dense_bytes
    for seed in range(self.args.seed, self.args.seed + self.args.seeds):
      first, whose = start(seed)
      given = self.args, name, seed, sent, log or Log()
      with tables.Run(*given, **whose, workers=self.mesh.size) as run:
        yield run, first
      self._done.append(run)

  def show(self, title: str, *, perplexity: bool = False) -> None:
    """Prints the table and writes the files."""
    tables.show(self._done, self.args, title, self.mesh.size, perplexity)


def begin(parser: ArgumentParser, argv: Sequence[str] | None) -> Comparison:
  """Reads the options, joins processes, and makes the mesh of all devices."""
  args = complete(parser, parser.parse_args(argv))
  chosen = methods.choose(parser, args)
  join_processes(args)
  mesh = jax.make_mesh((jax.device_count(),), (training.AXIS,))
  if args.batch_size % mesh.size:
    parser.error(f"--batch-size must be a multiple of the {mesh.size} workers")
  return Comparison(args, mesh, chosen)


# All codecs but the sparse ones, and those that need error feedback or a memory.
NAMES = ("f32", "bf16", *(name.replace("_", "-") for name in methods.TYPES))
NAMES += ("qsgd-8", "qsgd-4", "qsgd-2", "terngrad", "aps-5-2", "aps-4-3")


def make_layers_parser(doc: str | None, compared: Names, own: Any) -> ArgumentParser:
  """Makes the parser of a program whose layers are sharded; ``own`` adds options."""
  made = ArgumentParser(description=doc, formatter_class=parsing.Help)
  add = made.add_argument_group("training").add_argument
  add("--hidden", type=parsing.positive, default=1024, help="units of a layer")
  add("--unit", choices=cut_layers.UNITS, default="relu", help="that follows a layer")
  said = "of a convolution; 0 for no such"
  add("--channels", type=parsing.natural, default=0, help=said)
  add("--learning-rate", type=parsing.positive_float, default=0.003, help="at first")
  add("--batch-size", type=parsing.positive, default=128, help="of all workers")
  add("--steps", type=parsing.positive, default=200, help="of the training")
  add("--seed", type=parsing.seed, default=0, help="of parameters, batches and dropout")
  add = made.add_argument_group("exchange").add_argument
  codec = {"choices": NAMES, "default": "dynamic-tree", "metavar": "CODEC"}
  add("--codec", **codec, help=f"one of {', '.join(NAMES)}")
  said = "whether a worker takes its own part as it is or rounded, too"
  add("--own", choices=("exact", "coded"), default="exact", help=said)
  add("--passes", type=parsing.positive, default=1, help="sub-batches of a batch")
  add_comparison(made, NAMES, compared)
  add_devices(made)
  own(made)
  return made


def begin_layers(parser: ArgumentParser, argv: Any, axis: str) -> Comparison:
  """Reads the options, and makes the mesh over which layers and batches are cut."""
  args = parser.parse_args(argv)
  jax.config.update("jax_num_cpu_devices", args.devices)
  mesh = jax.make_mesh((jax.device_count(),), (axis,))
  if args.batch_size % (mesh.size * args.passes):
    of = f"{mesh.size} workers x {args.passes} passes"
    parser.error(f"--batch-size must be a multiple of {of}")
  if args.hidden % mesh.size:
    parser.error(f"--hidden must be a multiple of the {mesh.size} workers")
  names = [args.codec] if args.compare is None else args.compare or args.compared
  return Comparison(args, mesh, {name: METHODS[name] for name in names})
