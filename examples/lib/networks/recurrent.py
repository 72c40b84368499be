"""Two recurrent nets: gated recurrent units, and long short-term memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class GRU(nnx.Module):
  """A gated recurrent unit. It has 0.35 million parameters with ASCII characters."""

  def __init__(
    self, symbols: int, *, width: int = 128, hidden: int = 256, rngs: nnx.Rngs
  ):
    self.embed = nnx.Embed(symbols, width, rngs=rngs)
    self.inputs = nnx.Linear(width, 3 * hidden, rngs=rngs)
    self.recurrent = nnx.Linear(
      hidden, 3 * hidden, kernel_init=nnx.initializers.orthogonal(), rngs=rngs
    )
    self.head = nnx.Linear(hidden, symbols, rngs=rngs)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    # All that does not wait for the state is one product for the whole sequence.
    given = self.inputs(self.embed(tokens.astype(jnp.int32)))
    kernel, bias = self.recurrent.kernel[...], self.recurrent.bias[...]

    def step(state: jax.Array, now: jax.Array) -> tuple[jax.Array, jax.Array]:
      reset, update, new = jnp.split(now, 3, axis=-1)
      r, u, n = jnp.split(state @ kernel + bias, 3, axis=-1)
      keep = nnx.sigmoid(update + u)
      fresh = nnx.tanh(new + nnx.sigmoid(reset + r) * n)
      state = keep * state + (1 - keep) * fresh
      return state, state

    return self.head(_scanned(step, _zeros(given, kernel.shape[0]), given))


class LSTM(nnx.Module):
  """Two layers of long short-term memory, with dropout around each.

  The output layer is the embedding, transposed, with a bias of its own. It has 1.1
  million parameters with ASCII characters.
  """

  def __init__(
    self,
    symbols: int,
    *,
    width: int = 256,
    layers: int = 2,
    dropout: float = 0.2,
    rngs: nnx.Rngs,
  ):
    # Small, for logits are products with the embedding.
    small = nnx.initializers.normal(0.05)
    self.embed = nnx.Embed(symbols, width, embedding_init=small, rngs=rngs)
    self.layers = nnx.List([LSTMLayer(width, rngs=rngs) for _ in range(layers)])
    self.dropout = nnx.Dropout(dropout)
    self.bias = nnx.Param(jnp.zeros(symbols))

  def __call__(self, tokens: jax.Array, *, rngs: nnx.Rngs | None = None) -> jax.Array:
    x = self.dropout(self.embed(tokens.astype(jnp.int32)), rngs=rngs)
    for layer in self.layers:
      x = self.dropout(layer(x), rngs=rngs)
    return self.embed.attend(x) + self.bias[...]


class LSTMLayer(nnx.Module):
  """A layer of memory cells. All four gates are one product."""

  def __init__(self, width: int, *, rngs: nnx.Rngs):
    self.inputs = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
    self.recurrent = nnx.Linear(
      width, 4 * width, kernel_init=nnx.initializers.orthogonal(), rngs=rngs
    )

  def __call__(self, x: jax.Array) -> jax.Array:
    given = self.inputs(x)
    kernel, bias = self.recurrent.kernel[...], self.recurrent.bias[...]

    def step(carry: Any, now: jax.Array) -> tuple[Any, jax.Array]:
      state, cell = carry
      gates = now + state @ kernel + bias
      write, keep, read, new = jnp.split(gates, 4, axis=-1)
      # At first a cell keeps most of what it has.
      cell = nnx.sigmoid(keep + 1) * cell + nnx.sigmoid(write) * nnx.tanh(new)
      state = nnx.sigmoid(read) * nnx.tanh(cell)
      return (state, cell), state

    start = _zeros(given, kernel.shape[0])
    return _scanned(step, (start, start), given)


def _zeros(given: jax.Array, size: int) -> jax.Array:
  """Makes states that differ between workers to jax.shard_map's types, as later ones.

  Args:
    given: ``[batch, length, at least size]``.
    size: of a state.
  """
  return 0 * given[:, 0, :size]


def _scanned(step: Callable[..., Any], start: Any, given: jax.Array) -> jax.Array:
  """Takes a step for each position of ``given``, along the second axis."""
  _, states = jax.lax.scan(step, start, given.swapaxes(0, 1))
  return states.swapaxes(0, 1)
