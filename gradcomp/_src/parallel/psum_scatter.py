"""``psum_scatter``: the sum of all workers' arrays, a part for each worker."""

import jax

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.mesh.types import mark_varying
from gradcomp._src.parallel.gather_scatter import scatter_sums
from gradcomp._src.parallel.options import (
  Backward,
  Own,
  check_divides,
  checked_axis,
  checked_floats,
  checked_key,
  over_real_parts,
  wire,
)


def psum_scatter(
  x: jax.Array,
  *,
  axis_name: AxisName,
  codec: LeafCodec,
  backward: Backward = "same",
  axis: int = 0,
  own: Own = "exact",
  key: jax.Array | None = None,
) -> jax.Array:
  r"""Adds the arrays of all workers; each worker gets one part of the sum.

  As in ``lax.psum_scatter(tiled=True)``, worker d gets

  .. math:: y_d = \sum_{i=0}^{N-1} Q(x_i[d])

  where :math:`x_i[d]` is part d of worker i's array. Each part is encoded by itself and
  sent to its owner, which decodes it and adds in ``float32``, in the order of workers.
  A worker sends ``(N-1)/N c`` bytes, where c is the bytes of the payloads of its parts.
  The gradient is :func:`all_gather` of the cotangent.

  Args:
    x: ``[..., N n, ...]``, floats, of one shape on all workers.
    axis_name: the axis of the enclosing map, or a tuple of axes.
    codec: the codec of the values.
    backward: the codec of the cotangents; ``"same"`` for that of the values, None for
      ``float32``.
    axis: the array axis that is split into N parts.
    own: ``"exact"`` adds a worker's own part as it is, ``"coded"`` rounds it, too.
    key: a key that all workers share, if a codec draws random numbers. The rounding
      errors of the workers then cancel in part. The backward pass folds in 1.

  Returns:
    ``[..., n, ...]``, of the dtype of ``x``.

  Raises:
    ValueError: as :func:`all_gather`; or N does not divide the axis.
    TypeError: as :func:`all_gather`.

  Example:
    >>> scatter = lambda x: gradcomp.parallel.psum_scatter(
    ...   x, axis_name="model", codec=gradcomp.codecs.Dense())
    >>> jax.vmap(scatter, axis_name="model")(jnp.array([[1.0, 2.0], [30.0, 40.0]]))
    Array([[31.],
           [42.]], dtype=float32)
  """
  own_wire = wire(axis_name, codec, backward, own)
  key = checked_key(key, own_wire.codec, own_wire.backward)
  x = checked_floats(x)
  axis = checked_axis("axis", axis, x.ndim)
  check_divides("axis", x.shape, axis, own_wire.size)
  x = mark_varying(x, axis_name)
  return over_real_parts(lambda x: scatter_sums(own_wire, axis, x, key), x)
