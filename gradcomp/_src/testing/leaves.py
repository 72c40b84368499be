"""Leaves and gradients that the laws try, and their encodings."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from gradcomp._src.codecs.protocol import Codec, LeafCodec, payload_of
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


def first_context(bound: Codec, leaf: Leaf, key: ArrayLike = KEY) -> Context:
  """Returns the context of a bound codec in the first step of a worker."""
  memory = bound.init(leaf, jnp.zeros(2, jnp.uint32))
  return Context(jnp.asarray(key), memory=memory, step=jnp.zeros([], jnp.int32))


def near_the_top(shape: tuple[int, ...], dtype: DTypeLike, seed: int = 0) -> np.ndarray:
  """Returns gradients ``[N, ...]`` of equal signs; sums of three overflow the dtype."""
  rng = np.random.default_rng(seed)
  signs = rng.choice([-1.0, 1.0], shape[1:])
  numbers = signs * rng.uniform(0.5, 0.95, shape) * float(jnp.finfo(dtype).max)
  return numbers.astype(dtype).astype(np.float32)


def gradients_like(params: Any, workers: int, seed: int = 0) -> Any:
  """Returns Gaussian gradients of all workers, leaves ``[N, ...]``.

  In dtypes with a smaller range than float32 they are near its end.

  Args:
    params: arrays, or their shapes and dtypes.
    workers: N.
    seed: other seeds give other numbers.

  Example:
    >>> gradients_like({"w": jnp.zeros((2, 3))}, workers=4)["w"].shape
    (4, 2, 3)
  """
  leaves, treedef = jax.tree.flatten(params)

  def make(x: jax.Array, seed: int) -> jax.Array:
    shape = (workers, *x.shape)
    small = jnp.issubdtype(x.dtype, jnp.floating) and has_smaller_range(x.dtype)
    numbers = near_the_top(shape, x.dtype, seed) if small else gaussian(shape, seed)
    return jnp.asarray(numbers.astype(x.dtype))

  made = [make(x, 1000 * seed + i) for i, x in enumerate(leaves)]
  return jax.tree.unflatten(treedef, made)


def params_of(gradients: Gradients) -> Any:
  """Returns parameters: the first worker's first gradients, in NumPy's arrays."""
  return jax.tree.map(lambda leaf: np.asarray(leaf)[0, ...], gradients[0])


def zipped(first: Any, *trees: Any) -> list[tuple[Any, ...]]:
  """Returns the path of each leaf, and the leaves of all trees there."""
  paths = jax.tree_util.tree_leaves_with_path(first)
  others = map(jax.tree.leaves, trees)
  names = [(jax.tree_util.keystr(path), leaf) for path, leaf in paths]
  return [(*pair, *rest) for pair, *rest in zip(names, *others, strict=True)]


class Trial(NamedTuple):
  """The encoding and the decodings of one leaf.

  Attributes:
    payload: the payload of the leaf.
    value: the decoded payload.
    together, alone: the tiles of its rows, decoded at once, and each by itself.
  """

  payload: Payload
  value: Any
  together: Any
  alone: Any


def encode(
  codec: LeafCodec, x: jax.Array, key: ArrayLike, context: Context | None = None
) -> Payload:
  """Encodes a leaf, by default with the context of a worker's first step."""
  leaf = Leaf(x.shape)
  bound = codec.bind(leaf)
  given = (context or first_context(bound, leaf))._replace(key=jnp.asarray(key))
  return payload_of(bound, x.astype(jnp.float32), given)


def decode(codec: LeafCodec, payload: Payload, like: jax.Array) -> jax.Array:
  return codec.bind(Leaf(like.shape)).decode(payload, like=like)


def round_trip(codec: LeafCodec, x: jax.Array, key: ArrayLike = KEY) -> jax.Array:
  return decode(codec, encode(codec, x, key), x)


def trial(codec: LeafCodec, x: ArrayLike, key: ArrayLike = KEY) -> Trial:
  """Returns the :class:`Trial` of a leaf in NumPy's arrays, by a program compiled once.

  Args:
    codec, x: the codec, and the leaf.
    key: the key of a codec that draws random numbers, two words.
  """
  return jax.tree.map(np.asarray, _trial(codec, jnp.asarray(x), jnp.asarray(key)))


@functools.partial(jax.jit, static_argnums=0)
def returned(codec: LeafCodec, x: ArrayLike) -> jax.Array:
  """Encodes and decodes a leaf, by a smaller program than a trial's."""
  return round_trip(codec, jnp.asarray(x))


@functools.partial(jax.jit, static_argnums=0)
def _trial(codec: LeafCodec, x: jax.Array, key: jax.Array) -> Trial:
  payload = encode(codec, x, key)
  rows, stats = payload
  spread = lambda x: jnp.broadcast_to(x, (rows.shape[0], x.shape[1]))
  lines = None if stats is None else spread(stats)
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
    given = first_context(bound, leaf, key)._replace(agreed=bound.agree(x))
    encoded = bound.encode_leaf(x.astype(jnp.float32), given, keep=True)
    return encoded._replace(own=())

  return jax.vmap(one)(x, keys)
