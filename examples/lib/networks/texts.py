"""Networks for text: two recurrent ones of flax nnx, a transformer of flax linen."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.nnx import Rngs

TURNING = nnx.initializers.orthogonal()


class GRU(nnx.Module):
  """A gated recurrent unit. It has 0.35 million parameters with ASCII characters."""

  def __init__(self, symbols: int, *, width: int = 128, hidden: int = 256, rngs: Rngs):
    self.embed = nnx.Embed(symbols, width, rngs=rngs)
    self.inputs = nnx.Linear(width, 3 * hidden, rngs=rngs)
    self.recurrent = nnx.Linear(hidden, 3 * hidden, kernel_init=TURNING, rngs=rngs)
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
  """Two layers of long short-term memory. The output layer is the embedding."""

  def __init__(
    self,
    symbols: int,
    *,
    width: int = 256,
    layers: int = 2,
    dropout: float = 0.2,
    rngs: Rngs,
  ):
    # Small, for logits are products with the embedding.
    small = nnx.initializers.normal(0.05)
    self.embed = nnx.Embed(symbols, width, embedding_init=small, rngs=rngs)
    self.layers = nnx.List([LSTMLayer(width, rngs=rngs) for _ in range(layers)])
    self.dropout = nnx.Dropout(dropout)
    self.bias = nnx.Param(jnp.zeros(symbols))

  def __call__(self, tokens: jax.Array, *, rngs: Rngs | None = None) -> jax.Array:
    x = self.dropout(self.embed(tokens.astype(jnp.int32)), rngs=rngs)
    for layer in self.layers:
      x = self.dropout(layer(x), rngs=rngs)
    return self.embed.attend(x) + self.bias[...]


class LSTMLayer(nnx.Module):
  """A layer of memory cells. All four gates are one product."""

  def __init__(self, width: int, *, rngs: Rngs):
    self.inputs = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
    self.recurrent = nnx.Linear(width, 4 * width, kernel_init=TURNING, rngs=rngs)

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
  """Makes states that differ between workers to jax.shard_map, as later ones do."""
  return 0 * given[:, 0, :size]


def _scanned(step: Callable[..., Any], start: Any, given: jax.Array) -> jax.Array:
  """Takes a step for each position of ``given``, along the second axis."""
  _, states = jax.lax.scan(step, start, given.swapaxes(0, 1))
  return states.swapaxes(0, 1)


class Transformer(linen.Module):
  """A decoder whose output layer is the embedding. Positions are angles (Su, 2021)."""

  symbols: int
  width: int = 128  # of each head an even number
  heads: int = 4
  layers: int = 2
  block: type[linen.Module] | None = None  # in place of Block, as fsdp_linen.py has it
  dropout: float = 0.0
  stacked: bool = False  # whether blocks are one loop, over stacked parameters

  @linen.compact
  def __call__(self, tokens: jax.Array, train: bool = False, scan: Any = jax.lax.scan):
    rate = self.dropout if train else 0.0
    block = self.block or functools.partial(Block, dropout=rate)
    embed = linen.Embed(self.symbols, self.width, name="embed")
    x = linen.Dropout(rate, deterministic=False)(embed(tokens.astype(jnp.int32)))
    if self.stacked:
      x = self._scanned(block, x, scan, drops=rate > 0)
    else:
      for i in range(self.layers):
        x = block(self.heads, name=f"block{i}")(x)
    return embed.attend(_norm("norm")(x))

  def _scanned(self, block: Any, x: jax.Array, scan: Any, *, drops: bool) -> jax.Array:
    """Applies all blocks in a loop, with a key for the dropout of each."""
    module = block(self.heads, parent=None)

    def init(key: jax.Array) -> Any:
      of_one = lambda key: module.init({"params": key, "dropout": key}, x)["params"]
      return jax.vmap(of_one)(jax.random.split(key, self.layers))

    def layer(x: jax.Array, given: Any) -> tuple[jax.Array, None]:
      params, key = given
      rngs = {} if key is None else {"dropout": key}
      return module.apply({"params": params}, x, rngs=rngs), None

    keys = jax.random.split(self.make_rng("dropout"), self.layers) if drops else None
    return scan(layer, x, (self.param("blocks", init), keys))[0]


class Block(linen.Module):
  """Attention and two dense layers, each normalized before and added to its input."""

  heads: int
  dropout: float = 0.0  # of what is added

  @linen.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    width = x.shape[-1]
    drop = linen.Dropout(self.dropout, deterministic=False)
    dense = lambda size, name: linen.Dense(size, use_bias=False, name=name)
    given = dense(3 * width, "attend")(_norm("norm1")(x))
    heads = given.reshape(*x.shape[:2], self.heads, -1)
    query, key, value = jnp.split(heads, 3, axis=-1)
    x += drop(dense(width, "mix")(attention(turned(query), turned(key), value)))
    wide = linen.gelu(dense(4 * width, "widen")(_norm("norm2")(x)))
    return x + drop(dense(width, "narrow")(wide))


def _norm(name: str) -> linen.LayerNorm:
  return linen.LayerNorm(use_bias=False, name=name)


def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
  """Averages the values of all positions up to each query's own."""
  length, size = query.shape[1], query.shape[-1]
  scores = jnp.einsum("bqhs,bkhs->bhqk", query, key) / size**0.5
  seen = jnp.tril(jnp.ones((length, length), bool))
  weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
  mixed = jnp.einsum("bhqk,bkhs->bqhs", weights, value)
  return mixed.reshape(*mixed.shape[:2], -1)


def turned(x: jax.Array) -> jax.Array:
  """Turns pairs by angles, so that products depend on the distance of positions."""
  length, half = x.shape[1], x.shape[-1] // 2
  rates = 10000.0 ** (-jnp.arange(half) / half)
  angles = (jnp.arange(length)[:, None] * rates)[:, None]  # [length, 1, half]
  a, b = jnp.split(x, 2, axis=-1)
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
