"""Trains a transformer with sharded parameters and residuals, for FSDP examples."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P

import gradcomp
from examples.lib import telemetry
from examples.lib.checkpoints import add_arguments, saved_in
from examples.lib.data import text
from examples.lib.parsing import positive
from examples.lib.sharded import cut_gradients
from gradcomp import parallel
from gradcomp.codecs import Codec

BATCH, LENGTH = 32, 32  # sequences of a step, of all workers, and bytes of a sequence


def make_parser(title: str) -> argparse.ArgumentParser:
  """Makes the parser of the command line."""
  parser = argparse.ArgumentParser(description=title)
  parser.add_argument("--workers", type=positive, default=4, help="default: 4")
  parser.add_argument("--steps", type=positive, default=200, help="default: 200")
  telemetry.add_arguments(parser)
  add_arguments(parser)
  return parser


def arguments(title: str, argv: Sequence[str] | None) -> argparse.Namespace:
  """Reads the command line, and makes a mesh of the workers."""
  parser = make_parser(title)
  args = parser.parse_args(argv)
  if BATCH % args.workers:
    parser.error(f"--workers must divide the {BATCH} sequences of a batch")
  jax.config.update("jax_num_cpu_devices", args.workers)
  devices = jax.devices()[: args.workers]
  jax.set_mesh(jax.make_mesh((args.workers,), ("data",), devices=devices))
  return args


def batches() -> Iterator[text.Tokens]:
  """Returns the batches of all workers."""
  return text.batches(text.load().train, BATCH, LENGTH, seed=0)


def train(
  worker: Callable[[Any, Any, text.Tokens], Any],
  whole_gradients: Callable[[Any, Any, text.Tokens], Any],
  params: Any,
  feed: Iterator[text.Tokens],
  args: argparse.Namespace,
  *,
  codec: Codec,
) -> None:
  """Trains, and prints the loss and the bytes of a step.

  Args:
    worker: takes a worker's own parameters, residuals and batch, and returns the mean
      loss, the gradient of the parameters, and the new residuals.
    whole_gradients: takes the same, and returns the worker's gradient of whole
      parameters, and residuals in these shapes.
    params: global arrays that are cut along the first axis.
    feed: the batches of all workers.
    args: the options.
    codec: of gradients.
  """
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3))

  def zeros(params: Any) -> Any:
    return jax.tree.map(lambda w: parallel.gather_residual(w, axis_name="data"), params)

  def cut(function: Any, outputs: Any) -> Any:
    return jax.shard_map(function, in_specs=P("data"), out_specs=outputs)

  gradients = cut(worker, (P(), P("data"), P("data")))

  @jax.jit
  def step(params: Any, residuals: Any, state: Any, batch: text.Tokens) -> Any:
    loss, grads, residuals = gradients(params, residuals, batch)
    # Here parameters are global arrays, and norms are those of whole ones.
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), residuals, state, loss

  residuals = jax.jit(cut(zeros, P("data")))(params)
  state = jax.jit(optimizer.init)(params)
  place = lambda batch: jax.device_put(batch, P("data"))
  program = step.lower(params, residuals, state, place(next(feed))).compile()
  trained = params, residuals, state
  exchange = cut_gradients.exchange_of(codec)
  look = lambda *given: cut_gradients.inspect(exchange, *whole_gradients(*given))
  look = jax.jit(cut(look, P()))
  log = telemetry.Log(args.inspect)
  whose = {"optimizer": exchange, "params": params, "workers": args.workers}
  with saved_in(args, **whose) as saved:
    first, trained, _ = saved.restore(trained, feed)
    for number in range(first + 1, args.steps + 1):
      batch = place(next(feed))
      if log.takes(number):
        log.keep(number, {"inspection": look(*trained[:2], batch)})
      *trained, loss = program(*trained, batch)
      saved.save(number, tuple(trained))
      if number % max(1, args.steps // 10) == 0:
        print(f"step {number}: loss {loss:.3f}")
  log.write(args.output, "fsdp")
  print(gradcomp.wire_report(program))
