"""A small transformer whose layers are unrolled or scanned, as shapes alone."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Params = dict[str, Any]


class Net(NamedTuple):
  """A decoder-only transformer, as small as messages of large models allow."""

  layers: int = 4
  width: int = 256
  heads: int = 4
  symbols: int = 1024
  length: int = 128
  scanned: bool = False
  dtype: Any = jnp.float32

  def params(self) -> Params:
    d = self.width
    of = lambda *shape: jax.ShapeDtypeStruct(shape, self.dtype)
    layer = {"norm1": of(d), "attend": of(d, 3 * d), "mix": of(d, d)}
    layer |= {"norm2": of(d), "widen": of(d, 4 * d), "narrow": of(4 * d, d)}
    if self.scanned:
      layers: Any = {name: of(self.layers, *x.shape) for name, x in layer.items()}
    else:
      layers = [layer] * self.layers
    return {"embed": of(self.symbols, d), "layers": layers, "norm": of(d)}

  def size(self) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(self.params()))

  def loss(self, params: Params, tokens: jax.Array) -> jax.Array:
    """Computes the mean loss of each next token, ``int32[batch, length + 1]``."""
    x = params["embed"][tokens[:, :-1]]
    x = self.body(params["layers"], x)
    logits = _normed(x, params["norm"]) @ params["embed"].T
    found = jax.nn.log_softmax(logits.astype(jnp.float32))
    labels = jax.nn.one_hot(tokens[:, 1:], self.symbols)
    return -jnp.mean(jnp.sum(found * labels, axis=-1))

  def body(self, layers: Any, x: jax.Array) -> jax.Array:
    if self.scanned:
      step = lambda x, layer: (self.layer(layer, x), None)
      return jax.lax.scan(step, x, layers)[0]
    for layer in layers:
      x = self.layer(layer, x)
    return x

  def layer(self, params: Params, x: jax.Array) -> jax.Array:
    """Applies attention and two dense layers, each added to its input."""
    batch, length, width = x.shape
    given = _normed(x, params["norm1"]) @ params["attend"]
    heads = given.reshape(batch, length, self.heads, -1)
    query, key, value = jnp.split(heads, 3, axis=-1)
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x += mixed.reshape(batch, length, width) @ params["mix"]
    wide = jax.nn.gelu(_normed(x, params["norm2"]) @ params["widen"])
    return x + wide @ params["narrow"]


def _normed(x: jax.Array, scale: jax.Array) -> jax.Array:
  whole = x.astype(jnp.float32)
  root = jax.lax.rsqrt(jnp.mean(whole**2, axis=-1, keepdims=True) + 1e-6)
  return (whole * root).astype(x.dtype) * scale
