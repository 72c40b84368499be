"""``ppermute``: arrays along pairs of workers; gradients go back along these pairs."""

import functools
from collections.abc import Sequence

import jax

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.mesh.types import mark_varying
from gradcomp._src.parallel.options import (
  Backward,
  Wire,
  checked_floats,
  checked_key,
  folded,
  over_real_parts,
  wire,
)
from gradcomp._src.parallel.transport import send_along

Pairs = tuple[tuple[int, int], ...]


def ppermute(
  x: jax.Array,
  *,
  axis_name: AxisName,
  perm: Sequence[tuple[int, int]],
  codec: LeafCodec,
  backward: Backward = "same",
  key: jax.Array | None = None,
) -> jax.Array:
  """Sends arrays along pairs of workers, as ``lax.ppermute``.

  A worker that sends has ``c`` bytes to send, the bytes of its payload. The gradient
  sends cotangents back along the same pairs. Rounding counts as the identity. Under
  ``jax.vmap`` JAX needs a pair for every worker.

  Args:
    x: an array of any shape, floats, of one shape on all workers.
    axis_name: the axis of the enclosing map, or a tuple of axes.
    perm: pairs ``(sender, receiver)`` of workers' numbers, in which no worker sends or
      receives twice.
    codec: the codec of the values.
    backward: the codec of the cotangents; ``"same"`` for that of the values, None for
      ``float32``.
    key: a key that all workers share, if a codec draws random numbers. The backward
      pass folds in 1.

  Returns:
    An array like ``x``: the sender's, rounded; zeros without a sender.

  Raises:
    ValueError: the axis is not bound; the codec is sparse, or needs a memory or error
      feedback; a codec needs a key, and there is none; or ``perm`` has other pairs.
    TypeError: ``x`` has no float dtype, or ``codec`` is no codec.

  Example:
    >>> send = lambda x: gradcomp.parallel.ppermute(
    ...   x, axis_name="stage", perm=[(0, 1), (1, 0)], codec=gradcomp.codecs.Dense())
    >>> jax.vmap(send, axis_name="stage")(jnp.array([1.0, 2.0]))
    Array([2., 1.], dtype=float32)
  """
  own_wire = wire(axis_name, codec, backward)
  key = checked_key(key, own_wire.codec, own_wire.backward)
  pairs = _checked_pairs(perm, own_wire.size)
  x = mark_varying(checked_floats(x), axis_name)
  return over_real_parts(lambda x: _ppermute(own_wire, pairs, x, key), x)


def _checked_pairs(perm: Sequence[tuple[int, int]], workers: int) -> Pairs:
  pairs = tuple((int(sender), int(receiver)) for sender, receiver in perm)
  for side in zip(*pairs, strict=True):
    numbers = set(side)
    if len(numbers) < len(side) or not numbers.issubset(range(workers)):
      raise ValueError(
        f"`perm` must have pairs (sender, receiver) of the workers 0 to {workers - 1}, "
        f"none of whom sends or receives twice, got {list(pairs)}."
      )
  return pairs


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ppermute(
  wire: Wire, pairs: Pairs, x: jax.Array, key: jax.Array | None
) -> jax.Array:
  return send_along(x, wire, pairs, key).astype(x.dtype)


def _ppermute_forward(
  wire: Wire, pairs: Pairs, x: jax.Array, key: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
  return _ppermute(wire, pairs, x, key), key


def _ppermute_backward(
  wire: Wire, pairs: Pairs, key: jax.Array | None, cotangent: jax.Array
) -> tuple[jax.Array, None]:
  back = tuple((receiver, sender) for sender, receiver in pairs)
  return _ppermute(wire.reversed, back, cotangent, folded(key, 1)), None


_ppermute.defvjp(_ppermute_forward, _ppermute_backward)
