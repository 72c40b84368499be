"""Flax linen, ``TrainState``.

One line puts 4 bits in front of the optimizer, and one takes each worker's gradient.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen
from flax.training.train_state import TrainState

import gradcomp
from examples.lib import trainers


class Network(linen.Module):
  @linen.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    x = linen.tanh(linen.Dense(256)(x))
    x = linen.tanh(linen.Dense(256)(x))
    return linen.Dense(trainers.CLASSES)(x)


def train(steps: int, compressed: bool) -> tuple[float, Any]:
  network, tx = Network(), optax.adam(3e-3)
  grad = jax.value_and_grad
  if compressed:
    tx = optax.chain(gradcomp.qsgd(bits=4, axis_name="data"), tx)
    grad = lambda loss_fn: gradcomp.value_and_grad(loss_fn, axis_name="data")

  def loss_fn(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((network.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)

  @jax.jit
  def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
    loss, grads = grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads=grads), loss

  params = network.init(jax.random.key(0), jnp.ones(trainers.WIDTH))["params"]
  state = TrainState.create(apply_fn=network.apply, params=params, tx=tx)
  return trainers.run(step, state, trainers.batches(steps))


if __name__ == "__main__":
  trainers.main(__doc__, train)
