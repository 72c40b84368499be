"""Differentiable collectives take any shape and dtype, and keep NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from gradcomp import parallel
from gradcomp.codecs import (
  QSGD,
  Dense,
  EightBit,
)
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.cases.parallel import CODECS, mapped, numbers

N = 4
EIGHT = EightBit(bucket_size=64)
KEY = jax.random.key(3)


@pytest.mark.parametrize("mode", ["shard_map", *slow("pmap", "vmap")])
def test_any_shape_and_dtype(mode):
  """Scalars, primes and nothing; half precision comes back as it was."""
  arrays = [
    np.float32(3.0),
    numbers(0, 3),
    numbers(7).astype(np.float16),
    jnp.asarray(numbers(3, 1, 13), jnp.bfloat16),
  ]

  def function(number):
    given = [x + number.astype(x.dtype) for x in arrays]
    gathered = [parallel.all_gather(x, axis_name="data", codec=EIGHT) for x in given]
    totals = [parallel.psum(x, axis_name="data", codec=EIGHT) for x in given]
    return (
      given,
      gathered,
      totals,
      [parallel.psum_scatter(x, axis_name="data", codec=EIGHT) for x in gathered],
    )

  given, gathered, totals, back = mapped(mode, function, N)(np.float32(range(N)))
  for x, y, total, own in zip(given, gathered, totals, back, strict=True):
    assert x.dtype == y.dtype == total.dtype == own.dtype
    assert y.shape[1:] == (N * (x.shape[1] if x.ndim > 1 else 1), *x.shape[2:])
    wide = np.asarray(x, np.float32)
    whole = wide.reshape(-1, *x.shape[2:]) if x.ndim > 1 else wide
    near = functools.partial(np.testing.assert_allclose, rtol=0.1, atol=0.2)
    near(np.asarray(y[0], np.float32), whole)
    near(np.asarray(total[1], np.float32), wide.sum(0), atol=0.5)
    near(np.asarray(own, np.float32).reshape(wide.shape), N * wide, atol=0.5)


@pytest.mark.parametrize(
  "codec", [EIGHT, *slow(CODECS["float_cast"], CODECS["ternary"])], ids=str
)
def test_a_nan_is_seen_by_all(codec):
  """At least its own block is NaN, on every worker; also where it is rounded again."""
  x = numbers(N, 80)
  x[1, 70] = np.nan

  def function(x):
    gather = parallel.all_gather(x, axis_name="data", codec=codec, key=KEY)
    total = parallel.psum(x, axis_name="data", codec=codec, key=KEY)
    part = parallel.psum_scatter(x, axis_name="data", codec=codec, key=KEY)
    return gather[80 + 70], total[70], part[10]

  gathered, total, part = mapped("vmap", function, N)(x)
  assert np.isnan(gathered).all() and np.isnan(total).all() and np.isnan(part[3])


def test_complex_numbers_travel_as_pairs():
  x = numbers(N, 2, 8) + 1j * numbers(N, 2, 8, seed=1)

  def function(x):
    loss = lambda x: jnp.sum(
      jnp.abs(parallel.psum(x, axis_name="data", codec=Dense())) ** 2
    )
    whole = parallel.all_gather(x, axis_name="data", codec=Dense(), axis=-1)
    part = parallel.psum_scatter(whole, axis_name="data", codec=Dense(), axis=-1)
    return whole, part, jax.grad(loss)(x)

  whole, part, gradient = mapped("vmap", function, N)(x)
  np.testing.assert_array_equal(whole[0], np.concatenate(x, axis=-1))
  np.testing.assert_allclose(part, N * x, rtol=1e-6)
  # JAX's gradient of |z|^2 is twice the conjugate of z.
  want = np.stack([2 * x.sum(0).conj()] * N)
  np.testing.assert_allclose(gradient, want, rtol=1e-5, atol=1e-5)


def test_types_say_what_is_equal():
  """Only a sum, and what is rounded alike, may leave a map as replicated."""

  def out(function):
    return jax.jit(
      jax.shard_map(function, mesh=modes.mesh(N), in_specs=P("data"), out_specs=P())
    )

  x = numbers(N * 3)
  total = out(lambda x: parallel.psum(x, axis_name="data", codec=EIGHT))
  alike = out(
    lambda x: parallel.all_gather(
      x, axis_name="data", codec=EIGHT, own="coded", to="invarying"
    )
  )
  assert total(x).shape == (3,) and alike(x).shape == x.shape
  with pytest.raises(ValueError, match="out_specs"):
    out(lambda x: parallel.all_gather(x, axis_name="data", codec=EIGHT)).lower(x)


def test_random_numbers_differ_by_part_and_direction():
  """Half a step everywhere: equal draws would round equal numbers alike."""
  codec = QSGD(bits=2, bucket_size=32, norm="max")
  x = np.full((N, N * 64), 0.5, np.float32)
  x[:, ::32] = 1.0

  def function(x):
    parts = parallel.all_to_all(
      x,
      axis_name="data",
      split_axis=0,
      concat_axis=0,
      codec=codec,
      own="coded",
      key=KEY,
    )
    send = lambda x: parallel.ppermute(
      x, axis_name="data", perm=RING, codec=codec, key=KEY
    )
    y, back = jax.vjp(send, x)
    return parts, y, back(x)[0]

  parts, there, back = mapped("vmap", function, N)(x)
  parts = np.asarray(parts).reshape(N, N, 64)
  for i in range(N):
    for j in range(i):
      assert (parts[i, 0] != parts[j, 0]).any()
  assert (np.asarray(there)[RING[0][1]] != np.asarray(back)[RING[0][0]]).any()


def test_arrays_that_are_equal_on_all_workers():
  """Under vmap, where JAX knows it: they have no axis of the workers."""
  x = numbers(8)

  def function(worker):
    part = parallel.psum_scatter(x, axis_name="data", codec=Dense())
    swapped = parallel.all_to_all(
      x, axis_name="data", split_axis=0, concat_axis=0, codec=Dense()
    )
    return part, swapped, parallel.psum(x, axis_name="data", codec=Dense())

  part, swapped, total = mapped("vmap", function, N)(np.arange(N))
  np.testing.assert_array_equal(part, 4 * x.reshape(N, 2))
  np.testing.assert_array_equal(
    swapped, np.repeat(x.reshape(N, 1, 2), N, 1).reshape(N, 8)
  )
  np.testing.assert_array_equal(total, np.stack([4 * x] * N))


RING = [(0, 1), (1, 2), (2, 3), (3, 0)]
