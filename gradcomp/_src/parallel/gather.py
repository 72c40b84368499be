"""``gather``, and a product with a weight that is gathered, as FSDP needs them."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp._src.codecs import policy, protocol
from gradcomp._src.codecs.sums.records import Payload
from gradcomp._src.core.border import like_complex, pairs
from gradcomp._src.exchange.collectives import split
from gradcomp._src.kernels import block_float
from gradcomp._src.mesh import axes, types
from gradcomp._src.parallel import wires


def gather(  # noqa: PLR0913 - options of users, by keyword
  w_shard: jax.Array,
  *,
  axis_name: axes.AxisName,
  params: protocol.LeafCodec | None,
  grads: protocol.LeafCodec | None,
  residual: jax.Array | None = None,
  axis: int = 0,
  shape: tuple[int, ...] | None = None,
  key: wires.Key = None,
) -> jax.Array:
  r"""Returns a weight gathered from shards; its gradient is scattered to the owners.

  Worker d has the shard :math:`w_d`; all get the bits of :math:`w = [Q_w(w_0), \ldots,
  Q_w(w_{N-1})]`. Worker i sends part d of its cotangent :math:`g_i` and residual
  :math:`e_i` to worker d, which adds in ``float32``, in the order of workers, its own
  part exactly:

  .. math::
     c_i = g_i + e_i, \qquad \bar{w}_d = \sum_{i=0}^{N-1} Q_g(c_i[d]), \qquad
     e_i' = c_i - Q_g(c_i)

  The result is a sum: divide the loss of each worker by N for a mean. **The new
  residual is the cotangent of** ``residual``: take the gradient with respect to both,
  and gather each weight once in a step::

    grads, residuals = jax.grad(loss_fn, (0, 1))(shards, residuals, batch)

  Put ``jax.checkpoint`` around each layer, or whole weights stay in memory. A worker
  sends ``(N-1) c_w`` bytes forward and ``(N-1) c_g`` backward, with c bytes for the
  payload of a shard, in whole tiles of its codec. The weight has the dtype of
  ``w_shard``, and is typed as varying. A non-finite gradient makes at least its block
  NaN on the block's owner alone, and residuals keep their old values there.

  Args:
    w_shard: this worker's part of the weight, floats; a scalar counts as ``[1]``.
    axis_name: the axis of the enclosing map, or a tuple of axes.
    params: the codec of the weight; None for ``float32``.
    grads: the codec of the gradient; None for ``float32``. ``OneBit`` needs a residual.
    residual: this worker's earlier rounding errors, see :func:`gather_residual`; None
      drops them.
    axis: the array axis along which the weight is sharded.
    shape: the shape of the weight, if the shard is an Nth of all its elements, of
      ``jnp.pad(w.reshape(-1), (0, -w.size % N))``. So any shape can be sharded.
    key: a key that all workers share, another one for each call, if a codec draws
      random numbers. The backward pass folds in 1.

  Raises:
    ValueError: a codec is sparse, keeps a memory, or lacks a residual or a key; or
      another argument is not as above.
    TypeError: ``w_shard`` or ``residual`` has no float dtype, or a codec is none.

  Example:
    >>> half = gradcomp.codecs.Dense(dtype=jnp.bfloat16)
    >>> def loss(w, residual, x):
    ...   options = dict(axis_name="data", params=half, grads=half)
    ...   return gradcomp.parallel.gather(w, residual=residual, **options) @ x
    >>> x = jnp.array([[1.0, 2.0], [4.0, 0.1]])
    >>> grad = jax.jit(jax.vmap(jax.grad(loss, (0, 1)), axis_name="data"))
    >>> grads, residuals = grad(jnp.ones((2, 1)), jnp.zeros((2, 2)), x)
    >>> grads.ravel(), residuals[0]  # of two in bfloat16, nothing is lost
    (Array([5. , 2.1], dtype=float32), Array([0., 0.], dtype=float32))

  References:
    Zhao et al., `PyTorch FSDP <https://arxiv.org/abs/2304.11277>`_, 2023, section 3;
    Markov et al., `QSDP <https://arxiv.org/abs/2302.02390>`_, 2023, section 3
  """
  wire, back = wires.shard_wires(axis_name, params, grads, residual)
  key = wires.checked_key(key, wire.codec, wire.backward)
  x = jnp.atleast_1d(wires.checked_floats(w_shard, "w_shard"))
  axis = wires.checked_axis("axis", axis, x.ndim)
  share = None if shape is None else -(-math.prod(shape) // wire.size)
  if share is not None and x.shape != (share,):
    raise ValueError(
      f"`w_shard` must be of the shape {(share,)}, one of {wire.size} equal parts of "
      f"all elements of {shape}, got {x.shape}; cut jnp.pad(w.reshape(-1), "
      "(0, -w.size % N))."
    )
  x = types.mark_varying(x, axis_name, residual)
  _check_residual(residual, x, axis, wire.size)

  def forward(x: jax.Array, residual: Any, key: wires.Key) -> tuple[jax.Array, Any]:
    lines = wires.gather_lines(x, wire, key)
    return wires.joined(lines, wire, x, axis), (residual, key)

  def backward(saved: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    residual, key = saved
    later = wires.folded(key, 1)
    return *wires.reduce_parts(cotangent, residual, back, later, axis), None

  whole = wires.transposed(forward, backward, pairs(x), residual, key)
  whole = like_complex(whole, x)
  return whole if shape is None else whole[: math.prod(shape)].reshape(shape)


def gather_residual(
  w_shard: jax.Array, *, axis_name: axes.AxisName, axis: int = 0
) -> jax.Array:
  """Returns the first residual of a weight for :func:`gather`: ``float32`` zeros.

  It has the shape of all shards together; for a complex weight, pairs on a last axis.
  Call it in a map with ``out_specs=P(axis_name)``, which stacks the residuals of all
  workers on the first axis, ``[N d0, ...]``.

  Args:
    w_shard, axis_name, axis: as for :func:`gather`, with its errors.

  Example:
    >>> zeros = lambda w: gradcomp.parallel.gather_residual(w, axis_name="data", axis=1)
    >>> jax.vmap(zeros, axis_name="data")(jnp.ones((4, 3, 2))).shape
    (4, 3, 8)
  """
  size = axes.require_size(axis_name)
  x = jnp.atleast_1d(wires.checked_floats(w_shard, "w_shard"))
  axis = wires.checked_axis("axis", axis, x.ndim)
  zeros = jnp.zeros(_residual_shape(x, axis, size), jnp.float32)
  return types.mark_varying(zeros, axis_name, x)


def _residual_shape(x: jax.Array, axis: int, size: int) -> tuple[int, ...]:
  whole = (*x.shape[:axis], size * x.shape[axis], *x.shape[axis + 1 :])
  return (*whole, 2) if jnp.iscomplexobj(x) else whole


def _check_residual(residual: Any, x: jax.Array, axis: int, size: int) -> None:
  """Raises an error for a residual that cannot get the new one as its cotangent."""
  if residual is None:
    return
  residual, shape = jnp.asarray(residual), _residual_shape(x, axis, size)
  if not jnp.issubdtype(residual.dtype, jnp.floating):
    raise TypeError(
      f"`residual` must have a real float dtype, got {residual.dtype}; start with "
      "gradcomp.parallel.gather_residual(w_shard, axis_name=axis_name)."
    )
  if residual.shape != shape:
    raise ValueError(
      f"`residual` must be of the shape {shape}, as all shards together, got "
      f"{residual.shape}; start with gradcomp.parallel.gather_residual(w_shard, "
      "axis_name=axis_name), in a map whose out_specs stack them on the first axis."
    )
  if missing := types.varying_axes(x) - types.varying_axes(residual):
    raise ValueError(
      f"`residual` must differ between the workers of {sorted(missing)}, got one typed "
      "as equal on all of them, which JAX would add up; stack the residuals on the "
      "first axis, and pass them with in_specs=P(axes)."
    )


def gather_matmul(  # noqa: PLR0913 - options of users, by keyword
  x: jax.Array,
  w_shard: jax.Array,
  *,
  axis_name: axes.AxisName,
  params: protocol.LeafCodec,
  inputs: protocol.LeafCodec | None = None,
  grads: protocol.LeafCodec | None,
  residual: jax.Array | None = None,
  key: wires.Key = None,
) -> jax.Array:
  r"""Returns the product with a weight that is gathered, and used as its words came.

  With the weight W, ``[n, K]``, sharded along its first axis, and codecs :math:`Q_w` of
  it and :math:`Q_x` of the inputs, it is ``[..., n]``, of the dtype of x:

  .. math:: y = Q_x(x) \, Q_w(W)^\top, \qquad
     \bar{x} = \bar{y} \, Q_w(W), \qquad \bar{W} = \bar{y}^\top Q_x(x)

  On GPUs from Blackwell on, elements and scales go into ``jax.nn.scaled_matmul``.
  Elsewhere they are decoded to ``bfloat16``, exactly. Sums are of ``float32``, in the
  platform's order. The backward pass decodes the saved words and sends :math:`\bar{W}`
  as :func:`gather` does. The product is biased if a codec rounds to nearest;
  derivatives take rounding for the identity.

  Args:
    x: the inputs, ``[..., K]`` real floats. They may differ between workers.
    w_shard: this worker's rows of the weight, ``[n / N, K]`` real floats.
    axis_name: as for :func:`gather`.
    params: the codec of the weight, a ``BlockFloat`` with elements of 8 or 4 bits and
      without a rotation. Its blocks lie along K, a multiple of their size.
    inputs: the codec of x, with the ``scale`` and ``block_size`` of ``params``; None
      for ``params``, rounding to nearest.
    grads, residual, key: as for :func:`gather`.

  Raises:
    ValueError: as :func:`gather`; or shapes or codecs do not fit one product.
    TypeError: an array has no real float dtype, or a codec has no numbers of matrix
      units.

  Example:
    >>> codec = gradcomp.codecs.BlockFloat()  # MXFP8
    >>> def layer(x, w_shard):
    ...   return gradcomp.parallel.gather_matmul(
    ...     x, w_shard, axis_name="data", params=codec, grads=codec)
    >>> x, w = jnp.ones((2, 3, 32)), jnp.ones((2, 4, 32))  # of two workers
    >>> y = jax.jit(jax.vmap(layer, axis_name="data"))(x, w)
    >>> y.shape, y[0, 0, 0]
    ((2, 3, 8), Array(32., dtype=float32))

  References:
    Rouhani et al., `2023 <https://arxiv.org/abs/2310.10537>`_, section 3
  """
  wire, back = wires.shard_wires(axis_name, params, grads, residual)
  of_w = wire.codec
  of_x = of_w.to_nearest() if inputs is None else policy.stateless("inputs", inputs)
  key = wires.checked_key(key, of_w, wire.backward, of_x)
  x = wires.checked_floats(x, real=True)
  w = wires.checked_floats(w_shard, "w_shard", real=True)
  if w.ndim != 2 or not w.size:
    raise ValueError(
      f"`w_shard` must be of the shape [n / N, K], got {w.shape}; use "
      "gradcomp.parallel.gather for other shapes."
    )
  if not x.ndim or not x.size or x.shape[-1] != w.shape[1]:
    raise ValueError(
      f"`x` must be of the shape [..., {w.shape[1]}], as the rows of `w_shard`, got "
      f"{x.shape}."
    )
  if _scales(of_w, w) != _scales(of_x, w):  # a matrix unit takes both at once
    raise ValueError(
      f"`inputs` must have the scales of `params`, {_scales(of_w, w)} as dtype and "
      f"block, got {_scales(of_x, w)}; matrix units take one kind."
    )
  x, w = types.mark_varying((x, w), axis_name, x, w, residual)
  _check_residual(residual, w, 0, wire.size)
  own = dataclasses.replace(wire, codec=of_x)

  def forward(x: jax.Array, w: jax.Array, residual: Any, key: wires.Key) -> Any:
    lines = wires.gather_lines(w, wire, key)
    sent = wires.to_lines(x[None], own, wires.folded(key, 2))
    rows, columns = _operand(sent, x, of_x), _operand(lines, w, of_w)
    sums = block_float.multiply(rows[:2], columns[:2])
    y = (sums * (rows[2][:, None] * columns[2])).astype(x.dtype)
    y = y.reshape(*x.shape[:-1], -1)
    return types.mark_varying(y, axis_name), (sent, lines, residual, key)

  (x_shape, w_shape), (x_dtype, w_dtype) = (x.shape, w.shape), (x.dtype, w.dtype)

  def backward(saved: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    sent, lines, residual, key = saved
    whole = wires.from_lines(lines, w_shape, of_w)
    given = wires.from_lines(sent, x_shape, of_x)
    whole, given = (y.astype(x_dtype).reshape(-1, y.shape[-1]) for y in (whole, given))
    flat = cotangent.reshape(-1, cotangent.shape[-1])
    of_inputs = block_float.dot(flat, whole, 0).astype(x_dtype).reshape(x_shape)
    of_whole = block_float.dot(flat.T, given, 0).astype(w_dtype)
    later = wires.folded(key, 1)
    of_shard, new = wires.reduce_parts(of_whole, residual, back, later, 0)
    return of_inputs, of_shard, new, None

  return wires.transposed(forward, backward, x, w, residual, key)


def _operand(lines: jax.Array, like: jax.Array, codec: protocol.Codec) -> Any:
  """Reads lines of words: elements, scales and factors of rows, as of a codec."""
  (words,) = split(lines, [_rows(like, codec)])
  read = lambda rows: codec.operand(Payload(rows), like=like)
  *parts, factors = jax.vmap(read)(words)
  elements, scales = (x.reshape(-1, x.shape[-1]) for x in parts)
  return elements, scales, jnp.repeat(factors, len(elements) // len(lines))


def _rows(like: jax.Array, codec: protocol.Codec) -> tuple[int, int]:
  """Returns the shape of the rows of an array's payload."""
  return -(-like.size // codec.tile_size), codec.row_words


def _scales(codec: protocol.Codec, w: jax.Array) -> tuple[str, int]:
  """Returns the dtype and the block of a codec's scales."""
  read = lambda rows: codec.operand(Payload(rows), like=w)[1]
  found = jax.eval_shape(read, jax.ShapeDtypeStruct(_rows(w, codec), jnp.uint32))
  return str(found.dtype), w.shape[-1] // found.shape[-1]
