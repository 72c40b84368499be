"""Takes gradients in where a transformation begins: what their leaves must be."""

from typing import Any

import jax


@jax.custom_jvp
def not_differentiated(updates: Any) -> Any:
  """Returns the gradients as they are, but refuses to be differentiated.

  Rounding has no derivative. Without this some codecs would return zeros for it, and
  others would fail inside of a kernel.

  Raises:
    TypeError: while ``jax.grad``, ``jax.jvp`` or the like traces it, if the gradients
      depend on what is differentiated.

  Example:
    >>> not_differentiated({"w": jnp.ones(2)})
    {'w': Array([1., 1.], dtype=float32)}
  """
  return updates


@not_differentiated.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
  del primals, tangents
  raise TypeError(
    "`updates` must not be differentiated: what the exchange rounds and sends has no "
    "derivative; call update outside of jax.grad, or give it "
    "jax.lax.stop_gradient(updates)."
  )
