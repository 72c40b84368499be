"""64-bit fingerprints of trees, for comparing copies of them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcomp._src.core.state import name_words
from gradcomp._src.mesh import types

_SMALL = 2**14  # elements
_GOLDEN = np.uint32(0x9E3779B9)  # odd, so that places stay different modulo 2**32


def fingerprint(tree: Any) -> jax.Array:
  r"""Returns 64 bits that depend on every bit of a tree: ``uint32[2]``.

  For the element :math:`i` of a leaf, with the bits :math:`x_i`, and a hash :math:`h`
  of 64 bits as two integers:

  .. math:: \sum_\text{leaves} \sum_i h(x_i, i, \text{leaf}) \bmod 2^{32}

  Every device and every sharding gives the same fingerprint. A change of one 32-bit
  word always changes it; any other is missed once in :math:`2^{64}` times, if the hash
  is random. It is no defense against forgery. A leaf counts with its path, dtype and
  shape. -0.0 differs from 0.0, and NaN differ by their payloads. In a map it is that of
  the worker's own arrays.

  Args:
    tree: arrays of any dtype.

  Raises:
    TypeError: a NumPy array is wider than JAX's dtypes.
    ValueError: a leaf is unreduced.

  Example:
    >>> fingerprint({"w": jnp.array([0.0, 1.0, 2.0, 3.0])}).tolist()
    [2787064721, 3521717586]
  """
  pairs = leaf_fingerprints(tree)
  return _added(pairs[:, 0], pairs[:, 1])


def leaf_fingerprints(tree: Any) -> jax.Array:
  """Returns the addends of :func:`fingerprint`, one a leaf: ``uint32[leaves, 2]``."""
  kept = jax.tree.leaves(jax.eval_shape(lambda tree: tree, tree))
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  for (path, leaf), like in zip(leaves, kept, strict=True):
    name = f"`tree`{jax.tree_util.keystr(path)}"
    if getattr(leaf, "dtype", like.dtype) != like.dtype:
      raise TypeError(
        f"{name} must have a dtype that JAX keeps, got {leaf.dtype}, which it would "
        f"turn into {like.dtype}; set jax_enable_x64, or cast it yourself."
      )
    if axes := types.unreduced_axes(leaf):
      raise ValueError(
        f"{name} must not be unreduced, got one over {sorted(axes)}, where each "
        "device holds an addend; reduce it first."
      )
  return _of_leaves(tree)


# Jitted, so that outside of a program, too, no words are materialized.
@jax.jit
def _of_leaves(tree: Any) -> jax.Array:
  pairs = jax.tree_util.tree_leaves_with_path(jax.tree.map(jnp.asarray, tree))
  leaves, text = [x for _, x in pairs], jax.tree_util.keystr
  names = [name_words(f"{text(path)} {x.dtype}{list(x.shape)}") for path, x in pairs]
  cut = [bool(types.sharded_over(x)) for x in leaves]
  seeds = np.array(names, np.uint32).reshape(-1, 2)
  # Small leaves of one shape share a program, or each would take as long to compile as
  # a large one.
  groups: dict[Any, list[int]] = {}
  for i, x in enumerate(leaves):
    alone = x.size > _SMALL or cut[i]
    groups.setdefault(i if alone else (x.shape, x.dtype), []).append(i)
  parts = [jnp.zeros((0, 2), jnp.uint32)]
  with jax.named_scope("gradcomp_fingerprint"):
    for first, *others in groups.values():
      if others:
        stacked = jnp.stack([leaves[i] for i in (first, *others)])
        parts.append(jax.vmap(_of_leaf)(stacked, seeds[np.array([first, *others])]))
      else:
        parts.append(_of_leaf(leaves[first], seeds[first], cut[first])[None])
    order = np.argsort([i for group in groups.values() for i in group])
    return jnp.concatenate(parts)[order.astype(np.int32)]


def _of_leaf(
  x: jax.Array, seeds: jax.Array | np.ndarray, cut: bool = False
) -> jax.Array:
  """Returns the fingerprint of a leaf, ``uint32[2]``; ``cut`` if types shard it."""
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  words, first = _words(x), jnp.zeros([], jnp.uint32)
  # The flat index of each element modulo 2**32, sharded like the leaf.
  sharding = jax.typeof(x).sharding if cut else None
  for axis in range(x.ndim):
    along = lax.broadcasted_iota(jnp.uint32, x.shape, axis, out_sharding=sharding)
    first = along * np.uint32(math.prod(x.shape[axis + 1 :]) % 2**32) + first
  first *= np.uint32(len(words))
  total = jnp.asarray(seeds)  # so that an empty leaf counts
  for number, word in enumerate(words):
    place = (first + np.uint32(number)) * _GOLDEN + seeds[0]
    total = _added(*_mixed(word, place, seeds[1])) + total
  return total


def _mixed(
  word: jax.Array, place: jax.Array, seed: jax.Array | np.uint32
) -> tuple[jax.Array, jax.Array]:
  """Returns two words, each a bijection of ``word``, from a word and its place."""
  # The first is a hash of the word XOR the place: two words that swap as their places
  # do leave its sum unchanged. The second distinguishes these.
  # The constants are lowbias32's, a short hash with output bits that flip nearly half
  # of the time: https://nullprogram.com/blog/2018/07/31/.
  first = word ^ place
  first = (first ^ (first >> 16)) * np.uint32(0x7FEB352D)
  first = (first ^ (first >> 15)) * np.uint32(0x846CA68B)
  first = first ^ (first >> 16)
  second = (first ^ ((place << 16) | (place >> 16))) * np.uint32(0x7FEB352D) + seed
  return first, second ^ (second >> 15)


def _added(first: jax.Array, second: jax.Array) -> jax.Array:
  """Returns the sums of two arrays modulo ``2**32``, ``uint32[2]``."""
  zero, axes = np.uint32(0), tuple(range(first.ndim))
  add = lambda a, b: (a[0] + b[0], a[1] + b[1])
  return jnp.stack(lax.reduce((first, second), (zero, zero), add, axes))


def _words(x: jax.Array) -> list[jax.Array]:
  """Returns the bits of each element as one or more ``uint32``."""
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    return [word for part in (x.real, x.imag) for word in _words(part)]
  if jnp.issubdtype(x.dtype, jnp.floating):
    # A dtype of four bits has 0.5 bytes.
    x = lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")
  if x.dtype.itemsize < 8:
    return [x.astype(jnp.uint32)]
  return [x.astype(jnp.uint32), (x >> 32).astype(jnp.uint32)]
