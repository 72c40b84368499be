"""``sub_batches``: a batch in several passes, each gathered during the one before."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp import parallel


def sub_batches(
  fn: Callable[[jax.Array, jax.Array], Any],
  features: jax.Array,
  *,
  axis_name: str | tuple[str, ...],
  passes: int,
  codec: Any,
  backward: Any = "same",
  own: Literal["exact", "coded"] = "exact",
  prefetch: bool = True,
  key: jax.Array | None = None,
) -> Any:
  """Applies a layer that is sharded over the workers to a batch, in several passes.

  Each worker has the features of its own samples. In a pass, all workers take the same
  sub-batch, which :func:`gradcomp.parallel.all_gather` puts together from an equal part
  of each worker's samples. With ``prefetch``, the sub-batch of pass s + 1 is gathered
  before ``fn`` of pass s, which does not depend on it: XLA may send it meanwhile. The
  first has nothing to hide under. The cotangents of a pass are scattered to the
  samples' owners.

  Args:
    fn: ``fn(sub_batch, s)`` returns a tree of arrays. ``sub_batch`` is
      ``[N n / passes, ...]``, with the samples of worker 0 first, and ``s`` is the
      number of the pass, ``int32[]``. Worker i's sample j comes in pass
      ``j // (n / passes)``.
    features: ``[n, ...]``, floats, n samples of each worker.
    axis_name: the axis of the enclosing map, or a tuple of axes.
    passes: the number of passes, which divides n.
    codec: the codec of the features.
    backward: the codec of their cotangents; ``"same"`` for that of the features, None
      for ``float32``.
    own: ``"exact"`` leaves a worker's own features as they are, see
      :func:`gradcomp.parallel.all_gather`.
    prefetch: whether to gather a pass ahead.
    key: a key that all workers share, if a codec draws random numbers. Each pass folds
      in its number.

  Returns:
    The results of all passes, stacked on a new first axis, ``[passes, ...]``.

  Raises:
    ValueError: as :func:`gradcomp.parallel.all_gather`; or ``passes`` does not divide
      n.
    TypeError: as :func:`gradcomp.parallel.all_gather`.

  Example:
    >>> def layer(features):
    ...   return sub_batches(
    ...     lambda x, s: 10 * x, features, axis_name="model", passes=2,
    ...     codec=gradcomp.codecs.Dense())
    >>> jax.vmap(layer, axis_name="model")(jnp.array([[1.0, 2.0], [3.0, 4.0]]))[0]
    Array([[10., 30.],
           [20., 40.]], dtype=float32)

  References:
    Dettmers, `8-Bit Approximations for Parallelism in Deep Learning
    <https://arxiv.org/abs/1511.04561>`_, 2016, section 2; Krizhevsky, `One Weird Trick
    for Parallelizing Convolutional Neural Networks
    <https://arxiv.org/abs/1404.5997>`_, 2014
  """
  size = features.shape[0]
  if passes < 1 or size % passes:
    raise ValueError(
      "`passes` must be a number of passes that divides the first axis of `features`, "
      f"got {passes} of {size}."
    )
  parts = features.reshape(passes, size // passes, *features.shape[1:])

  def gather(part: jax.Array, number: jax.Array | int) -> jax.Array:
    own_key = None if key is None else jax.random.fold_in(key, number)
    return parallel.all_gather(
      part, axis_name=axis_name, codec=codec, backward=backward, own=own, key=own_key
    )

  numbers = jnp.arange(passes, dtype=jnp.int32)
  if not prefetch or passes == 1:
    each = lambda _, given: (None, fn(gather(*given), given[1]))
    return lax.scan(each, None, (parts, numbers))[1]

  def ahead(current: jax.Array, given: tuple) -> tuple[jax.Array, Any]:
    following, number = given
    arriving = gather(following, number + 1)
    return arriving, fn(current, number)

  first = gather(parts[0], 0)
  last, results = lax.scan(ahead, first, (parts[1:], numbers[:-1]))
  result = fn(last, numbers[-1])
  return jax.tree.map(lambda *x: jnp.concatenate([x[0], x[1][None]]), results, result)
