"""Tunix, ``PeftTrainer``.

One line puts 4 bits in front of the optimizer, a method takes each worker's gradient.
"""

from typing import Any

import jax
import optax
from flax import nnx
from tunix import PeftTrainer, TrainingConfig

import gradcomp
from examples.lib import trainers
from examples.trainers.nnx import Network


class CompressedTrainer(PeftTrainer):
  def _train_step(self, model: nnx.Module, optimizer: Any, inputs: Any) -> Any:
    graph, params, others = nnx.split(model, optimizer.wrt, ...)

    def loss_fn(params: Any, inputs: Any, others: Any) -> jax.Array:
      return self.loss_fn(nnx.merge(graph, params, others), **inputs)

    inputs = self.gen_model_input_fn(inputs)
    over = {"axis_name": self.config.data_sharding_axis, "batch_argnums": 1}
    grad_fn = gradcomp.value_and_grad(loss_fn, **over)
    loss, grads = grad_fn(params, inputs, others)
    return loss, None, optax.global_norm(optimizer.update(model, grads))


def train(steps: int, compressed: bool) -> tuple[float, Any]:
  tx, kind = optax.adam(3e-3), PeftTrainer
  if compressed:
    tx = optax.chain(gradcomp.qsgd(bits=4, axis_name="fsdp"), tx)
    kind = CompressedTrainer

  def loss_fn(network: Network, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.l2_loss(network(x), y).mean() * 2

  network = Network(rngs=nnx.Rngs(0))
  config = TrainingConfig(eval_every_n_steps=steps, max_steps=steps)
  trainer = kind(network, tx, config).with_loss_fn(loss_fn)
  with jax.sharding.get_mesh():
    trainer.train(batches := list(trainers.batches(steps)))
  batch = jax.device_put(batches[-1], jax.P("fsdp"))
  step = nnx.jit(trainer.create_train_step_fn())
  lowered = step.lower(network, trainer.optimizer, batch)
  return float(loss_fn(network, **batch)), lowered


if __name__ == "__main__":
  trainers.main(__doc__, train, axes={"fsdp": 8})
