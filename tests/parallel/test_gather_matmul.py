"""A product with a gathered weight takes its words as they came."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.kernels.block_float import _product_by_unit
from gradcomp.codecs import QSGD, BlockFloat
from gradcomp.parallel import gather_matmul
from tests.plugins.slow_cases import slow
from tests.support.cases.parallel import KEY, dither, mapped, nbytes, numbers, roundtrip
from tests.support.lowering import all_kernels

N, M, ROWS, K = 4, 6, 8, 64
MXFP8, MXFP4 = BlockFloat(), BlockFloat(element="e2m1")
NVFP4 = BlockFloat(element="e2m1", scale="e4m3", block_size=16)
RANDOM = BlockFloat(element="e2m1", scale="e4m3", block_size=16, rounding="stochastic")
CODECS = {
  "mxfp8": MXFP8,
  "mxfp8 e5m2": BlockFloat(element="e5m2"),
  "mxfp4": MXFP4,
  "nvfp4": NVFP4,
  "nvfp4 stochastic": RANDOM,
}
DRAWN = jax.random.wrap_key_data(jnp.array(KEY, jnp.uint32))
COARSE = QSGD(bits=2, bucket_size=32, rounding="nearest")
OVER = dict(axis_name="data")


def product(**options):
  """``(x, w, cotangent) -> (y, dx, dw)`` of a product."""

  def run(x, w, cotangent):
    y, back = jax.vjp(lambda x, w: gather_matmul(x, w, **OVER, **options), x, w)
    return y, *back(cotangent)

  return run


def arrays(dtype=np.float32):
  given = numbers(N, M, K), numbers(N, ROWS, K, seed=1), numbers(N, M, N * ROWS)
  return tuple(x.astype(dtype) for x in given)


def assert_summed(got, a, b):
  """``got`` is ``a @ b`` but for the order of sums: n eps of absolute values."""
  bound = a.shape[-1] * 2.0**-23 * (np.abs(a) @ np.abs(b))
  assert (np.abs(got - np.float64(a) @ np.float64(b)) <= bound).all()


@pytest.mark.parametrize("mode", ["shard_map", *slow("vmap", "pmap")])
@pytest.mark.parametrize(
  "name", ["mxfp8", "nvfp4 stochastic", *slow("mxfp8 e5m2", "mxfp4", "nvfp4")]
)
def test_it_is_the_product_of_what_both_payloads_hold(name, mode):
  """By NumPy alone, forward and backward, with sums in any order."""
  codec, (x, w, cotangent) = CODECS[name], arrays()
  options = dict(params=codec, grads=None, key=DRAWN if codec.needs_key else None)
  y, dx, dw = mapped(mode, product(**options), N)(x, w, cotangent)
  whole = np.concatenate([roundtrip(codec, w[i], dither(i)) for i in range(N)])
  given = [roundtrip(codec.to_nearest(), x[i], None) for i in range(N)]
  parts = [np.split(cotangent[i].T, N) for i in range(N)]
  for i in range(N):
    assert_summed(y[i], given[i], whole.T)
    assert_summed(dx[i], cotangent[i], whole)
    # One sum over all workers' rows is the sum of their products.
    own = np.concatenate([parts[j][i] for j in range(N)], axis=1)
    assert_summed(dw[i], own, np.concatenate(given))


def test_inputs_may_have_a_codec_of_their_own():
  """Its elements are others, and it draws by the third key."""
  codec = BlockFloat(element="e5m2", rounding="stochastic")
  options = dict(axis_name="data", params=MXFP4, grads=None, key=DRAWN)
  x, w, _ = arrays()
  ways = [functools.partial(gather_matmul, inputs=y, **options) for y in (codec, MXFP8)]
  y, exact = mapped("vmap", lambda *given: [way(*given) for way in ways], N)(x, w)
  whole = np.concatenate([roundtrip(MXFP4, w[i], None) for i in range(N)])
  assert_summed(exact[0], roundtrip(MXFP8, x[0], None), whole.T)
  # E5M2 has two bits of a mantissa: a step is at most a quarter of a number.
  assert 0 < np.abs(y[0] - exact[0]).max() <= (np.abs(x[0]) @ np.abs(whole).T).max() / 4


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32])
def test_any_leading_axes_and_the_dtypes_of_the_inputs(dtype):
  x, w, _ = arrays(dtype)
  options = dict(axis_name="data", params=MXFP8, grads=MXFP8)

  def grads(x, w):
    loss = lambda x, w: gather_matmul(x, w, **options).astype(jnp.float32).sum()
    several = x.reshape(2, M // 2, K)
    pairs = gather_matmul(several, w, **options), gather_matmul(x[0], w, **options)
    return *pairs, gather_matmul(x, w, **options), *jax.grad(loss, (0, 1))(x, w)

  several, one, y, dx, dw = jax.device_get(mapped("vmap", grads, N)(x, w))
  assert several.shape == (N, 2, M // 2, N * ROWS) and one.shape == (N, N * ROWS)
  # Blocks are the same, so all but the order of sums is.
  bound = dict(rtol=0, atol=float(jnp.finfo(dtype).eps) * np.abs(np.float32(y)).max())
  flat = np.float32(several).reshape(y.shape)
  np.testing.assert_allclose(flat, np.float32(y), **bound)
  np.testing.assert_allclose(np.float32(one), np.float32(y)[:, 0], **bound)
  assert y.dtype == dx.dtype == dw.dtype == dtype
  assert (dx.shape, dw.shape) == (x.shape, w.shape)


@pytest.mark.parametrize("mode", ["shard_map", *slow("vmap")])
def test_what_the_gradient_loses_is_the_new_residual(mode):
  """With what came it is the sum of the cotangents, as of `gather`."""
  x, w, cotangent = arrays()
  old = 0.1 * numbers(N, N * ROWS, K, seed=3)

  def run(grads, x, w, residual, cotangent):
    given = dict(params=MXFP8, grads=grads, **OVER)
    y_of = lambda w, residual: gather_matmul(x, w, residual=residual, **given)
    return jax.vjp(y_of, w, residual)[1](cotangent)

  both = lambda *given: [run(grads, *given) for grads in (COARSE, None)]
  (dw, new), (exact, none) = jax.device_get(mapped(mode, both, N)(x, w, old, cotangent))
  assert np.abs(new).max() > 0.1 and not none.any()
  whole = np.concatenate(dw) + new.sum(0)
  # The sums have up to eight addends below 100 in another order: 2**-24 of each.
  np.testing.assert_allclose(whole, np.concatenate(exact), rtol=0, atol=1e-4)


@pytest.mark.parametrize("check_vma", [True, False])
def test_words_alone_are_sent_and_none_is_decoded_before_the_product(check_vma):
  """One gather of words forward, none backward; GPUs get operands of 8 bits."""
  mode = "shard_map" if check_vma else "shard_map_unchecked"
  traced = mapped(mode, product(params=MXFP8, grads=COARSE), N).trace(*arrays())
  with all_kernels():
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
  (line,) = [x for x in text.splitlines() if "@__op$block_scaled_dot" in x]
  assert f"tensor<1x{M}x{K}xf8E4M3FN>, tensor<1x{N * ROWS}x{K}xf8E4M3FN>" in line
  assert f"tensor<1x{N * ROWS}x{K // 32}xf8E8M0FNU>" in line
  lowered = traced.lower()
  text = lowered.as_text()
  (line,) = [x for x in text.splitlines() if "dot_general" in x and "xbf16" in x]
  assert f"tensor<{M}x{K}xbf16>, tensor<{N * ROWS}x{K}xbf16>" in line
  report = gradcomp.wire_report(lowered.compile())
  assert {c.kind: (c.dtype, c.bytes_sent) for c in report.collectives} == {
    "all-gather": ("u32", (N - 1) * nbytes(MXFP8, ROWS * K)),
    "all-to-all": ("u32", (N - 1) * nbytes(COARSE, ROWS * K)),
  }


def test_workers_of_a_vmap_on_gpus_take_their_products_one_by_one():
  """Weights are one array of all workers there, which JAX's product cannot map over."""
  of = lambda *shape: jnp.ones(shape, jnp.float8_e4m3fn)
  scales = lambda *shape: jnp.ones(shape, jnp.float8_e8m0fnu)
  given = of(N, M, K), scales(N, M, 2), of(ROWS, K), scales(ROWS, 2)
  y = jax.eval_shape(jax.vmap(_product_by_unit, (0, 0, None, None)), *given)
  assert (y.shape, y.dtype) == ((N, M, ROWS), jnp.float32)


