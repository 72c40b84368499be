"""Shards parameters over a host's chips, and compresses gradients between hosts (HSDP).

    python -m examples.hsdp --hosts 2 --chips 4 --steps 200

Each host has all parameters once, and each of its chips an Nth of them. The links
inside a host are fast: there a block gathers its parameters in full precision when it
needs them, and gradients go back to their owners the same way. Then each chip has the
gradient of its own part, for the samples of its host. Of that it sends 4 bits an
element to the chips that own the same part in other hosts. Nothing else crosses hosts.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen
from jax import P, lax

import gradcomp
from examples.lib import runs, texts

BATCH, LENGTH = 32, 32  # sequences of a step, of all workers, and bytes of a sequence
BOTH = P(("host", "chip"))  # how a batch is cut
make_parser = functools.partial(runs.make_parser, __doc__, hosts=2, chips=4)


def gathered(params: Any) -> Any:
  """Gathers parameters inside a host. All are sharded along their first axis."""
  return jax.tree.map(lambda w: lax.all_gather(w, "chip", tiled=True), params)


# A block that gathers when it is called, and again before its backward pass.
GatheredBlock = linen.remat(linen.map_variables(texts.Block, "params", gathered))


def make_loss(model: linen.Module) -> Callable[..., jax.Array]:
  """Returns the loss of a chip over the number of chips, so that gradients add up."""

  def loss_fn(params: Any, batch: texts.Tokens) -> jax.Array:
    outer = {k: w for k, w in params.items() if not k.startswith("block")}
    logits = model.apply({"params": params | gathered(outer)}, batch.inputs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return jnp.mean(losses) / lax.axis_size("chip")

  return loss_fn


def make_step(
  loss_fn: Any, exchange: Any, optimizer: Any, specs: Any, *, inspect: bool = False
) -> Callable[..., Any]:
  """Makes a step, which returns what the exchange does to leaves with ``inspect``."""

  def chip(params: Any, state: Any, batch: Any) -> Any:
    # Without this JAX would add up the gradients of all hosts, in full precision.
    own = gradcomp.defer_reduction(params, axis_name="host")
    loss, grads = jax.value_and_grad(loss_fn)(own, batch)
    loss = lax.pmean(lax.psum(loss, "chip"), "host")
    if inspect:
      return gradcomp.telemetry.inspect_update(exchange, grads, state, params), loss
    return (*exchange.update(grads, state, params), ()), loss

  given, taken = (P("chip"), specs, BOTH), ((P("chip"), specs, P()), P())
  means = jax.shard_map(chip, in_specs=given, out_specs=taken)

  @jax.jit
  def step(params: Any, states: Any, batch: Any) -> Any:
    (grads, exchanged, found), loss = means(params, states[0], batch)
    # Here parameters are global arrays, and norms are those of whole ones.
    updates, inner = optimizer.update(grads, states[1], params)
    return optax.apply_updates(params, updates), (exchanged, inner), loss, found

  return step


def main(argv: Sequence[str] | None = None) -> None:
  """Trains, and prints the loss and the bytes between hosts."""
  args = runs.set_mesh(make_parser(), argv, BATCH, hosts="host", chips="chip")
  batches = texts.batches(texts.load().train, BATCH, LENGTH, seed=0)
  exchange = gradcomp.qsgd(bits=4, bucket_size=128, axis_name="host")
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3))
  plain = texts.Transformer(texts.CHARACTERS)
  init = lambda key: plain.init(key, next(batches).inputs[:1])["params"]
  params = jax.jit(init, out_shardings=P("chip"))(jax.random.key(0))
  cut = {"axis_name": "host", "param_specs": jax.tree.map(lambda _: P("chip"), params)}
  sent = gradcomp.init_state(exchange, params, **cut)
  states = sent, jax.jit(optimizer.init)(params)
  specs = gradcomp.state_specs(sent, **cut)
  model = texts.Transformer(texts.CHARACTERS, block=GatheredBlock)
  parts = make_loss(model), exchange, optimizer, specs
  step, look = (make_step(*parts, inspect=inspect) for inspect in (False, True))
  place = lambda batch: jax.device_put(batch, BOTH)
  program = step.lower(params, states, place(next(batches))).compile()
  whose = {"optimizer": exchange, "params": params, "workers": args.hosts}
  with runs.Run(args, "hsdp", **whose) as run:
    params, states = run.restore((params, states), batches)
    for number in run.steps():
      batch = place(next(batches))
      take = look if run.log.takes(number) else program
      params, states, loss, found = take(params, states, batch)
      run.log.keep(number, found)
      run.save((params, states), loss)
  print(gradcomp.wire_report(program, mesh=jax.sharding.get_mesh()).by_axis["host"])


if __name__ == "__main__":
  main()
