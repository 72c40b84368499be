"""``all_to_all`` and ``ppermute``: arrays between pairs of workers, and back."""

import functools
from collections.abc import Sequence

import jax

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.floats.dtypes import fitted
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.parallel import options, transport

Pairs = tuple[tuple[int, int], ...]


def all_to_all(  # noqa: PLR0913 - options of users, by keyword
  x: jax.Array,
  *,
  axis_name: AxisName,
  split_axis: int,
  concat_axis: int,
  codec: LeafCodec,
  backward: options.Backward = "same",
  own: options.Own = "exact",
  key: jax.Array | None = None,
) -> jax.Array:
  """Sends part d of an array to worker d, as ``lax.all_to_all(tiled=True)``.

  Each part is encoded by itself. A worker sends ``(N-1)/N c`` bytes, where c is the
  bytes of the payloads of its parts. The gradient sends cotangents back in the same
  way. Rounding counts as the identity.

  Args:
    x, axis_name: as for :func:`all_gather`.
    split_axis: the array axis that is split into N parts.
    concat_axis: the array axis along which the parts from all workers are put.
    codec, backward: as for :func:`all_gather`.
    own: ``"exact"`` leaves the part that stays with its worker as it is, ``"coded"``
      rounds it, too.
    key: as for :func:`all_gather`.

  Returns:
    An array of the dtype of ``x``, in which ``split_axis`` is N times shorter and
    ``concat_axis`` N times longer.

  Raises:
    ValueError: as :func:`all_gather`; or N does not divide ``split_axis``.
    TypeError: as :func:`all_gather`.

  Example:
    >>> codec = gradcomp.codecs.Dense()
    >>> swap = lambda x: gradcomp.parallel.all_to_all(
    ...   x, axis_name="expert", split_axis=0, concat_axis=0, codec=codec)
    >>> jax.jit(jax.vmap(swap, axis_name="expert"))(jnp.array([[1.0, 2.0], [3.0, 4.0]]))
    Array([[1., 3.],
           [2., 4.]], dtype=float32)
  """
  wire = options.wire(axis_name, codec, backward, own)
  x, key = options.inputs(x, wire, key)
  cut = options.checked_axis("split_axis", split_axis, x.ndim)
  along = options.checked_axis("concat_axis", concat_axis, x.ndim)
  options.check_divides("split_axis", x.shape, cut, wire.size)
  way, back = (functools.partial(_sent, *axes) for axes in ((cut, along), (along, cut)))
  return options.paired(way, back, wire, x, key)


def ppermute(
  x: jax.Array,
  *,
  axis_name: AxisName,
  perm: Sequence[tuple[int, int]],
  codec: LeafCodec,
  backward: options.Backward = "same",
  key: jax.Array | None = None,
) -> jax.Array:
  """Sends arrays along pairs of workers, as ``lax.ppermute``.

  A worker that sends has ``c`` bytes to send, the bytes of its payload. The gradient
  sends cotangents back along the same pairs. Rounding counts as the identity. Under
  ``jax.vmap`` JAX needs a pair for every worker.

  Args:
    x, axis_name: as for :func:`all_gather`; any shape.
    perm: pairs ``(sender, receiver)`` of workers' numbers, in which no worker sends or
      receives twice.
    codec, backward, key: as for :func:`all_gather`.

  Returns:
    An array like ``x``: the sender's, rounded; zeros without a sender.

  Raises:
    ValueError: as :func:`all_gather`; or ``perm`` has other pairs.
    TypeError: as :func:`all_gather`.

  Example:
    >>> send = lambda x: gradcomp.parallel.ppermute(
    ...   x, axis_name="stage", perm=[(0, 1), (1, 0)], codec=gradcomp.codecs.Dense())
    >>> jax.jit(jax.vmap(send, axis_name="stage"))(jnp.array([1.0, 2.0]))
    Array([2., 1.], dtype=float32)
  """
  wire = options.wire(axis_name, codec, backward)
  x, key = options.inputs(x, wire, key)
  pairs = _checked_pairs(perm, wire.size)

  def along(pairs: Pairs) -> options.Send:
    send = transport.send_along
    return lambda x, wire, key: fitted(send(x, wire, pairs, key), x.dtype)

  back = tuple((receiver, sender) for sender, receiver in pairs)
  return options.paired(along(pairs), along(back), wire, x, key)


def _sent(
  cut: int, along: int, x: jax.Array, wire: options.Wire, key: options.Key
) -> jax.Array:
  """Sends part d to worker d; concatenates the parts from all workers."""
  parts = transport.split_parts(x, cut, wire.size)
  parts = transport.exchange_encoded(parts, wire, key)
  return fitted(transport.concat(parts, along), x.dtype)


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
