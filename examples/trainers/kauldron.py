"""Kauldron, ``TrainStep``.

One line puts 4 bits in front of the optimizer, a method takes each worker's gradient.
"""

from typing import Any

import jax
import optax
from kauldron import kd, kontext
from kauldron.train.train_step import forward_with_loss

import gradcomp
from examples.lib import trainers
from examples.trainers.linen import Network


class CompressedStep(kd.train.TrainStep):
  def _step(self, state: kd.train.TrainState, batch: Any) -> Any:
    def loss_fn(params: Any, batch: Any) -> Any:
      context = kd.train.Context(state.step, batch, params, state.collections)
      how = {"model": self.model, "losses": self.aux.losses, "is_training": True}
      rngs = self.rng_streams.train_rngs(state.step)
      loss, context = forward_with_loss(context, rngs=rngs, **how)
      context = self.aux.update_context(context)
      return loss, context.replace(batch=None, preds=None, interms=None)

    grad_fn = gradcomp.value_and_grad(loss_fn, axis_name="devices", has_aux=True)
    (_, context), grads = grad_fn(state.params, batch)
    updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
    new = {"step": state.step + 1, "collections": context.collections}
    new["params"] = optax.apply_updates(state.params, updates)
    return state.replace(opt_state=opt_state, **new), context


class Model(Network):
  x: kontext.Key = "batch.x"


def train(steps: int, compressed: bool) -> tuple[float, Any]:
  tx, kind = optax.adam(3e-3), kd.train.TrainStep
  if compressed:
    tx = optax.chain(gradcomp.qsgd(bits=4, axis_name="devices"), tx)
    kind = CompressedStep
  losses = {"l2": kd.losses.L2(preds="preds", targets="batch.y")}
  given = {"aux": kd.train.Auxiliaries(losses=losses, metrics={}, summaries={})}
  given |= {"model": Model(), "sharding": kd.sharding.ShardingStrategy()}
  given["init_transform"] = kd.ckpts.NoopTransform()
  step = kind(optimizer=tx, rng_streams=kd.train.RngStreams(seed=0), **given)
  state = step.init(jax.tree.map(jax.typeof, next(trainers.batches(1))))
  for batch in jax.device_put(list(trainers.batches(steps)), kd.sharding.FIRST_DIM):
    state, aux = step.step(state, batch, return_losses=True)
    loss = float(aux.loss_states["l2"].compute())
  return loss, type(step).step.lower(step, state, batch)


if __name__ == "__main__":
  trainers.main(__doc__, train, axes={"devices": 8})
