"""The pattern of MaxText: a scanned decoder, one jitted step, and a tensor axis.

One line puts 4 bits in front of the optimizer, one takes each worker's gradient, one
makes the state of each shard, and one says which axes shard the parameters.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import gradcomp
from examples.lib import trainers

SHAPES = {"embed": (256, 128), "qkv": (2, 3, 4, 128, 32), "out": (2, 1, 4, 32, 128)}
SHAPES |= {"up": (2, 1, 4, 128, 128), "down": (2, 1, 4, 128, 128)}  # of two layers
SPECS = {name: jax.P(None, None, "tensor") for name in SHAPES} | {"embed": jax.P()}


def block(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
  norm = lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
  qkv = jnp.einsum("btd,chdk->cbthk", norm(x), w["qkv"])
  heads = jax.nn.dot_product_attention(*qkv, is_causal=True)
  x += jnp.einsum("bthk,chkd->btd", heads, w["out"])
  wide = jax.nn.gelu(jnp.einsum("btd,chdf->bthf", norm(x), w["up"]))
  return x + jnp.einsum("bthf,chfd->btd", wide, w["down"]), None


def loss_fn(params: Any, batch: Any) -> jax.Array:
  x, layers = params["embed"][batch.inputs], params | {"embed": None}
  x, _ = jax.lax.scan(jax.checkpoint(block), x, layers)
  losses = optax.softmax_cross_entropy_with_integer_labels
  return losses(x @ params["embed"].T, batch.labels).mean()


def train(steps: int, compressed: bool) -> tuple[float, Any]:
  tx, grad_fn = optax.adam(3e-3), jax.value_and_grad(loss_fn)
  draw = lambda name: 0.06 * jax.random.normal(jax.random.key(0), SHAPES[name])
  params = jax.device_put({name: draw(name) for name in SHAPES}, SPECS)
  state = params, tx.init(params)
  if compressed:
    over = {"axis_name": "data", "param_specs": SPECS}
    tx = optax.chain(gradcomp.qsgd(bits=4, axis_name="data"), tx)
    state = params, gradcomp.init_state(tx, params, **over)
    grad_fn = gradcomp.value_and_grad(loss_fn, **over)

  def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
    loss, grads = grad_fn(state[0], batch)
    updates, opt_state = tx.update(grads, state[1], state[0])
    return (optax.apply_updates(state[0], updates), opt_state), loss

  return trainers.run(jax.jit(step, donate_argnums=0), state, trainers.sequences(steps))


if __name__ == "__main__":
  trainers.main(__doc__, train, axes={"data": 4, "tensor": 2})
