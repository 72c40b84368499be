"""Trains a transformer of flax linen with sharded parameters (FSDP).

    python -m examples.fsdp_linen --steps 200

Each worker keeps an Nth of each parameter, and of Adam's state. A block gathers its
parameters in 8 bits when it needs them, in the forward pass and again in the backward
pass, and forgets them. Their gradients go back to their owners in 4 bits. Each worker
keeps the loss of that in a residual, and sends it in the next step.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen
from jax import lax
from jax.sharding import PartitionSpec as P

from examples.lib.data import text
from examples.lib.networks import Block, Transformer
from examples.lib.sharded.fsdp_training import arguments, batches, train
from gradcomp import parallel
from gradcomp.codecs import QSGD, EightBit

# Buckets are so small that a worker's part of a matrix fills its rows.
WEIGHTS = EightBit(bucket_size=128)
GRADS = QSGD(bits=4, bucket_size=128, rounding="nearest")


def gathered(variables: Any) -> Any:
  """Gathers the parameters of a layer. All are sharded along their first axis."""

  def gather(w: jax.Array, residual: jax.Array) -> jax.Array:
    small = w.ndim < 2  # such parameters travel in float32
    codecs = dict(params=None if small else WEIGHTS, grads=None if small else GRADS)
    return parallel.gather(w, axis_name="data", residual=residual, **codecs)

  return {"params": jax.tree.map(gather, variables["params"], variables["residuals"])}


# A block that gathers when it is called, and again before its backward pass.
GatheredBlock = linen.remat(
  linen.map_variables(Block, ("params", "residuals"), gathered)
)
model = Transformer(text.CHARACTERS, block=GatheredBlock)
plain = Transformer(text.CHARACTERS)  # of whole parameters


def share_of_loss(logits: jax.Array, batch: text.Tokens) -> jax.Array:
  """Returns a worker's share of the mean loss; gradients of it are to be added up."""
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
  return jnp.mean(losses) / lax.axis_size("data")


def loss_fn(params: Any, residuals: Any, batch: text.Tokens) -> jax.Array:
  """Computes a worker's share of the loss from its parts of the parameters."""
  # A layer that is used twice is gathered once, for each gather sends its residual.
  outer = [name for name in params if not name.startswith("block")]
  few = {name: params[name] for name in outer}
  whole = gathered({"params": few, "residuals": {n: residuals[n] for n in outer}})
  variables = {"params": params | whole["params"], "residuals": residuals}
  return share_of_loss(model.apply(variables, batch.inputs), batch)


def worker(params: Any, residuals: Any, batch: text.Tokens) -> Any:
  """Returns the mean loss, the worker's part of the gradient, and its residuals."""
  loss, cotangents = jax.value_and_grad(loss_fn, (0, 1))(params, residuals, batch)
  return lax.psum(loss, "data"), *cotangents


def whole_gradients(params: Any, residuals: Any, batch: text.Tokens) -> Any:
  """Returns the gradient of whole parameters, and the residuals, to be inspected."""
  whole = gathered({"params": params, "residuals": residuals})["params"]

  def loss_fn(whole: Any) -> jax.Array:
    return share_of_loss(plain.apply({"params": whole}, batch.inputs), batch)

  return jax.grad(loss_fn)(whole), residuals


def main(argv: Sequence[str] | None = None) -> None:
  """Trains, and prints the loss and the bytes of a step."""
  args = arguments(__doc__.splitlines()[0], argv)
  feed = batches()

  def init(key: jax.Array) -> Any:
    return plain.init(key, next(feed).inputs[:1])["params"]

  params = jax.jit(init, out_shardings=P("data"))(jax.random.key(0))
  train(worker, whole_gradients, params, feed, args, codec=GRADS)


if __name__ == "__main__":
  main()
