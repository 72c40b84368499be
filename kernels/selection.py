"""Selection: the elements of largest magnitude, found and listed without sorting.

Only the survivors of a threshold are sorted, and all elements of what is small.
"""

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp.kernels.dispatch import Implementation
from gradcomp.kernels.listing import count_bits, positions
from gradcomp.kernels.magnitudes import as_floats, magnitudes
from gradcomp.kernels.rows import Row
from gradcomp.kernels.thresholds import reaching


def largest(x: Row, count: int, sign: jax.Array | None = None) -> jax.Array:
  """The positions of the ``count`` elements of largest magnitude, in order.

  Args:
    x: n elements.
    count: at most n.
    sign: to choose among the elements of one sign alone, of which there may be fewer.

  Returns:
    ``int32[count]``; n where there is no such element.
  """
  position = x.read(lambda x: lax.top_k(as_floats(magnitudes(x, sign)), count)[1])
  position = position.astype(jnp.int32)
  if sign is not None:
    own = magnitudes(x.at(position), sign) > 0
    position = jnp.where(own, position, x.size)
  return jnp.sort(position)


def at_least(
  x: Row,
  count: int,
  capacity: int,
  *,
  sign: jax.Array | None = None,
  first: jax.Array | None = None,
  implementation: Implementation | None = None,
) -> jax.Array:
  """The positions of all elements that reach a threshold, between ``count`` and more.

  The threshold is one that between ``count`` and ``capacity`` elements reach. Where
  equal elements leave none, all that are larger are listed, and as many of the equal
  ones as make ``count``.

  Args:
    x: n elements.
    count: at most n.
    capacity: ``count`` or more.
    sign: to choose among the elements of one sign alone, of which there may be fewer.
    first: ``float32[]``, a threshold to take as it is if no more than ``capacity``
      elements reach it, even if fewer than ``count`` do; 0 for none.
    implementation: of marks and lists: see :func:`dispatch.run`.

  Returns:
    ``int32[capacity]``, tile by tile; n behind the last.
  """
  words = reaching(x, count, capacity, sign, first, implementation)
  # A loop of one round, for all that XLA knows of any number: it keeps the list then.
  # Fused into each of its readers, it would be made as often.
  number = count_bits(words)
  nothing = jnp.zeros(capacity, jnp.int32) + (number & 0)
  found = lambda *_: positions(words, capacity, x.size, implementation=implementation)
  return lax.fori_loop(0, (number >= 0) * 1, found, nothing)


def trimmed(
  x: Row,
  count: int,
  capacity: int,
  *,
  sign: jax.Array | None = None,
  implementation: Implementation | None = None,
) -> jax.Array:
  """:func:`largest`, sorting only the survivors of :func:`at_least`.

  Returns:
    ``int32[count]``, tile by tile; n where there is no such element.
  """
  survivors = at_least(x, count, capacity, sign=sign, implementation=implementation)
  order = as_floats(magnitudes(x.at(survivors), sign))
  _, chosen = lax.top_k(jnp.where(survivors < x.size, order, -jnp.inf), count)
  return survivors[jnp.sort(chosen)]
