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

  Each worker has the features of its own samples, ``[n, ...]``. In a pass, all workers
  take the same sub-batch, an equal part of each worker's samples: worker i's sample j
  comes in pass ``j // (n / passes)``. With ``prefetch``, the sub-batch of pass s + 1 is
  gathered before ``fn(sub_batch, s)``, which does not depend on it: XLA may send it
  meanwhile. The cotangents of a pass are scattered to the samples' owners. The results
  are stacked on a new first axis. (Dettmers, 2016, section 2; Krizhevsky, 2014.)

  Example:
    >>> def layer(features):
    ...   return sub_batches(
    ...     lambda x, s: 10 * x, features, axis_name="model", passes=2,
    ...     codec=gradcomp.codecs.Dense())
    >>> jax.vmap(layer, axis_name="model")(jnp.array([[1.0, 2.0], [3.0, 4.0]]))[0]
    Array([[10., 30.],
           [20., 40.]], dtype=float32)
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
