"""Residuals: their storage in 32, 16 or 8 bits."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcomp._src.kernels.common.fixed_point import FRACTION, held
from gradcomp._src.kernels.common.scales import norms
from gradcomp._src.kernels.common.threefry import threefry2x32
from gradcomp._src.kernels.materialize import materialized

Storage = Literal["float32", "bfloat16", "int8"]

_LANES = 8  # elements that share a block of the cipher
_ROUNDS = 13  # of the cipher, as for dithers
_BLOCK = 256  # elements with one scale, at most
_FEWEST = 16  # and at least, unless the last axis is shorter
_TOP = 127


class Int8Residual(NamedTuple):
  """The residual of a leaf, as integers of 8 bits and scales that are powers of two."""

  # An element is its code times the scale of its block, a part of the last axis.
  codes: jax.Array  # int8, in the shape of the residual
  scales: jax.Array  # float32[..., blocks]


Stored = jax.Array | Int8Residual


def storage(name: str, value: Any) -> Storage:
  """Returns the name of a storage format of residuals; ValueError otherwise."""
  choices = get_args(Storage)
  try:
    found: Any = None if isinstance(value, np.generic) else jnp.dtype(value).name
  except TypeError:
    found = None
  if value is None or found not in choices:
    raise ValueError(
      f"`{name}` must be float32, bfloat16 or int8, as a dtype or its name, got "
      f"{value!r}."
    )
  return found


def is_stored(node: Any) -> bool:
  """Returns True for :class:`Int8Residual`; it is meant for ``is_leaf``."""
  return isinstance(node, Int8Residual)


def kind(residual: Any) -> Storage:
  """Returns the storage format of a leaf's residual."""
  return "int8" if is_stored(residual) else residual.dtype.name


def check_kind(residual: Any, first: Callable[[tuple[int, ...]], Stored]) -> None:
  """Raises ValueError for residuals in another storage format than ``first`` makes."""
  wanted = kind(jax.eval_shape(lambda: first((1,))))
  for path, leaf in jax.tree_util.tree_leaves_with_path(residual, is_leaf=is_stored):
    if (found := kind(leaf)) != wanted:
      raise ValueError(
        f"`state.residual`{jax.tree_util.keystr(path)} must be stored as {wanted}, as "
        f"`feedback` has it, got {found}; make the state with this transformation, or "
        f"give feedback=gradcomp.ErrorFeedback(residual_dtype={found!r})."
      )


def shaped(residual: Any) -> Any:
  """Returns the arrays in a tree of residuals that have the leaves' shapes."""
  codes = lambda x: x.codes if is_stored(x) else x
  return jax.tree.map(codes, residual, is_leaf=is_stored)


def zeros(shape: tuple[int, ...], stored: Storage) -> Stored:
  """Returns the first residual of a leaf of this shape, of at least one axis."""
  if stored != "int8":
    return jnp.zeros(shape, stored)
  scales = jnp.zeros(_blocks(shape)[:-1], jnp.float32)
  return Int8Residual(jnp.zeros(shape, jnp.int8), scales)


def read_residual(residual: Stored) -> jax.Array:
  """Returns the residual of a leaf as floats; a product with a scale is exact."""
  if not isinstance(residual, Int8Residual):
    return residual
  blocks = _cut(residual.codes.shape, residual.scales.shape[-1])
  codes = residual.codes.reshape(blocks)
  values = codes.astype(jnp.float32) * residual.scales[..., None]
  return values.reshape(residual.codes.shape)


def lanes(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Draws random ``uint16`` of this shape, uniform and pairwise independent."""
  size = math.prod(shape)
  blocks = lax.iota(jnp.uint32, -(-size // _LANES))

  def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    return threefry2x32(key, (jnp.zeros_like(blocks), blocks), _ROUNDS)

  # Materialized: XLA would fuse the cipher into each of the four words that read it.
  a, b = materialized(draw, key)

  def spread(a: jax.Array) -> jax.Array:
    words = jnp.concatenate([a, b, a ^ b, a ^ ((b << 16) | (b >> 16))])
    return lax.bitcast_convert_type(words, jnp.uint16).reshape(-1)[:size]

  return materialized(spread, a).reshape(shape)


def to_bfloat16(x: jax.Array, lane: jax.Array) -> jax.Array:
  """Rounds ``float32`` to a finite neighbor in ``bfloat16``, unbiased."""
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  most = jnp.uint32(0x7F7FFFFF)
  magnitude = jnp.minimum((bits & jnp.uint32(0x7FFFFFFF)) + lane, most)
  kept = (magnitude | (bits & jnp.uint32(1 << 31))) >> FRACTION
  return lax.bitcast_convert_type(kept.astype(jnp.uint16), jnp.bfloat16)


def to_int8(x: jax.Array, lane: jax.Array, blocks: int | None = None) -> Int8Residual:
  """Rounds finite ``float32`` to multiples of the scale of its block, unbiased."""
  # The scale is the least power of two, 2**-126 or more, whose 127-fold reaches the
  # largest magnitude: multiples of an old scale stay. `lane` is uniform uint16.
  shape = x.shape
  cut = _blocks(shape) if blocks is None else _cut(shape, blocks)
  x, lane = x.reshape(cut), lane.reshape(cut)
  bits = lax.bitcast_convert_type(held(norms(x, "max"))[..., None], jnp.uint32)
  # The exponent of the largest, or the next if more than 127/64 of its power of two,
  # and 6 less, which is 1/64. The highest one has no next.
  exponent = jnp.clip((bits + jnp.uint32(0x1FFFF)) >> 23, 7, 254) - 6
  scale, inverse = (
    lax.bitcast_convert_type(power << 23, jnp.float32)
    for power in (exponent, 254 - exponent)
  )
  # Products with powers of two are exact, and the rest is integers: all modes agree.
  fixed = jnp.round(x * inverse * (1 << FRACTION)).astype(jnp.int32)
  top = _TOP << FRACTION
  codes = (jnp.clip(fixed, -top, top) + lane.astype(jnp.int32)) >> FRACTION
  return Int8Residual(codes.astype(jnp.int8).reshape(shape), scale[..., 0])


def _blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
  """Returns the shape with its last axis split into blocks of one scale each."""
  *lead, last = shape
  sizes = range(min(_BLOCK, last), _FEWEST - 1, -1)
  size = next((size for size in sizes if last % size == 0), max(last, 1))
  return (*lead, last // size, size)


def _cut(shape: tuple[int, ...], blocks: int) -> tuple[int, ...]:
  """Returns the shape with its last axis split into ``blocks`` blocks."""
  *lead, last = shape
  # From the stored scales, not from _blocks: where a leaf is sharded over Auto axes,
  # each device's shard of the residual has its own blocks, and it is read as a whole.
  return (*lead, blocks, last // blocks if blocks else 1)
