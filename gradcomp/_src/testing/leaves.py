"""Leaves and gradients that the laws try, and their encodings."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from gradcomp._src.codecs.protocol import LeafCodec, payload_of
from gradcomp._src.codecs.sums.records import Context, Encoded, Leaf, Payload
from gradcomp._src.floats.dtypes import has_smaller_range

# Words of the golden ratio and of a hash, because no bit of them is special. Of NumPy:
# an array of JAX would start a backend, before a process has joined others.
KEY = np.array([0x9E3779B9, 0x7F4A7C15], np.uint32)

SIZES = (0, 1, 2, 3, 31, 33, 127, 200)

Transformation = optax.GradientTransformation
Gradients = Sequence[Any]  # trees with leaves [N, ...], one tree a step


def gaussian(shape: int | tuple[int, ...], seed: int = 0) -> np.ndarray:
  """Returns Gaussian numbers, ``float32``, equal for equal seeds."""
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tile_of(codec: LeafCodec) -> int | None:
  """Returns the elements of a row; None if they depend on the leaf."""
  found = {codec.bind(Leaf(shape)).tile_size for shape in ((6, 13), (45, 46))}
  return found.pop() if len(found) == 1 else None


def ragged(codec: LeafCodec) -> tuple[int, ...]:
  """Returns a shape of two rows and a part of a third; or of a matrix, without rows."""
  tile = tile_of(codec)
  return (45, 46) if tile is None else (2 * tile + 77,)


def leaf_of(codec: LeafCodec, x: ArrayLike | None) -> np.ndarray:
  """Returns the given leaf, or a Gaussian one of the shape of :func:`ragged`."""
  return gaussian(ragged(codec)) if x is None else np.asarray(x)


def first_context(codec: LeafCodec, leaf: Leaf, key: ArrayLike = KEY) -> Context:
  """Returns the context of a leaf's codec in the first step of a worker."""
  memory = codec.bind(leaf).init(leaf, jnp.zeros(2, jnp.uint32))
  return Context(jnp.asarray(key), memory=memory, step=jnp.zeros([], jnp.int32))


def near_the_top(shape: tuple[int, ...], seed: int, dtype: DTypeLike) -> np.ndarray:
  """Returns gradients ``[N, ...]`` of equal signs; sums of three overflow the dtype."""
  rng = np.random.default_rng(seed)
  signs = rng.choice([-1.0, 1.0], shape[1:])
  numbers = signs * rng.uniform(0.5, 0.95, shape) * float(jnp.finfo(dtype).max)
  return numbers.astype(dtype).astype(np.float32)


def gradients_like(params: Any, workers: int, seed: int = 0) -> Any:
  """Returns Gaussian gradients of all workers, leaves ``[N, ...]``.

  In dtypes with a smaller range than float32 they are near its end. Parameters are
  arrays, or their shapes and dtypes. Other seeds give other numbers.

  Example:
    >>> gradients_like({"w": jnp.zeros((2, 3))}, workers=4)["w"].shape
    (4, 2, 3)
  """
  numbers = itertools.count(1000 * seed)

  def make(x: jax.Array) -> jax.Array:
    given = (workers, *x.shape), next(numbers)
    small = jnp.issubdtype(x.dtype, jnp.floating) and has_smaller_range(x.dtype)
    found = near_the_top(*given, x.dtype) if small else gaussian(*given)
    return jnp.asarray(found.astype(x.dtype))

  return jax.tree.map(make, params)


def zipped(first: Any, *trees: Any) -> list[tuple[Any, ...]]:
  """Returns the path of each leaf, and the leaves of all trees there."""
  others = map(jax.tree.leaves, trees)
  every = zip(jax.tree_util.tree_leaves_with_path(first), *others, strict=True)
  return [(jax.tree_util.keystr(path), x, *rest) for (path, x), *rest in every]


class Trial(NamedTuple):
  """The encoding and the decodings of one leaf."""

  payload: Payload
  value: Any
  together: Any  # the tiles of its rows, decoded at once
  alone: Any  # each of them by itself


def encode(
  codec: LeafCodec, x: jax.Array, key: ArrayLike, context: Context | None = None
) -> Payload:
  """Encodes a leaf, by default with the context of a worker's first step."""
  leaf = Leaf(x.shape)
  bound = codec.bind(leaf)
  given = (context or first_context(codec, leaf))._replace(key=jnp.asarray(key))
  return payload_of(bound, x.astype(jnp.float32), given)


def decode(codec: LeafCodec, payload: Payload, like: jax.Array) -> jax.Array:
  return codec.bind(Leaf(like.shape)).decode(payload, like=like)


def round_trip(codec: LeafCodec, x: jax.Array, key: ArrayLike = KEY) -> jax.Array:
  return decode(codec, encode(codec, x, key), x)


def trial(codec: LeafCodec, x: ArrayLike, key: ArrayLike = KEY) -> Trial:
  """Returns the trial of a leaf in NumPy's arrays, by a program compiled once."""
  return jax.tree.map(np.asarray, _trial(codec, jnp.asarray(x), jnp.asarray(key)))


# By a smaller program than a trial's.
returned = jax.jit(round_trip, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def _trial(codec: LeafCodec, x: jax.Array, key: jax.Array) -> Trial:
  payload = encode(codec, x, key)
  rows, stats = payload
  lines = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(rows), x.shape[1])), stats)
  total = codec.bind(Leaf(x.shape)).sums
  tiles = lambda row, line: total.gathered(row[None], line, 1.0)(0, row.shape[0])
  alone = lambda row: tiles(*jax.tree.map(lambda part: part[None], row))[0]
  value = decode(codec, payload, x)
  return Trial(payload, value, tiles(rows, lines), jax.lax.map(alone, (rows, lines)))


@functools.partial(jax.jit, static_argnums=0)
def batch(codec: LeafCodec, x: jax.Array, keys: jax.Array) -> Encoded:
  """Encodes leaves ``[leaves, ...]`` by ``jax.vmap``."""
  leaf = Leaf(x.shape[1:])
  bound = codec.bind(leaf)

  def one(x: jax.Array, key: jax.Array) -> Encoded:
    given = first_context(codec, leaf, key)._replace(agreed=bound.agree(x))
    return bound.encode_leaf(x.astype(jnp.float32), given, keep=True)._replace(own=())

  return jax.vmap(one)(x, keys)
