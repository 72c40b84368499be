"""Trains by AdamW of the plain mean, and hands out the gradients of each step."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.training import adam
from benchmarks.training.adam_arms import DECAY


def plain_steps(
  found: adam.Problem, rate: Any, steps: int, seed: int, dtype: Any = jnp.float32
) -> Iterator[Any]:
  """Trains by AdamW of the plain mean, and yields the workers' gradients in a dtype."""
  tx, workers = optax.adamw(rate, weight_decay=DECAY), jnp.arange(adam.WORKERS)
  key, first = jax.random.split(jax.random.key(seed))
  params = found.init(first)

  @jax.jit
  def step(params: Any, state: Any, number: jax.Array) -> Any:
    def of_worker(own: jax.Array) -> Any:
      at = jax.random.fold_in(jax.random.fold_in(key, number), own)
      grads = jax.grad(found.loss)(params, found.draw(at))
      return jax.tree.map(lambda x: x.astype(dtype), grads)

    grads = jax.vmap(of_worker)(workers)
    updates, state = tx.update(mean_of(grads), state, params)
    return optax.apply_updates(params, updates), state, grads

  state = tx.init(params)
  for number in range(steps):
    params, state, grads = step(params, state, jnp.asarray(number))
    yield grads


def mean_of(grads: Any) -> Any:
  """Returns the mean of the workers' gradients, in float32."""
  return jax.tree.map(lambda x: x.astype(jnp.float32).mean(0), grads)
