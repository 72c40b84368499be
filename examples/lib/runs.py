"""A run, its checkpoints and inspections; and programs that have few options."""

import contextlib
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import gradcomp
from examples.lib import checkpoints, parsing, telemetry
from examples.lib.training import AXIS

SMALL = 1024  # elements of a leaf that travels in float32


class Run(contextlib.AbstractContextManager["Run"]):
  """Counts the steps of a training, and saves its state, with a record of ``whose``."""

  def __init__(self, args: Namespace, name: str, log=None, folder="", **whose: Any):
    self._args, self._name, self._step, self._curve = args, name, 0, None
    self.log = telemetry.Log(args.inspect) if log is None else log
    saved, record = args.checkpoint, None
    if saved and whose["optimizer"]:
      record = gradcomp.checkpoint.make_record(**whose)
    kept = {"every": args.save_every, "steps": args.steps, "record": record}
    self._saved = checkpoints.Saved(saved and saved / folder, **kept)

  def __exit__(self, *_: Any) -> None:
    self._saved.__exit__()

  def restore(self, state: Any, batches: Iterator[Any]) -> Any:
    """Returns the last state that was saved, or the one given."""
    self._step, state, self._curve = self._saved.restore(state, batches, self._curve)
    return state

  def steps(self) -> Iterator[int]:
    """Yields the numbers of the steps that are left, then shows what was inspected."""
    while self._step < self._args.steps:
      self._step += 1
      yield self._step
    self.log.write(self._args.output, self._name)

  def save(self, state: Any, loss: jax.Array | None = None) -> None:
    """Ends a step, whose state is saved if it is time to; prints every tenth loss."""
    self._saved.save(self._step, state, self._curve)
    if loss is not None and self._step % max(1, self._args.steps // 10) == 0:
      print(f"step {self._step}: loss {loss:.3f}")


def make_parser(title: str | None, **sizes: int) -> ArgumentParser:
  """Makes the parser of a program with few options; a mesh has sizes with defaults."""
  parser = ArgumentParser(description=title, formatter_class=parsing.Help)
  for name, default in {**sizes, "steps": 200}.items():
    said = "of the training" if name == "steps" else "of the mesh"
    parser.add_argument(f"--{name}", type=parsing.positive, default=default, help=said)
  add = parser.add_argument_group("telemetry").add_argument
  said = "inspect what is sent every K steps: a table at the end, and two plots"
  add("--inspect", type=parsing.positive, metavar="K", help=said)
  add("--output", type=Path, default=Path("results"), help="folder of the plots")
  checkpoints.add_arguments(parser)
  return parser


def set_mesh(
  parser: ArgumentParser, argv: Sequence[str] | None, batch: int, **axes: str
) -> Namespace:
  """Reads the options, and sets a mesh with an axis for each of the given ones."""
  args = parser.parse_args(argv)
  sizes = [getattr(args, option) for option in axes]
  if batch % math.prod(sizes):
    given = " times ".join(f"--{option}" for option in axes)
    parser.error(f"{given} must divide the {batch} sequences of a batch")
  jax.config.update("jax_num_cpu_devices", math.prod(sizes))
  devices = jax.devices()[: math.prod(sizes)]
  jax.set_mesh(jax.make_mesh(sizes, tuple(axes.values()), devices=devices))
  return args


def exchange_of(codec: Any, *, feedback: bool = True) -> optax.GradientTransformation:
  """Makes an exchange that does to whole gradients what ``parallel.gather`` does.

  It is inspected in place of that one, out of whose backward pass nothing comes but
  cotangents. (A worker's own part, which gather leaves as it is, is rounded here, too.)
  """
  kept = "error" if feedback else None
  options = {"axis_name": AXIS, "exchange": "all_gather", "min_leaf_size": SMALL}
  return gradcomp.compress(codec, feedback=kept, **options)


def inspected(exchange: Any, grads: Any, residuals: Any) -> Any:
  """Inspects whole gradients of a worker, with the residuals of gathers, in the map."""
  state = exchange.init(grads)
  if state.residual is not None:
    kept = lambda g, e: jnp.zeros_like(g, shape=g.shape or (1,)) if e is None else e
    state = state._replace(residual=jax.tree.map(kept, grads, residuals))
  *_, found = gradcomp.telemetry.inspect_update(exchange, grads, state)
  # Each part goes to one worker here, where all_gather sends it to all others.
  to_owners = lambda x: x._replace(bytes_sent=x.bytes_sent / lax.axis_size(AXIS))
  leaves = {path: to_owners(metrics) for path, metrics in found.leaves.items()}
  return found._replace(total=to_owners(found.total), leaves=leaves)
