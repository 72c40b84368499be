"""Trains on images of digits in jax.pmap: python -m examples.digits_pmap [--plain]."""

import sys

import jax
import numpy as np
import optax
from flax import linen
from jax import lax
from sklearn.datasets import load_digits

import gradcomp

jax.config.update("jax_num_cpu_devices", 8)  # emulates them; delete it for real devices


def main(steps: int = 100, plain: bool = False) -> None:
  workers, optimizer = jax.device_count(), optax.adam(1e-3)
  layers = linen.Dense(512), linen.relu, linen.Dense(512), linen.relu, linen.Dense(10)
  network = linen.Sequential(layers)
  if not plain:  # this line compresses: it encodes, exchanges and averages
    optimizer = optax.chain(gradcomp.qsgd(bits=4, axis_name="data"), optimizer)

  def loss_fn(params, x, y):
    logits = network.apply(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

  def train_step(params, state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    if plain:  # what it replaces
      grads = lax.pmean(grads, "data")
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, lax.pmean(loss, "data")

  step = jax.pmap(train_step, axis_name="data")
  images, labels = load_digits(return_X_y=True)
  drawn = steps, workers, 64 // workers  # images of a step, some on each worker
  batches = np.random.default_rng(0).integers(len(labels), size=drawn)
  params = network.init(jax.random.key(0), np.float32(images[:1]))
  params = jax.tree.map(lambda x: np.stack([x] * workers), params)  # each has a copy
  state = jax.pmap(optimizer.init, axis_name="data")(params)
  for number, chosen in enumerate(batches):
    x, y = np.float32(images[chosen] / 16), labels[chosen]
    params, state, loss = jax.block_until_ready(step(params, state, x, y))
    if number % 10 == 0:
      print(f"step {number}: loss {loss[0]:.4f}")
  print(gradcomp.wire_report(step.lower(params, state, x, y)))


if __name__ == "__main__":
  main(plain="--plain" in sys.argv)
