"""Selection of the elements of largest magnitude, without sorting them all.

Only the survivors of a threshold are sorted; a small row is sorted as a whole.
"""

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.kernels.common.magnitudes import as_floats, magnitudes
from gradcomp._src.kernels.common.row_view import RowView
from gradcomp._src.kernels.common.thresholds import reaching
from gradcomp._src.kernels.compaction import count_bits, positions
from gradcomp._src.kernels.gpu.dispatch import Implementation


def largest(x: RowView, count: int, sign: jax.Array | None = None) -> jax.Array:
  """Returns the positions of the ``count`` elements of largest magnitude, in order.

  They are ``int32[count]``, ascending. With ``sign``, ``float32[]``, only elements of
  its sign count; the size of the row stands where there are fewer.

  Example:
    >>> largest(RowView([jnp.array([[1.0, -5.0, 0.5, 2.0]])], jnp.int32(0)), 2)
    Array([1, 3], dtype=int32)
  """
  position = x.read(lambda x: lax.top_k(as_floats(magnitudes(x, sign)), count)[1])
  position = position.astype(jnp.int32)
  if sign is not None:
    own = magnitudes(x.at(position), sign) > 0
    position = jnp.where(own, position, x.size)
  return jnp.sort(position)


def at_least(
  x: RowView,
  count: int,
  capacity: int,
  *,
  sign: jax.Array | None = None,
  first: jax.Array | None = None,
  implementation: Implementation | None = None,
) -> jax.Array:
  """Returns the positions of all elements that reach a threshold.

  The threshold is one that between ``count`` and ``capacity`` elements reach. Where
  equal elements leave no such threshold, all larger ones are listed, and as many of the
  equal ones as make ``count``.

  Args:
    x: a row of n elements.
    count: at most n.
    capacity: ``count`` or more.
    sign: ``float32[]``, to choose only among elements of its sign, of which there may
      be fewer.
    first: ``float32[]``, a threshold to take as it is if no more than ``capacity``
      elements reach it, even if fewer than ``count`` do; 0 for none.
    implementation: the one of marks and lists: see :func:`dispatch.run`.

  Returns:
    ``int32[capacity]``, tile by tile; n behind the last.
  """
  words = reaching(x, count, capacity, sign, first, implementation)
  # The loop has one round, which XLA cannot know. So XLA keeps the list, and does not
  # fuse it into each of its readers, which would make it anew for each.
  number = count_bits(words)
  nothing = jnp.zeros(capacity, jnp.int32) + (number & 0)
  found = lambda *_: positions(words, capacity, x.size, implementation=implementation)
  return lax.fori_loop(0, (number >= 0) * 1, found, nothing)


def trimmed(
  x: RowView,
  count: int,
  capacity: int,
  *,
  sign: jax.Array | None = None,
  implementation: Implementation | None = None,
) -> jax.Array:
  """Selects as :func:`largest` does, but sorts only the survivors of :func:`at_least`.

  Returns:
    ``int32[count]``, tile by tile; n where there is no such element.
  """
  survivors = at_least(x, count, capacity, sign=sign, implementation=implementation)
  order = as_floats(magnitudes(x.at(survivors), sign))
  _, chosen = lax.top_k(jnp.where(survivors < x.size, order, -jnp.inf), count)
  return survivors[jnp.sort(chosen)]
