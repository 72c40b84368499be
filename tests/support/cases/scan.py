"""A body of layers, a loss and numbers, of which sums are exact in any order."""

import jax
import jax.numpy as jnp
import numpy as np

WIDTH, ROWS = 32, 8
KEY = jax.random.key(3, impl="threefry2x32")


def whole(*shape, seed=0, most=1):
  """Whole numbers: with few of them, sums and products are exact in any order."""
  drawn = np.random.default_rng(seed).integers(-most, most, shape, endpoint=True)
  return drawn.astype(np.float32)


def layers_of(length, dtype=np.float32):
  """Whole layers, ``[L, ...]``; eight bits hold them as they are."""
  thin = (np.arange(WIDTH) % 4 == 0)[:, None] * whole(length, WIDTH, WIDTH, seed=1)
  return {"b": whole(length, WIDTH, seed=2).astype(dtype), "w": thin.astype(dtype)}


def body(x, layer):
  h = x @ layer["w"] + layer["b"]
  x = jnp.where(h > 0, h, 0).astype(x.dtype)
  return x, jnp.sum(x, 0)


def loss_of(values, weights):
  """A loss of the last layer and of the outputs of all, linear in them."""
  x, ys = values
  own = weights.astype(x.dtype)
  return jnp.sum(x[0] * own[0]) + jnp.sum(ys * own)
