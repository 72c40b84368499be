"""Trains on digits in jax.shard_map: python -m examples.digits_shard_map [--plain]."""

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
  layers = linen.Dense(512), linen.relu, linen.Dense(512), linen.relu, linen.Dense(10)
  network, optimizer = linen.Sequential(layers), optax.adam(1e-3)
  if not plain:  # this line compresses: it encodes, exchanges and averages
    optimizer = optax.chain(gradcomp.qsgd(bits=4, axis_name="data"), optimizer)

  def loss_fn(params, x, y):
    logits = network.apply(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

  def train_step(params, state, x, y):  # as jax.value_and_grad, of a worker's own part
    loss, grads = gradcomp.value_and_grad(loss_fn, axis_name="data")(params, x, y)
    if plain:  # what it replaces
      grads = lax.pmean(grads, "data")
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  mesh = jax.make_mesh((jax.device_count(),), ("data",))
  cut = jax.NamedSharding(mesh, jax.P("data"))  # each worker has some of the images
  images, labels = load_digits(return_X_y=True)
  batches = np.random.default_rng(0).integers(len(labels), size=(steps, 64))
  params = network.init(jax.random.key(0), np.float32(images[:1]))
  with jax.set_mesh(mesh):
    state = optimizer.init(params)
  specs = gradcomp.state_specs(state, axis_name="data")  # residuals have "data"
  given, taken = (jax.P(), specs, cut.spec, cut.spec), (jax.P(), specs, jax.P())
  step = jax.jit(jax.shard_map(train_step, mesh=mesh, in_specs=given, out_specs=taken))
  for number, chosen in enumerate(batches):
    x, y = jax.device_put((np.float32(images[chosen] / 16), labels[chosen]), cut)
    params, state, loss = jax.block_until_ready(step(params, state, x, y))
    if number % 10 == 0:
      print(f"step {number}: loss {loss:.4f}")
  print(gradcomp.wire_report(step.lower(params, state, x, y)))


if __name__ == "__main__":
  main(plain="--plain" in sys.argv)
