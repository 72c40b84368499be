"""The leaves of the laws, and the keys and contexts to encode them with."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from gradcomp._src.codecs.leaf import Context, Leaf
from gradcomp._src.codecs.memory import first_memory, leaf_context
from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.codecs.rounds import rounds_of

# Words of the golden ratio and of a hash, because no bit of them is special.
KEY = np.array([0x9E3779B9, 0x7F4A7C15], np.uint32)


def gaussian(shape: int | tuple[int, ...], seed: int = 0) -> np.ndarray:
  """Returns Gaussian numbers, ``float32``, equal for equal seeds.

  Example:
    >>> gaussian(3).shape, bool((gaussian(3) == gaussian(3)).all())
    ((3,), True)
  """
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tile_of(codec: LeafCodec) -> int | None:
  """Returns the elements of a row; None if they depend on the leaf.

  Example:
    >>> tile_of(gradcomp.codecs.QSGD(bits=4)), tile_of(gradcomp.codecs.TopK())
    (4096, None)
  """
  found = set()
  for shape in ((6, 13), (45, 46)):
    parts = rounds_of(codec.bind(Leaf(shape)), shape)
    found |= {part.codec.tile_size if part.of_leaf else None for part in parts}
  return found.pop() if len(found) == 1 else None


def ragged(codec: LeafCodec) -> tuple[int, ...]:
  """Returns the shape of a leaf of two rows and a part of a third.

  If rows depend on the leaf, it is a matrix.

  Example:
    >>> ragged(gradcomp.codecs.QSGD(bits=4)), ragged(gradcomp.codecs.PowerSGD())
    ((8269,), (45, 46))
  """
  tile = tile_of(codec)
  return (45, 46) if tile is None else (2 * tile + 77,)


def leaf_of(codec: LeafCodec, x: ArrayLike | None) -> np.ndarray:
  """Returns the given leaf, or a Gaussian one of the shape of :func:`ragged`."""
  return gaussian(ragged(codec)) if x is None else np.asarray(x)


def first_context(codec: LeafCodec, leaf: Leaf) -> Context:
  """Returns the context of a bound codec in the first step of a worker."""
  memory = first_memory(codec, leaf, jnp.zeros(2, jnp.uint32))
  return leaf_context(codec, None, memory, jnp.zeros([], jnp.int32))


def key_of(codec: LeafCodec, key: ArrayLike) -> jax.Array | None:
  """Returns a key for a codec that needs one; else None."""
  return jnp.asarray(key) if codec.needs_key else None
