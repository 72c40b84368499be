"""Runs differentiable collectives in every mode, and computes them in plain NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from gradcomp import codecs
from tests.specs import dithers
from tests.specs.float_cast import aps_byte
from tests.support.cases.float import cast_of
from tests.support.low_rank import gaussian
from tests.table import cases

KEY = (0, 7)  # of jax.random.key(7, impl="threefry2x32")
numbers = gaussian


def mapped(mode, function, workers):
  """The function of one worker's arrays, of all workers' ``[N, ...]``, compiled.

  Results come back as ``[N, ...]``. Arrays that the function closes over are equal on
  all workers.
  """
  if mode == "pmap":
    return jax.pmap(function, axis_name="data", devices=jax.devices()[:workers])
  if mode == "vmap":
    return jax.jit(jax.vmap(function, axis_name="data"))
  return mapped_over({"data": workers}, function, check_vma=mode == "shard_map")


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


def in_order(parts):
  return sum(parts[1:], parts[0])


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
  "bf16": codecs.Dense(dtype=jnp.bfloat16),
  "eight_bit": codecs.EightBit(),
  "eight_bit_buckets": codecs.EightBit(dtype="linear", bucket_size=64),
  "qsgd8": codecs.QSGD(bits=8, bucket_size=64),
  "qsgd4_nearest": codecs.QSGD(bits=4, bucket_size=32, rounding="nearest"),
  "float_cast": codecs.FloatCast(exponent_bits=4, mantissa_bits=3),
  "ternary": codecs.Ternary(clip_sigmas=None),
  "natural": codecs.Natural(),
  "mxfp4": codecs.BlockFloat(element="e2m1"),
  "nvfp4": codecs.BlockFloat(
    element="e2m1", scale="e4m3", block_size=16, rounding="stochastic"
  ),
}


MAKERS = {
  codecs.BlockFloat: cases.of_block_float,
  codecs.EightBit: cases.of_eight_bit,
  codecs.Natural: cases.of_natural,
  codecs.QSGD: cases.of_qsgd,
  codecs.Ternary: cases.of_ternary,
}


def roundtrip(codec, x, key):
  """What a payload of ``x`` decodes to, by NumPy alone: ``float32`` like ``x``."""
  x = np.asarray(x, np.float32)
  if isinstance(codec, codecs.FloatCast):
    cast = cast_of(codec, aps_byte(x))
    return cast.decode(cast.encode(x), x.size).reshape(x.shape)
  if isinstance(codec, codecs.Ternary):  # scales are each worker's own here
    codec = dataclasses.replace(codec, share_scale=False)
  fields = {x.name: getattr(codec, x.name) for x in dataclasses.fields(codec)}
  if isinstance(codec, codecs.Dense):
    return cases.of_dense(numpy_dtype=codec.dtype, **fields).through(x, key)
  return MAKERS[type(codec)](**fields).through(x, key)


def dither(worker, part=0, *stages, base=KEY):
  """The key of a part, behind stages (1 is a backward pass), and a worker's mask."""
  for number in (*stages, part):
    base = dithers.fold_in(base, number)
  return (*base, dithers.mask(worker))
