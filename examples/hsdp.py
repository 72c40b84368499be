"""Shards parameters over a host's chips, and compresses gradients between hosts (HSDP).

    python -m examples.hsdp --hosts 2 --chips 4 --steps 200

Each host has all parameters once, and each of its chips an Nth of them. The links
inside a host are fast: there a block gathers its parameters in full precision when it
needs them, and gradients go back to their owners the same way. Then each chip has the
gradient of its own part, for the samples of its host. Of that it sends 4 bits an
element to the chips that own the same part in other hosts. Nothing else crosses hosts.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen
from jax import lax
from jax.sharding import PartitionSpec as P

import gradcomp
from examples.lib import telemetry
from examples.lib.checkpoints import add_arguments, saved_in
from examples.lib.data import text
from examples.lib.networks import Block, Transformer
from examples.lib.parsing import positive

BATCH, LENGTH = 32, 32  # sequences of a step, of all workers, and bytes of a sequence
BOTH = P(("host", "chip"))  # how a batch is cut


def gathered(params: Any) -> Any:
  """Gathers parameters inside a host. All are sharded along their first axis."""
  return jax.tree.map(lambda w: lax.all_gather(w, "chip", tiled=True), params)


# A block that gathers when it is called, and again before its backward pass.
GatheredBlock = linen.remat(linen.map_variables(Block, "params", gathered))


def make_loss(model: linen.Module) -> Callable[..., jax.Array]:
  """Returns the loss of a chip over the number of chips, so that gradients add up."""

  def loss_fn(params: Any, batch: text.Tokens) -> jax.Array:
    outer = {k: w for k, w in params.items() if not k.startswith("block")}
    logits = model.apply({"params": params | gathered(outer)}, batch.inputs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return jnp.mean(losses) / lax.axis_size("chip")

  return loss_fn


def make_step(
  loss_fn: Callable[..., jax.Array],
  exchange: optax.GradientTransformation,
  optimizer: optax.GradientTransformation,
  specs: Any,
  *,
  inspect: bool = False,
) -> Callable[..., Any]:
  """Makes a train step.

  Args:
    loss_fn: of a chip's parameters and batch, inside the map.
    exchange: takes the mean over the axis ``"host"``.
    optimizer: what follows it.
    specs: those of the state of the exchange.
    inspect: whether the step also returns what the exchange does to each leaf.
  """

  def chip(params: Any, state: Any, batch: Any) -> Any:
    # Without this JAX would add up the gradients of all hosts, in full precision.
    own = gradcomp.defer_reduction(params, axis_name="host")
    loss, grads = jax.value_and_grad(loss_fn)(own, batch)
    loss = lax.pmean(lax.psum(loss, "chip"), "host")
    if inspect:
      return gradcomp.telemetry.inspected_update(exchange, grads, state, params), loss
    return (*exchange.update(grads, state, params), ()), loss

  means = jax.shard_map(
    chip,
    in_specs=(P("chip"), specs, BOTH),
    out_specs=((P("chip"), specs, P()), P()),
  )

  @jax.jit
  def step(params: Any, states: Any, batch: Any) -> Any:
    (grads, exchanged, found), loss = means(params, states[0], batch)
    # Here parameters are global arrays, and norms are those of whole ones.
    updates, inner = optimizer.update(grads, states[1], params)
    stepped = optax.apply_updates(params, updates), (exchanged, inner)
    return (*stepped, loss, found) if inspect else (*stepped, loss)

  return step


def make_parser() -> argparse.ArgumentParser:
  """Makes the parser of the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--hosts", type=positive, default=2, help="default: 2")
  parser.add_argument("--chips", type=positive, default=4, help="of a host; default: 4")
  parser.add_argument("--steps", type=positive, default=200, help="default: 200")
  telemetry.add_arguments(parser)
  add_arguments(parser)
  return parser


def main(argv: Sequence[str] | None = None) -> None:
  """Trains, and prints the loss and the bytes between hosts."""
  parser = make_parser()
  args = parser.parse_args(argv)
  workers = args.hosts * args.chips
  if BATCH % workers:
    parser.error(f"hosts times chips must divide the {BATCH} sequences of a batch")
  jax.config.update("jax_num_cpu_devices", workers)
  devices = jax.devices()[:workers]
  jax.set_mesh(
    jax.make_mesh((args.hosts, args.chips), ("host", "chip"), devices=devices)
  )
  batches = text.batches(text.load().train, BATCH, LENGTH, seed=0)
  exchange = gradcomp.qsgd(bits=4, bucket_size=128, axis_name="host")
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3))

  def init(key: jax.Array) -> Any:
    return Transformer(text.CHARACTERS).init(key, next(batches).inputs[:1])["params"]

  params = jax.jit(init, out_shardings=P("chip"))(jax.random.key(0))
  cut = jax.tree.map(lambda _: P("chip"), params)
  states = (
    gradcomp.init_state(exchange, params, axis_name="host", param_specs=cut),
    jax.jit(optimizer.init)(params),
  )
  specs = gradcomp.state_specs(states[0], axis_name="host", param_specs=cut)
  model = Transformer(text.CHARACTERS, block=GatheredBlock)
  parts = make_loss(model), exchange, optimizer, specs
  step, look = (make_step(*parts, inspect=inspect) for inspect in (False, True))
  place = lambda batch: jax.device_put(batch, BOTH)
  program = step.lower(params, states, place(next(batches))).compile()
  whose = {"optimizer": exchange, "params": params, "workers": args.hosts}
  log = telemetry.Log(args.inspect)
  with saved_in(args, **whose) as saved:
    first, (params, states), _ = saved.restore((params, states), batches)
    for number in range(first + 1, args.steps + 1):
      batch = place(next(batches))
      if log.takes(number):
        params, states, loss, found = look(params, states, batch)
        log.keep(number, {"inspection": found})
      else:
        params, states, loss = program(params, states, batch)
      saved.save(number, (params, states))
      if number % max(1, args.steps // 10) == 0:
        print(f"step {number}: loss {loss:.3f}")
  log.write(args.output, "hsdp")
  report = gradcomp.wire_report(program, mesh=jax.sharding.get_mesh())
  print(report.by_axis["host"])


if __name__ == "__main__":
  main()
