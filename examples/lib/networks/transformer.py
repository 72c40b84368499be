"""A decoder-only transformer in flax linen."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen


class Transformer(linen.Module):
  """A decoder that predicts each next symbol from all symbols before it.

  It has 0.41 million parameters with ASCII characters. The output layer is the
  embedding, transposed. Positions turn queries and keys (Su et al., 2021), so that
  sequences may have any length.
  """

  symbols: int
  width: int = 128  # of each head an even number
  heads: int = 4
  layers: int = 2
  block: type[linen.Module] | None = None  # in place of Block, as fsdp_linen.py has it
  dropout: float = 0.0
  stacked: bool = False  # whether blocks are one loop, over stacked parameters

  @linen.compact
  def __call__(
    self,
    tokens: jax.Array,
    train: bool = False,
    scan: Callable[..., Any] = jax.lax.scan,
  ) -> jax.Array:
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

  def _scanned(
    self, block: Any, x: jax.Array, scan: Callable[..., Any], *, drops: bool
  ) -> jax.Array:
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
  """Averages the values of all positions up to each query's own.

  Args:
    query: ``[batch, length, heads, size]``; key and value are alike.

  Returns:
    The heads side by side, ``[batch, length, heads * size]``.
  """
  length, size = query.shape[1], query.shape[-1]
  scores = jnp.einsum("bqhs,bkhs->bhqk", query, key) / size**0.5
  seen = jnp.tril(jnp.ones((length, length), bool))
  weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
  mixed = jnp.einsum("bhqk,bkhs->bqhs", weights, value)
  return mixed.reshape(*mixed.shape[:2], -1)


def turned(x: jax.Array) -> jax.Array:
  """Turns each pair of elements by an angle that is proportional to the position.

  So products of queries and keys depend on how far the positions are apart.

  Args:
    x: ``[batch, length, heads, size]``, where the two halves of ``size`` are pairs.
  """
  length, half = x.shape[1], x.shape[-1] // 2
  rates = 10000.0 ** (-jnp.arange(half) / half)
  angles = (jnp.arange(length)[:, None] * rates)[:, None]  # [length, 1, half]
  a, b = jnp.split(x, 2, axis=-1)
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
