"""``gather_matmul``: a product with a weight that is gathered, and never decoded."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp._src.codecs import policy
from gradcomp._src.codecs.protocol import Codec, LeafCodec
from gradcomp._src.codecs.sums.records import Payload
from gradcomp._src.exchange.lines import split
from gradcomp._src.kernels import block_float
from gradcomp._src.mesh import axes, types
from gradcomp._src.parallel import gather, options, transport
from gradcomp._src.parallel.options import Key

# Elements, scales and factors of rows: see BlockFloat.operand.
Operand = tuple[jax.Array, jax.Array, jax.Array]


def gather_matmul(  # noqa: PLR0913 - options of users, by keyword
  x: jax.Array,
  w_shard: jax.Array,
  *,
  axis_name: axes.AxisName,
  params: LeafCodec,
  inputs: LeafCodec | None = None,
  grads: LeafCodec | None,
  residual: jax.Array | None = None,
  key: Key = None,
) -> jax.Array:
  r"""Multiplies by a weight that is gathered, and goes into the product as it came.

  The weight W, ``[n, K]``, is sharded along its first axis. With the codecs
  :math:`Q_w` of the weight and :math:`Q_x` of the inputs,

  .. math:: y = Q_x(x) \, Q_w(W)^\top, \qquad
     \bar{x} = \bar{y} \, Q_w(W), \qquad \bar{W} = \bar{y}^\top Q_x(x)

  On GPUs from Blackwell on, the elements and scales of both go into
  ``jax.nn.scaled_matmul`` as they came. Elsewhere they are decoded to ``bfloat16``,
  which holds an element times a scale exactly, and multiplied. Sums are of ``float32``,
  in the platform's order.

  The backward pass decodes both to the dtype of x. It has their words from the forward
  pass: 8.25 bits an element with MXFP8. :math:`\bar{W}` is sent to the owners of the
  shards, and rounding errors come back as the cotangent of ``residual``, all as
  :func:`gather` does it, with its bytes, its rules for NaN and its ``residual``.

  It is biased if a codec rounds to nearest. The derivatives take each codec for the
  identity.

  Args:
    x: the inputs, ``[..., K]`` real floats. They may differ between workers.
    w_shard: this worker's rows of the weight, ``[n / N, K]`` real floats.
    axis_name: as for :func:`gather`.
    params: the codec of the weight, a ``BlockFloat`` with elements of 8 or 4 bits and
      without a rotation. Its blocks lie along K, which is a multiple of them.
    inputs: the codec of x, with the ``scale`` and ``block_size`` of ``params``; None
      for ``params``, rounding to nearest.
    grads, residual, key: as for :func:`gather`.

  Returns:
    The product, ``[..., n]``, of the dtype of x, typed as varying over the workers.

  Raises:
    ValueError: as :func:`gather`; K is another one for x and the weight, or no multiple
      of the blocks; or the codecs of x and the weight do not fit one product.
    TypeError: an array has no real float dtype, or the codec of x or of the weight has
      no numbers of matrix units.

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
    Rouhani et al., `Microscaling Data Formats for Deep Learning
    <https://arxiv.org/abs/2310.10537>`_, 2023, section 3, which casts both inputs of
    each product in this way
  """
  wire = options.shard_wire(axis_name, params, grads, residual)
  of_w, of_x = wire.codec, wire.codec.to_nearest()
  if inputs is not None:
    of_x = policy.stateless("inputs", inputs)
  key = options.checked_key(key, of_w, wire.backward, of_x)
  x = options.checked_floats(x, real=True)
  w = options.checked_floats(w_shard, "w_shard", real=True)
  _check_shapes(x, w)
  _check_kinds(of_w, of_x, w)
  x, w = types.mark_varying((x, w), gather.axes_of(axis_name, x, w, residual))
  if residual is not None:
    gather.check_residual(residual, w, (wire.size * len(w), w.shape[1]))
  own = dataclasses.replace(wire, codec=of_x)

  def forward(x: jax.Array, w: jax.Array, residual: Any, key: Key) -> Any:
    lines = transport.gather_lines(w, wire, key)
    sent = transport.to_lines(x[None], own, options.folded(key, 2))
    rows, columns = _operand(sent, x, of_x), _operand(lines, w, of_w)
    sums = block_float.multiply(rows[:2], columns[:2])
    y = (sums * (rows[2][:, None] * columns[2])).astype(x.dtype)
    y = y.reshape(*x.shape[:-1], -1)
    return types.mark_varying(y, axis_name), (sent, lines, residual, key)

  (x_shape, w_shape), (x_dtype, w_dtype) = (x.shape, w.shape), (x.dtype, w.dtype)

  def backward(saved: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    sent, lines, residual, key = saved
    whole = transport.from_lines(lines, w_shape, of_w)
    given = transport.from_lines(sent, x_shape, of_x)
    whole, given = (y.astype(x_dtype).reshape(-1, y.shape[-1]) for y in (whole, given))
    flat = cotangent.reshape(-1, cotangent.shape[-1])
    of_inputs = block_float.dot(flat, whole, 0).astype(x_dtype).reshape(x_shape)
    of_whole = block_float.dot(flat.T, given, 0).astype(w_dtype)
    of_shard, new = gather.scatter_gradient(of_whole, residual, wire, key, 0)
    return of_inputs, of_shard, new, None

  return options.transposed(forward, backward, x, w, residual, key)


def _operand(lines: jax.Array, like: jax.Array, codec: Codec) -> Operand:
  """Reads lines of words: elements and scales of all rows, and a factor of each."""
  (words,) = split(lines, [_rows(like, codec)])
  read = lambda rows: codec.operand(Payload(rows), like=like)
  elements, scales, factors = jax.vmap(read)(words)
  flat = lambda x: x.reshape(-1, x.shape[-1])
  of_row = jnp.repeat(factors, flat(elements).shape[0] // len(lines))
  return flat(elements), flat(scales), of_row


def _rows(like: jax.Array, codec: Codec) -> tuple[int, int]:
  """Returns the shape of the rows of an array's payload."""
  return -(-like.size // codec.tile_size), codec.row_words


def _check_shapes(x: jax.Array, w: jax.Array) -> None:
  """Raises ValueError unless the arrays have a product."""
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


def _check_kinds(params: Codec, inputs: Codec, w: jax.Array) -> None:
  """Raises an error unless a matrix unit takes both codecs' numbers at once."""

  def scales(codec: Codec) -> tuple[str, int]:
    read = lambda rows: codec.operand(Payload(rows), like=w)[1]
    found = jax.eval_shape(read, jax.ShapeDtypeStruct(_rows(w, codec), jnp.uint32))
    return str(found.dtype), w.shape[-1] // found.shape[-1]

  if scales(params) != scales(inputs):
    raise ValueError(
      f"`inputs` must have the scales of `params`, {scales(params)} as dtype and "
      f"block, got {scales(inputs)}; matrix units take one kind."
    )
