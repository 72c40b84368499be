"""``all_gather``: the arrays of all workers, for example before a sharded layer."""

from typing import Literal

import jax
import jax.numpy as jnp

from gradcomp._src.checks import one_of
from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.mesh.types import mark_varying
from gradcomp._src.parallel.gather_scatter import gather_shards
from gradcomp._src.parallel.options import (
  Backward,
  Own,
  checked_axis,
  checked_floats,
  checked_key,
  over_real_parts,
  wire,
)

To = Literal["varying", "invarying"]


def all_gather(
  x: jax.Array,
  *,
  axis_name: AxisName,
  codec: LeafCodec,
  backward: Backward = "same",
  axis: int = 0,
  own: Own = "exact",
  to: To = "varying",
  key: jax.Array | None = None,
) -> jax.Array:
  r"""Concatenates the arrays of all workers, as ``lax.all_gather(tiled=True)``.

  .. math:: y = [Q(x_0), Q(x_1), \ldots, Q(x_{N-1})]

  Each worker sends the payload of its array to all others, ``(N-1) c`` bytes if c is
  the bytes of a payload. The gradient is :func:`psum_scatter` of the cotangent.
  Rounding counts as the identity.

  Args:
    x: ``[..., n, ...]``, floats, of one shape on all workers. A scalar counts as
      ``[1]``.
    axis_name: the axis of the enclosing map, or a tuple of axes.
    codec: the codec of the values.
    backward: the codec of the cotangents; ``"same"`` for that of the values, None for
      ``float32``.
    axis: the array axis along which the arrays are put, n elements each.
    own: ``"exact"`` leaves a worker's own array as it is. Then the results of the
      workers differ by the rounding, and so do gradients of replicated weights behind
      it. ``"coded"`` rounds it, too, so that all workers have the same bits.
    to: ``"varying"`` types the result as differing between workers, so that cotangents
      stay per worker until they are sent here. ``"invarying"``, with ``own="coded"``,
      types it as equal on all workers, and takes it that cotangents are equal, too: the
      backward pass sends nothing. Where types are checked and the workers go on with
      numbers of their own, JAX adds up their cotangents first, in full precision.
    key: a key that all workers share, if a codec draws random numbers. The backward
      pass folds in 1.

  Returns:
    ``[..., N n, ...]``, of the dtype of ``x``. Decoding is done in ``float32``.

  Raises:
    ValueError: the axis is not bound; the codec is sparse, or needs a memory or error
      feedback; a codec needs a key, and there is none; or another argument is not as
      above.
    TypeError: ``x`` has no float dtype, or ``codec`` is no codec.

  Example:
    >>> codec = gradcomp.codecs.EightBit(dtype="linear")
    >>> x = jnp.array([[127.0, 0.4], [1.0, 0.25]])
    >>> gather = lambda x: gradcomp.parallel.all_gather(
    ...   x, axis_name="model", codec=codec)
    >>> jax.vmap(gather, axis_name="model")(x)[1]  # its own numbers are as they were
    Array([127.  ,   0.  ,   1.  ,   0.25], dtype=float32)

  References:
    Dettmers, `8-Bit Approximations for Parallelism in Deep Learning
    <https://arxiv.org/abs/1511.04561>`_, 2016, section 2
  """
  own_wire = wire(axis_name, codec, backward, own)
  one_of("to", To, to)
  if to == "invarying" and own != "coded":
    raise ValueError(
      '`to` must be "varying" with own="exact", with which the results of workers '
      'differ, got "invarying"; choose own="coded".'
    )
  key = checked_key(key, own_wire.codec, own_wire.backward)
  x = jnp.atleast_1d(checked_floats(x))
  axis = checked_axis("axis", axis, x.ndim)
  x = mark_varying(x, axis_name)
  send = lambda x: gather_shards(own_wire, axis, to == "invarying", x, key)
  return over_real_parts(send, x)
