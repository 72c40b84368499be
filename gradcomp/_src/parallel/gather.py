"""``gather``: a whole weight from its shards, as FSDP needs before each layer."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.dense import Dense
from gradcomp._src.codecs.policy import stateless
from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.floats.dtypes import fitted
from gradcomp._src.mesh.axes import AxisName, axis_names, require_size
from gradcomp._src.mesh.types import mark_varying, varying_axes
from gradcomp._src.parallel import options, transport
from gradcomp._src.parallel.options import Key, Wire


def gather(  # noqa: PLR0913 - options of users, by keyword
  w_shard: jax.Array,
  *,
  axis_name: AxisName,
  params: LeafCodec | None,
  grads: LeafCodec | None,
  residual: jax.Array | None = None,
  axis: int = 0,
  shape: tuple[int, ...] | None = None,
  key: jax.Array | None = None,
) -> jax.Array:
  r"""Gathers a weight from its shards; its gradient is scattered to their owners.

  Worker d has the shard :math:`w_d`. All workers get the same bits of

  .. math:: w = [Q_w(w_0), Q_w(w_1), \ldots, Q_w(w_{N-1})]

  In the backward pass, worker i has the cotangent :math:`g_i` of the whole weight, and
  the residual :math:`e_i`. It sends part d of their sum to worker d, which adds in
  ``float32``, in the order of workers. The rounding error is the new residual:

  .. math::
     c_i = g_i + e_i, \qquad \bar{w}_d = \sum_{i=0}^{N-1} Q_g(c_i[d]), \qquad
     e_i' = c_i - Q_g(c_i)

  The part that stays with its worker is exact: there :math:`Q_g` is the identity. The
  result is a sum, like the gradient of ``lax.all_gather``: divide the loss of each
  worker by N for a mean.

  **The new residual comes back as the cotangent of** ``residual``. So take the gradient
  of the loss with respect to the shards and the residuals together::

    grads, residuals = jax.grad(loss_fn, (0, 1))(shards, residuals, batch)

  Gather each weight once in a step: two gathers with one residual would each send it,
  and their new residuals would be added. The gather that ``jax.checkpoint`` runs again
  does not count. Put ``jax.checkpoint`` around each layer, or whole weights stay in
  memory until the backward pass.

  A worker sends ``(N-1) c_w`` bytes forward and ``(N-1) c_g`` backward, where c are the
  bytes of the payload of a shard, in whole tiles of its codec. Choose buckets so small
  that a shard fills its tiles, or None for a small weight.

  A gradient that is not finite makes at least its block NaN on the owner of the block,
  or the element alone if it is the owner's. The residual keeps its old value there.
  Other workers do not learn of it: a step that is dropped for it must drop all new
  residuals, too.

  Args:
    w_shard: this worker's part of the weight, floats, of one shape on all workers. A
      scalar counts as ``[1]``.
    axis_name: the axis of the enclosing map, or a tuple of axes.
    params: the codec of the weight; None for ``float32``.
    grads: the codec of the gradient; None for ``float32``. ``OneBit`` needs a residual.
    residual: the rounding errors of this worker's earlier gradients: zeros at first,
      see :func:`gather_residual`. Without one, they are dropped.
    axis: the array axis along which the weight is sharded.
    shape: the shape of the weight, if the shard is an Nth of all its elements: of
      ``jnp.pad(w.reshape(-1), (0, -w.size % N))``. So any shape can be sharded.
    key: a key that all workers share, another one for each call, if a codec draws
      random numbers. The backward pass folds in 1.

  Returns:
    The whole weight, of the dtype of ``w_shard``: N times as long along ``axis``, or of
    the given shape. It is typed as varying over the workers, as its cotangents do.

  Raises:
    ValueError: the axis is not bound; a codec is sparse, keeps a memory, or needs a
      residual or a key that is not given; or another argument is not as above.
    TypeError: ``w_shard`` or ``residual`` has no float dtype, or a codec is none.

  Example:
    >>> def loss(w_shard, residual, x):
    ...   codec = gradcomp.codecs.Dense(dtype=jnp.bfloat16)
    ...   w = gradcomp.parallel.gather(
    ...     w_shard, axis_name="data", params=codec, grads=codec, residual=residual)
    ...   return jnp.dot(w, x)
    >>> x = jnp.array([[1.0, 2.0], [4.0, 0.1]])
    >>> grad = jax.jit(jax.vmap(jax.grad(loss, (0, 1)), axis_name="data"))
    >>> grads, residuals = grad(jnp.ones((2, 1)), jnp.zeros((2, 2)), x)
    >>> grads.ravel(), residuals[0]  # of two in bfloat16, nothing is lost
    (Array([5. , 2.1], dtype=float32), Array([0., 0.], dtype=float32))

  References:
    Zhao et al., `PyTorch FSDP <https://arxiv.org/abs/2304.11277>`_, 2023, section 3;
    Markov et al., `Quantized Distributed Training of Large Models with Convergence
    Guarantees <https://arxiv.org/abs/2302.02390>`_, 2023, section 3
  """
  size = require_size(axis_name)
  forward = Dense() if params is None else stateless("params", params)
  corrected = residual is not None
  back = Dense() if grads is None else stateless("grads", grads, corrected=corrected)
  wire = Wire(axis_name, forward, back, "coded", size)
  key = options.checked_key(key, forward, back)
  x = jnp.atleast_1d(options.checked_floats(w_shard))
  axis = options.checked_axis("axis", axis, x.ndim)
  share = None if shape is None else -(-math.prod(shape) // size)
  if share is not None and x.shape != (share,):
    raise ValueError(
      f"`w_shard` must be of the shape {(share,)}, one of {size} equal parts of all "
      f"elements of {shape}, got {x.shape}; cut jnp.pad(w.reshape(-1), "
      "(0, -w.size % N))."
    )
  x = mark_varying(x, axes_of(axis_name, residual))
  if residual is not None:
    check_residual(residual, x, _residual_shape(x, axis, size))
  send = lambda x: _gather(wire, axis, x, residual, key)
  whole = options.over_real_parts(send, x)
  return whole if shape is None else whole[: math.prod(shape)].reshape(shape)


def gather_residual(
  w_shard: jax.Array, *, axis_name: AxisName, axis: int = 0
) -> jax.Array:
  """Returns the first residual of a weight for :func:`gather`: zeros.

  Call it where the axis is bound, in a map with ``out_specs=P(axis_name)``: stacked on
  the first axis, the residuals of all workers are one global array, ``[N d0, ...]``.

  Args:
    w_shard, axis_name, axis: as for :func:`gather`.

  Returns:
    Zeros of the shape of all shards together, ``float32``; for a complex weight, pairs
    of them on a last axis.

  Raises:
    ValueError: the axis is not bound, or ``axis`` is no axis of the weight.
    TypeError: ``w_shard`` has no float dtype.

  Example:
    >>> zeros = lambda w: gradcomp.parallel.gather_residual(w, axis_name="data", axis=1)
    >>> jax.vmap(zeros, axis_name="data")(jnp.ones((4, 3, 2))).shape
    (4, 3, 8)
  """
  size = require_size(axis_name)
  x = jnp.atleast_1d(options.checked_floats(w_shard))
  axis = options.checked_axis("axis", axis, x.ndim)
  zeros = jnp.zeros(_residual_shape(x, axis, size), jnp.float32)
  return mark_varying(zeros, axes_of(axis_name, x))


def _gather(
  wire: Wire, axis: int, x: jax.Array, residual: jax.Array | None, key: Key
) -> jax.Array:
  """Returns the whole weight. The cotangent of the residual is the new one."""

  def gather(x: jax.Array, residual: Any, key: Key) -> jax.Array:
    return transport.joined(transport.gather_lines(x, wire, key), wire, x, axis)

  def scatter(
    cotangent: jax.Array, residual: jax.Array | None, key: Key
  ) -> tuple[jax.Array, jax.Array | None, None]:
    return *scatter_gradient(cotangent, residual, wire, axis, key), None

  return options.transposed(gather, scatter, x, residual, key)


def scatter_gradient(
  cotangent: jax.Array, residual: jax.Array | None, wire: Wire, axis: int, key: Key
) -> tuple[jax.Array, jax.Array | None]:
  """Sends the parts of a gathered weight's cotangent to the owners of its shards.

  Args:
    cotangent: of the whole weight.
    residual: of this worker's earlier ones, or None.
    wire: of the forward pass.
    axis: along which the weight is sharded.
    key: of the forward pass.

  Returns:
    The sum of the workers' cotangents of this worker's shard, and the new residual.
  """
  back = dataclasses.replace(wire.reversed, own="exact")
  key = options.folded(key, 1)
  sent = cotangent.astype(jnp.float32)
  old = None if residual is None else residual.astype(jnp.float32)
  parts = sent if old is None else sent + old
  parts = transport.split_parts(parts, axis, wire.size)
  mine = transport.reduce_encoded(parts, back, key)
  if residual is None or old is None:
    return fitted(mine, cotangent.dtype), None
  unsent = transport.loss_of(parts, back, key)
  mine, unsent = transport.narrowed_parts(mine, unsent, cotangent.dtype, back, axis)
  kept = jnp.where(jnp.isfinite(unsent), unsent, old).astype(residual.dtype)
  return mine, kept


def axes_of(axis_name: AxisName, *arrays: jax.Array | None) -> tuple[str, ...]:
  """Returns the axes of the workers, and other axes over which arrays vary."""
  others = {axis for x in arrays for axis in varying_axes(x)}
  others -= set(axis_names(axis_name))
  return (*axis_names(axis_name), *sorted(others))


def _residual_shape(x: jax.Array, axis: int, size: int) -> tuple[int, ...]:
  whole = (*x.shape[:axis], size * x.shape[axis], *x.shape[axis + 1 :])
  return (*whole, 2) if jnp.iscomplexobj(x) else whole


def check_residual(residual: jax.Array, x: jax.Array, shape: tuple[int, ...]) -> None:
  """Raises an error for a residual that cannot get the new one as its cotangent."""
  residual = jnp.asarray(residual)
  if not jnp.issubdtype(residual.dtype, jnp.floating):
    raise TypeError(
      f"`residual` must have a real float dtype, got {residual.dtype}; start with "
      "gradcomp.parallel.gather_residual(w_shard, axis_name=axis_name)."
    )
  if residual.shape != shape:
    raise ValueError(
      f"`residual` must be of the shape {shape}, as all shards together, got "
      f"{residual.shape}; start with gradcomp.parallel.gather_residual(w_shard, "
      "axis_name=axis_name), and give its map an out_specs that stacks them on the "
      "first axis."
    )
  missing = varying_axes(x) - varying_axes(residual)
  if missing:
    raise ValueError(
      f"`residual` must differ between the workers of {sorted(missing)}, or JAX adds "
      "up what they keep, got one that is typed as equal on all of them; stack the "
      "residuals on the first axis, and pass them with in_specs=P(axes)."
    )
