"""Trains a transformer of flax linen with sharded parameters (FSDP).

    python -m examples.fsdp_linen --steps 200

Each worker keeps an Nth of each parameter, and of Adam's state. A block gathers its
parameters in 8 bits when it needs them, in the forward pass and again in the backward
pass, and forgets them. Their gradients go back to their owners in 4 bits. Each worker
keeps the loss of that in a residual, and sends it in the next step.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen
from jax import P, lax

import gradcomp
from examples.lib import runs, texts
from gradcomp import parallel
from gradcomp.codecs import QSGD, EightBit

BATCH, LENGTH = 32, 32  # sequences of a step, of all workers, and bytes of a sequence
# Buckets are so small that a worker's part of a matrix fills its rows.
WEIGHTS = EightBit(bucket_size=128)
GRADS = QSGD(bits=4, bucket_size=128, rounding="nearest")
make_parser = functools.partial(runs.make_parser, __doc__, workers=4)


def gather(w: jax.Array, residual: jax.Array, shape: Any = None) -> jax.Array:
  """Gathers a parameter, or one of a given shape that is cut into flat parts."""
  small = len(shape or w.shape) < 2  # such parameters travel in float32
  codecs = {"params": None if small else WEIGHTS, "grads": None if small else GRADS}
  given = {"residual": residual, "shape": shape, **codecs}
  return parallel.gather(w, axis_name="data", **given)


def gathered(variables: Any) -> Any:
  """Gathers the parameters of a layer. All are sharded along their first axis."""
  return {"params": jax.tree.map(gather, variables["params"], variables["residuals"])}


# A block that gathers when it is called, and again before its backward pass.
GatheredBlock = linen.map_variables(texts.Block, ("params", "residuals"), gathered)
GatheredBlock = linen.remat(GatheredBlock)
model = texts.Transformer(texts.CHARACTERS, block=GatheredBlock)
plain = texts.Transformer(texts.CHARACTERS)  # of whole parameters


def share_of_loss(logits: jax.Array, batch: texts.Tokens) -> jax.Array:
  """Returns a worker's share of the mean loss; gradients of it are to be added up."""
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
  return jnp.mean(losses) / lax.axis_size("data")


def loss_fn(params: Any, residuals: Any, batch: texts.Tokens) -> jax.Array:
  """Computes a worker's share of the loss from its parts of the parameters."""
  # A layer that is used twice is gathered once, for each gather sends its residual.
  outer = lambda tree: {k: x for k, x in tree.items() if not k.startswith("block")}
  whole = gathered({"params": outer(params), "residuals": outer(residuals)})
  variables = {"params": params | whole["params"], "residuals": residuals}
  return share_of_loss(model.apply(variables, batch.inputs), batch)


def worker(params: Any, residuals: Any, batch: texts.Tokens, loss_fn=loss_fn) -> Any:
  """Returns the mean loss, the worker's part of the gradient, and its residuals."""
  loss, cotangents = jax.value_and_grad(loss_fn, (0, 1))(params, residuals, batch)
  return lax.psum(loss, "data"), *cotangents


def whole_gradients(params: Any, residuals: Any, batch: texts.Tokens) -> Any:
  """Returns the gradient of whole parameters, and the residuals, to be inspected."""
  whole = gathered({"params": params, "residuals": residuals})["params"]
  loss_of = lambda w: share_of_loss(plain.apply({"params": w}, batch.inputs), batch)
  return jax.grad(loss_of)(whole), residuals


def train(args: Any, params: Any, loss_fn: Any, whole_gradients: Any) -> None:
  """Trains, and prints the loss and the bytes of a step."""
  batches = texts.batches(texts.load().train, BATCH, LENGTH, seed=0)
  cut = functools.partial(jax.shard_map, in_specs=P("data"))
  worker_of = functools.partial(worker, loss_fn=loss_fn)
  gradients = cut(worker_of, out_specs=(P(), P("data"), P("data")))
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3))

  @jax.jit
  def step(params: Any, residuals: Any, state: Any, batch: texts.Tokens) -> Any:
    loss, grads, residuals = gradients(params, residuals, batch)
    # Here parameters are global arrays, and norms are those of whole ones.
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), residuals, state, loss

  residual = functools.partial(parallel.gather_residual, axis_name="data")
  zeros = cut(lambda params: jax.tree.map(residual, params), out_specs=P("data"))
  kept = params, jax.jit(zeros)(params), jax.jit(optimizer.init)(params)
  place = lambda batch: jax.device_put(batch, P("data"))
  program = step.lower(*kept, place(next(batches))).compile()
  exchange = runs.exchange_of(GRADS)
  look = lambda *given: runs.inspected(exchange, *whole_gradients(*given))
  look = jax.jit(cut(look, out_specs=P()))
  whose = {"optimizer": exchange, "params": params, "workers": args.workers}
  with runs.Run(args, "fsdp", **whose) as run:
    kept = run.restore(kept, batches)
    for number in run.steps():
      batch = place(next(batches))
      if run.log.takes(number):
        run.log.keep(number, look(*kept[:2], batch))
      *kept, loss = program(*kept, batch)
      run.save(tuple(kept), loss)
  print(gradcomp.wire_report(program))


def main(argv: Sequence[str] | None = None) -> None:
  args = runs.set_mesh(make_parser(), argv, BATCH, workers="data")
  init = lambda key: plain.init(key, jnp.zeros((1, LENGTH), jnp.uint8))["params"]
  params = jax.jit(init, out_shardings=P("data"))(jax.random.key(0))
  train(args, params, loss_fn, whole_gradients)


if __name__ == "__main__":
  main()
