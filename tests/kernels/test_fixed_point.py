"""Division is correctly rounded, whatever compilers and devices make of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp._src.kernels.common import fixed_point


def test_exact_division_is_correctly_rounded():
  rng = np.random.default_rng(0)
  x, by = np.float32(2) ** rng.uniform(-60, 60, (2, 20_000)).astype(np.float32)
  x *= rng.choice(np.float32([-1, 1]), x.size)
  by[:4] = np.float32([1, 3, 2**-96, np.nan])
  x[4:10] = np.float32([0, 1e-40, np.inf, -np.inf, np.nan, -0.0])
  expected = x / by
  expected[5] = 0  # subnormal numbers count as zero
  np.testing.assert_array_equal(jax.jit(fixed_point.exact_divide)(x, by), expected)


def test_a_division_by_a_constant_is_one():
  """Compilers would multiply by its reciprocal."""
  x = np.exp(np.random.default_rng(0).uniform(-60, 60, 20_000)).astype(np.float32)
  constants = np.float32([0.7, 3, 64 * 0.79788])
  divided = lambda x: [fixed_point.divide(x, jnp.full_like(x, by)) for by in constants]
  np.testing.assert_array_equal(jax.jit(divided)(x), [x / by for by in constants])


@pytest.mark.parametrize("shape", [(), (1, 1)], ids=str)
def test_a_division_by_a_number_of_many_elements_is_one(shape):
  """Compilers would multiply by its reciprocal, in a loop or out of it."""
  scales = np.linspace(1, 2, 200, dtype=np.float32)
  many = lambda scale: jnp.broadcast_to(scale.reshape(shape), (300, 1))
  first = lambda scale: fixed_point.top_multiplier(1 << 16, many(scale))[0, 0]
  expected = np.nextafter(np.float32(1 << 16), np.float32(np.inf)) / scales
  alone = jax.jit(first)
  np.testing.assert_array_equal([alone(x) for x in scales], expected)
  in_loop = jax.jit(lambda x: jax.lax.map(first, x))
  np.testing.assert_array_equal(in_loop(scales), expected)


@pytest.mark.parametrize(("platform", "corrects"), [("cpu", False), ("cuda", True)])
def test_integers_correct_the_division_of_gpus(platform, corrects):
  """XLA's division of floats there is not correctly rounded."""
  x = jax.ShapeDtypeStruct((8,), jnp.float32)
  traced = jax.jit(fixed_point.divide).trace(x, x)
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  assert text.count("stablehlo.divide") == 1
  assert ("stablehlo.shift_left" in text) == corrects


def test_division_is_correctly_rounded_where_gpus_are_off(monkeypatch):
  """Their division of floats by up to two units in the last place."""
  rng = np.random.default_rng(0)
  count = 2**18
  total, divisor = np.exp(rng.uniform(-20, 20, (2, count))).astype(np.float32)
  total[: count // 2] = rng.integers(1, 2**24, count // 2)
  divisor[: count // 2] = rng.integers(1, 4097, count // 2)
  divide, asked = jnp.divide, []

  def nearly(x, y, off):
    asked.append(y.shape)
    bits = jax.lax.bitcast_convert_type(divide(x, y), jnp.int32)
    return jax.lax.bitcast_convert_type(bits + off, jnp.float32)

  @jax.jit
  def quotients(x, y, off):
    monkeypatch.setattr(jnp, "divide", functools.partial(nearly, off=off))
    return fixed_point.exact_quotient(x, y)

  for off in (-2, -1, 0, 1, 2):
    np.testing.assert_array_equal(quotients(total, divisor, off), total / divisor)
  assert asked == [total.shape]


def test_the_factor_of_a_scale_is_correctly_rounded():
  rng = np.random.default_rng(0)
  divisor = np.exp(rng.uniform(np.log(2.0**-96), np.log(3e38), 2**18))
  edges = [0, 2.0**-96, 1, 1 + 2.0**-23, 2 - 2.0**-23, np.finfo(np.float32).max]
  divisor = np.append(divisor, [*edges, np.nan]).astype(np.float32)
  tops = [1 << 15, 1 << 16, 7 << 16, 127 << 16, 32767 << 16]
  factors = lambda x, *way: [fixed_point.top_multiplier(t, x, *way) for t in tops]
  both = jax.jit(lambda x: (factors(x), factors(x, fixed_point.exact_quotient)))
  np.testing.assert_array_equal(*both(divisor))
