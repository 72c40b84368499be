"""Runs differentiable collectives in every mode, and computes them in plain NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec as P

from gradcomp.codecs import (
  QSGD,
  BlockFloat,
  Dense,
  EightBit,
  FloatCast,
  Natural,
  Ternary,
)
from tests.specs import block_float, dense, dithers, eight_bit, natural, qsgd, ternary
from tests.specs import floats as oracle_floats
from tests.specs.float_cast import Cast, aps_byte

KEY = (0, 7)  # of jax.random.key(7, impl="threefry2x32")


def mapped(mode, function, workers):
  """The function of one worker's arrays, of all workers' ``[N, ...]``, compiled.

  Results come back as ``[N, ...]``. Arrays that the function closes over are equal on
  all workers.
  """
  if mode == "pmap":
    devices = jax.devices()[:workers]
    return jax.pmap(function, axis_name="data", devices=devices)
  if mode == "vmap":
    return jax.jit(jax.vmap(function, axis_name="data"))

  axes = {"data": workers}
  return mapped_over(axes, function, check_vma=mode == "shard_map")


def mapped_over(axes, function, *, check_vma=True):
  """The same over axes of a mesh of the first devices, by their names and sizes."""
  sizes, every = tuple(axes.values()), P(tuple(axes))
  devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)

  def local(*arrays):
    result = function(*jax.tree.map(lambda x: x[0], arrays))
    return jax.tree.map(lambda x: x[None], result)

  mesh = jax.sharding.Mesh(devices, tuple(axes))
  specs = dict(in_specs=every, out_specs=every, check_vma=check_vma)
  return jax.jit(jax.shard_map(local, mesh=mesh, **specs))


def numbers(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def in_order(parts):
  total = parts[0]
  for part in parts[1:]:
    total = total + part
  return total


def assert_rounded(got, expected):
  np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def nbytes(codec, size):
  """The bytes that an array's payload has, by the arithmetic of the page."""
  return 4 * -(-size // codec.tile_size) * codec.row_words


def with_gradient(function, weights):
  """``x -> (y, dx)``, where dx is the gradient of ``sum(weights * y)``."""

  def both(x, weights):
    def loss(x):
      y = function(x)
      return jnp.sum(weights.astype(jnp.float32) * y.astype(jnp.float32)), y

    dx, y = jax.grad(loss, has_aux=True)(x)
    return y, dx

  return both if weights is None else lambda x: both(x, weights)


CODECS = {
  "bf16": Dense(dtype=jnp.bfloat16),
  "eight_bit": EightBit(),
  "eight_bit_buckets": EightBit(dtype="linear", bucket_size=64),
  "qsgd8": QSGD(bits=8, bucket_size=64),
  "qsgd4_nearest": QSGD(bits=4, bucket_size=32, rounding="nearest"),
  "float_cast": FloatCast(exponent_bits=4, mantissa_bits=3),
  "ternary": Ternary(clip_sigmas=None),
  "natural": Natural(),
  "mxfp4": BlockFloat(element="e2m1"),
  "nvfp4": BlockFloat(
    element="e2m1", scale="e4m3", block_size=16, rounding="stochastic"
  ),
}


def roundtrip(codec, x, key):
  """What a payload of ``x`` decodes to, by NumPy alone: ``float32`` like ``x``.

  Args:
    codec: one of ``CODECS``.
    x: an array.
    key: three words, a key and a mask; only read for stochastic rounding.
  """
  x = np.asarray(x, np.float32)
  return _ROUNDTRIPS[type(codec)](codec, x, key).reshape(x.shape)


def dither(worker, part=0, *stages, base=KEY):
  """The key that all workers share for a part, and a worker's mask.

  Args:
    worker: the number of the worker.
    part: the number of the array among those that the worker encodes at once.
    *stages: what is folded into the key before: 1 in a backward pass.
    base: the key of the call.
  """
  for number in (*stages, part):
    base = dithers.fold_in(base, number)
  return (*base, dithers.mask(worker))


def _dense(codec, x, key):
  rows = dense.encode(x, dtype=ml_dtypes.bfloat16)
  return dense.decode(rows, x.size, dtype="bfloat16")


def _eight_bit(codec, x, key):
  rule = dict(data_type=codec.dtype, bucket_size=codec.bucket_size)
  scales = eight_bit.scales_of(x, **rule)
  rows = eight_bit.encode(x, scales=scales, **rule)
  return eight_bit.decode(rows, x.size, **rule)


def _qsgd(codec, x, key):
  rule = dict(bits=codec.bits, bucket_size=codec.bucket_size, levels=codec.levels)
  rows = qsgd.encode(x, key=key, norm=codec.norm, rounding=codec.rounding, **rule)
  return qsgd.decode(rows, x.size, **rule)


def _float_cast(codec, x, key):
  fmt = oracle_floats.Format(codec.exponent_bits, codec.mantissa_bits)
  cast = Cast(fmt, byte=aps_byte(x))
  return cast.decode(cast.encode(x), x.size)


def _ternary(codec, x, key):
  rule = dict(packing=codec.packing, bucket_size=codec.bucket_size)
  scales = ternary.scales_of(x, **rule)
  rows = ternary.encode(x, key=key, scales=scales, **rule)
  return ternary.decode(rows, x.size, **rule)


def _natural(codec, x, key):
  rows = natural.encode(x, key=key)
  return natural.decode(rows, x.size)


def _block_float(codec, x, key):
  rule = dict(element=codec.element, scale=codec.scale, block_size=codec.block_size)
  rows = block_float.encode(x, key=key if codec.needs_key else None, **rule)
  return block_float.decode(rows, x.size, **rule)


_ROUNDTRIPS = {
  BlockFloat: _block_float,
  Dense: _dense,
  EightBit: _eight_bit,
  QSGD: _qsgd,
  FloatCast: _float_cast,
  Ternary: _ternary,
  Natural: _natural,
}
