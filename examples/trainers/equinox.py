"""Equinox, ``eqx.filter_jit``.

One line puts 4 bits in front of the optimizer, and one takes each worker's gradient.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import gradcomp
from examples.lib import trainers


def train(steps: int, compressed: bool) -> tuple[float, Any]:
  tx = optax.adam(3e-3)
  grad = eqx.filter_value_and_grad
  if compressed:
    tx = optax.chain(gradcomp.qsgd(bits=4, axis_name="data"), tx)
    grad = lambda loss_fn: gradcomp.value_and_grad(loss_fn, axis_name="data")

  def loss_fn(network: eqx.nn.MLP, batch: Any) -> jax.Array:
    return jnp.mean((jax.vmap(network)(batch["x"]) - batch["y"]) ** 2)

  @eqx.filter_jit
  def step(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
    network, state = carry
    loss, grads = grad(loss_fn)(network, batch)
    updates, state = tx.update(grads, state, eqx.filter(network, eqx.is_inexact_array))
    return (eqx.apply_updates(network, updates), state), loss

  sizes = trainers.WIDTH, trainers.CLASSES, 256, 2
  network = eqx.nn.MLP(*sizes, activation=jnp.tanh, key=jax.random.key(0))
  state = tx.init(eqx.filter(network, eqx.is_inexact_array))
  return trainers.run(step, (network, state), trainers.batches(steps))


if __name__ == "__main__":
  trainers.main(__doc__, train)
