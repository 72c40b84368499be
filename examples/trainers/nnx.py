"""Flax nnx, ``nnx.Optimizer``.

One line puts 4 bits in front of the optimizer, and one takes each worker's gradient.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import gradcomp
from examples.lib import trainers


class Network(nnx.Module):
  def __init__(self, *, rngs: nnx.Rngs):
    self.first = nnx.Linear(trainers.WIDTH, 256, rngs=rngs)
    self.second = nnx.Linear(256, 256, rngs=rngs)
    self.third = nnx.Linear(256, trainers.CLASSES, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.third(nnx.tanh(self.second(nnx.tanh(self.first(x)))))


def train(steps: int, compressed: bool) -> tuple[float, Any]:
  tx = optax.adam(3e-3)
  grad = nnx.value_and_grad
  if compressed:
    tx = optax.chain(gradcomp.qsgd(bits=4, axis_name="data"), tx)
    grad = lambda loss_fn: gradcomp.value_and_grad(loss_fn, axis_name="data")

  def loss_fn(network: Network, batch: Any) -> jax.Array:
    return jnp.mean((network(batch["x"]) - batch["y"]) ** 2)

  @nnx.jit
  def step(network: Network, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
    loss, grads = grad(loss_fn)(network, batch)
    optimizer.update(network, grads)
    return loss

  network = Network(rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(network, tx, wrt=nnx.Param)
  for batch in trainers.batches(steps):
    batch = jax.device_put(batch, jax.P("data"))
    loss = step(network, optimizer, batch).block_until_ready()
  return float(loss), step.lower(network, optimizer, batch)


if __name__ == "__main__":
  trainers.main(__doc__, train)
