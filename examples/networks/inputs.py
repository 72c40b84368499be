"""Prepares the inputs of the networks."""

import jax
import jax.numpy as jnp


def centred(images: jax.Array) -> jax.Array:
  """Maps bytes, 0 to 255, to float32 from -1 to 1."""
  return images.astype(jnp.float32) / 127.5 - 1.0