def test_a_nan_reaches_every_sum_that_has_it():
  """An input's fills one row of one worker, and a weight's one column of all."""
  step = mapped("vmap", product(params=MXFP8, grads=None), N)
  for where, place in (0, (2, 3)), (1, (..., 2 * ROWS + 3)):
    given = arrays()
    given[where][2, 3, 40] = np.nan
    y = np.asarray(step(*given)[0])
    want = np.zeros(y.shape, bool)
    want[place] = True
    np.testing.assert_array_equal(np.isnan(y), want)


def test_weights_of_equal_type_on_hosts_get_the_sum_over_hosts():
  """By JAX, where types are checked, and inputs of all hosts and chips differ."""
  mesh = jax.make_mesh((2, 2), ("host", "chip"), (AxisType.Auto,) * 2)
  x, w = numbers(N * M, K), numbers(2 * ROWS, K, seed=1)
  options = dict(axis_name="chip", params=MXFP8, grads=None)
  grads = lambda x, w: jax.grad(lambda w: gather_matmul(x, w, **options).sum())(w)
  specs = dict(in_specs=(P(("host", "chip")), P("chip")), out_specs=P("chip"))
  got = jax.jit(jax.shard_map(grads, mesh=mesh, **specs))(x, w)
  rows = roundtrip(MXFP8, x, None).sum(0)
  # Sums of 24 numbers below 4, in another order.
  np.testing.assert_allclose(got, np.tile(rows, (2 * ROWS, 1)), rtol=0, atol=1e-4)
