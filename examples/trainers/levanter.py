"""Levanter, ``Trainer``.

A method returns the mean of the replicas that 4 bits sent.
"""

from typing import Any

import haliax
import jax
import jax.numpy as jnp
import optax
from levanter import tracker, trainer
from levanter.models import gpt2, lm_model, loss

import gradcomp
from examples.lib import trainers


class CompressedTrainer(trainer.Trainer):
  def _compute_gradients_microbatched(self, loss_fn: Any, *given: Any, key: Any) -> Any:
    specs = haliax.partitioning.pspec_for(given[0], self.parameter_axis_mapping)
    over = {"axis_name": "replica", "batch_argnums": 1, "param_specs": specs}
    with haliax.axis_mapping(self.compute_axis_mapping):
      grad_fn = gradcomp.value_and_grad(loss_fn, has_aux=True, **over)
      (value, metrics), grads = grad_fn(*given, key=key)
    over = {"param_specs": jax.tree.map(lambda g: g.spec, grads)}
    over["key"] = jax.lax.bitcast_convert_type(value, jnp.uint32)  # new in each step
    rows, codec = jax.tree.map(lambda g: g.rows, grads), gradcomp.codecs.QSGD(bits=4)
    mean = gradcomp.mean_over(rows, codec=codec, mesh_axis="replica", **over)
    return value, mean, metrics


def loss_fn(model: Any, x: lm_model.LmExample, *, key: Any) -> Any:
  logits = model(x.tokens, x.attn_mask, key=key)
  return loss.next_token_loss(model.Pos, model.Vocab, logits, x.tokens, x.loss_weight)


def train(steps: int, compressed: bool) -> tuple[float, Any]:
  kind = trainer.Trainer
  if compressed:
    kind = CompressedTrainer
  given = {"id": "example", "num_train_steps": steps, "train_batch_size": 32}
  given |= {"mesh": trainer.MeshConfig(axes={"data": 2, "replica": 4})}
  given |= {"tracker": tracker.NoopConfig(), "log_jaxprs": False, "log_xla_hlo": False}
  config, tokens = trainer.TrainerConfig(**given), haliax.Axis("vocab", 256)
  model = gpt2.Gpt2Config(max_seq_len=32, hidden_dim=64, num_layers=2, num_heads=4)
  build = lambda: model.build(tokens, key=jax.random.key(0))
  with kind(config, optax.adam(3e-3), loss_fn, add_default_hooks=False) as own:
    state = own.initial_state(jax.random.key(1), model_init=build)
    named = lambda x: haliax.named(jnp.asarray(x), ("batch", "position"))
    feed = (named(x.inputs) for x in trainers.sequences(steps))
    feed = [lm_model.LmExample(tokens=x, loss_weight=x * 0 + 1.0) for x in feed]
    info = own.train(state, feed)
    return info.loss, own._jit_train_step_fn_no_hook.lower(info.state, feed[-1:], {})


if __name__ == "__main__":
  trainers.main(__doc__, train, axes={"data": 2, "replica": 4}, over="replica")
