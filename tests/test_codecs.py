"""Every codec through the laws, and QSGD against the paper's definition."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import laws
import ml_dtypes
import numpy as np
import oracle
import pytest
import wire_decoder
import wire_decoder_codecs

from gradcomp.codecs import QSGD, Dense, EightBit, FloatCast, OneBit, Ternary
from gradcomp.kernels.scales import norms

every_codec = pytest.mark.parametrize("codec", laws.CODECS, ids=laws.name)
every_qsgd = pytest.mark.parametrize("codec", laws.QSGD_CODECS, ids=laws.name)

_DTYPES = {
  "float32": np.float32,
  "float16": np.float16,
  "bfloat16": ml_dtypes.bfloat16,
}


def ragged(codec):
  """Two whole tiles and a part of a third, of a size that divides nothing."""
  return laws.gaussian(2 * codec.tile_size + 77)


@every_codec
def test_laws_on_a_ragged_leaf(codec):
  x = ragged(codec)
  laws.payload_is_the_documented_rows(codec, x)
  if (laws.sharing(codec), getattr(codec, "norm", "")) != (None, "l2"):
    # A whole tensor's l2 norm is added in another order when zeros follow.
    laws.padding_never_leaks(codec, x)
  laws.rows_stand_alone(codec, x)
  laws.zeros_stay(codec, x.size)
  laws.batches_are_independent(codec, x)
  for bad in (np.nan, np.inf, -np.inf):
    laws.non_finite_buckets_are_nan(codec, x, bad)


@pytest.mark.parametrize(
  "codec",
  [
    QSGD(bits=4, bucket_size=64),
    QSGD(bits=4, bucket_size=None, norm="l2"),
    QSGD(bits=3, bucket_size=64, levels="nonuniform"),
    OneBit(),
    OneBit(per_column=True),
    Ternary(bucket_size=64),
    Ternary(packing="base3"),
    EightBit(block_size=64),
    Dense(dtype=jnp.bfloat16),
  ],
  ids=laws.name,
)
def test_double_precision_changes_nothing(codec):
  """With jax_enable_x64, where what has no dtype of its own becomes float64."""
  x = ragged(codec)
  key = laws.KEY if codec.needs_key else None
  encode = lambda x: codec.encode(x, key=key)
  rows = np.asarray(jax.jit(encode)(jnp.asarray(x)).rows)
  with jax.enable_x64(True):
    wide = jax.jit(lambda x: encode(x))(jnp.asarray(x))
    empty = codec.encode(jnp.zeros(0, jnp.float32), key=key)
    restored = jax.jit(lambda p: codec.decode(p, like=x))(wide)
  assert wide.rows.dtype == empty.rows.dtype == jnp.uint32
  assert restored.dtype == jnp.float32
  np.testing.assert_array_equal(wide.rows, rows)


@pytest.mark.parametrize(
  "codec",
  [c for c in laws.CODECS if laws.sharing(c) is not None and not laws.clips(c)],
  ids=laws.name,
)
def test_rows_encode_like_leaves(codec):
  """With one scale a tensor they do not: then each row has its own.

  Nor where a leaf is clipped: rows have no standard deviation.
  """
  laws.rows_encode_like_leaves(codec, ragged(codec))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
  "codec",
  [
    QSGD(bits=4),
    QSGD(bits=3, bucket_size=None, levels="uniform"),
    QSGD(bits=3, levels="nonuniform"),
    Dense(),
    OneBit(),
    OneBit(per_column=True),
    Ternary(),
    Ternary(packing="base3", share_scale=False),
    EightBit(),
  ],
  ids=laws.name,
)
def test_shapes_and_dtypes_return(codec, dtype):
  for shape in ((), (1,), (0,), (0, 3), (5, 7), (3, 3, 8, 16)):
    laws.shape_and_dtype_return(codec, shape, dtype)


@every_qsgd
def test_payload_is_the_oracles(codec):
  """Bit for bit, codes and scales; l2 scales to 2 ulp, for the order of additions."""
  x = ragged(codec)
  x[3], x[40] = 0.0, -0.0
  x[64:96] = 0.0
  hyper = dict(bits=codec.bits, bucket_size=codec.bucket_size)
  rows = np.asarray(laws.encoder(codec)(jnp.asarray(x), laws.KEY).rows)
  scales = rows[:, codec.bucket_size or 512 :].view(np.float32)
  expected = oracle.qsgd_scales(x, norm=codec.norm, **hyper)
  if codec.norm == "max":
    np.testing.assert_array_equal(scales, expected.reshape(scales.shape))
  else:
    # 64 additions and a square root in float32, each within half an ulp, of which
    # random signs leave few: 1e-6 is 8 ulp.
    np.testing.assert_allclose(scales, expected.reshape(scales.shape), rtol=1e-6)
  np.testing.assert_array_equal(
    rows,
    oracle.qsgd_encode(
      x,
      key=np.asarray(laws.KEY) if codec.needs_key else None,
      norm=codec.norm,
      levels=codec.levels,
      rounding=codec.rounding,
      scales=scales,
      **hyper,
    ),
  )


def decode_by_the_page(codec, rows, size):
  """The values of a payload, by the decoders that know the page alone."""
  if isinstance(codec, Dense):
    dtype = _DTYPES[jnp.dtype(codec.dtype).name]
    return wire_decoder.decode_dense(rows, size, dtype)
  if isinstance(codec, OneBit):
    return wire_decoder_codecs.decode_one_bit(rows, size, bucket_size=codec.bucket_size)
  if isinstance(codec, Ternary):
    return wire_decoder_codecs.decode_ternary(
      rows, size, packing=codec.packing, bucket_size=codec.bucket_size
    )
  if isinstance(codec, EightBit):
    return wire_decoder_codecs.decode_eight_bit(
      rows,
      size,
      data_type=codec.data_type,
      block_size=codec.block_size,
      exponent_offset=codec.exponent_offset,
    )
  if isinstance(codec, FloatCast):
    return wire_decoder_codecs.decode_float_cast(
      rows,
      size,
      exponent_bits=codec.exponent_bits,
      mantissa_bits=codec.mantissa_bits,
      scale=codec.scale,
    )
  hyper = dict(bits=codec.bits, bucket_size=codec.bucket_size)
  if codec.fitted:
    return wire_decoder_codecs.decode_nonuniform(rows, size, **hyper)
  return wire_decoder.decode_qsgd(rows, size, levels=codec.levels, **hyper)


@every_codec
def test_an_independent_decoder_reads_every_payload(codec):
  x = ragged(codec)
  rows = np.asarray(laws.encoder(codec)(jnp.asarray(x), laws.KEY).rows)
  expected = decode_by_the_page(codec, rows, x.size)
  np.testing.assert_array_equal(laws.round_trip(codec, x), expected)


@every_qsgd
def test_errors_stay_below_a_step(codec):
  """Stochastic: less than a step of the bucket's scale; nearest: half of it."""
  x = ragged(codec)
  rows = laws.encoder(codec)(jnp.asarray(x), laws.KEY).rows
  step = np.asarray(rows[:, codec.bucket_size or 512 :]).view(np.float32)
  intervals = 2 ** (codec.bits - 1) - 1
  step = (
    step / intervals
    if codec.levels == "sign_magnitude"
    else (2 * step / (2**codec.bits - 1))
  )
  each = np.repeat(step.ravel(), codec.tile_size // (step.size // rows.shape[0]))
  share = 0.5 if codec.rounding == "nearest" else 1.0
  # The fixed-point grid: 2^-16 of a step; float32 rounding of a value: 2^-22 of it.
  grid = 2.0**-16 * each[: x.size] + 2.0**-22 * np.abs(x)
  assert (np.abs(laws.round_trip(codec, x) - x) <= share * each[: x.size] + grid).all()


@pytest.mark.parametrize(
  "bits, levels, norm",
  [(*scheme, "max") for scheme in laws.SCHEMES]
  + [(4, "sign_magnitude", "l2"), (2, "uniform", "l2")],
)
def test_stochastic_rounding_is_unbiased(bits, levels, norm):
  codec = QSGD(bits=bits, bucket_size=64, levels=levels, norm=norm)
  laws.mean_is_the_input(codec, laws.gaussian(500), draws=1000)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_variance_is_within_the_papers_bound(bits):
  """E||Q(x)-x||^2 <= min(n/s^2, sqrt(n)/s) ||x||^2 with the l2 norm, per bucket."""
  n = 256
  codec = QSGD(bits=bits, bucket_size=n, norm="l2")
  s = 2 ** (bits - 1) - 1
  for x in (laws.gaussian(n), np.eye(1, n, 3, dtype=np.float32)[0] + 1e-3):
    batch = jnp.stack([laws.KEY] * 400).at[:, 1].set(jnp.arange(400, dtype=jnp.uint32))
    draw = jax.vmap(lambda key, x=x: codec.decode(codec.encode(x, key=key), like=x))
    error = np.asarray(jax.jit(draw)(batch), np.float64) - x
    squares = (error**2).sum(axis=1)
    bound = min(n / s**2, np.sqrt(n) / s) * np.sum(np.float64(x) ** 2)
    # The sample mean of 400 draws, less 5 of its standard errors.
    assert squares.mean() - 5 * squares.std() / 20 <= bound
    expected = oracle.qsgd_expected_variance(
      x, bits=bits, bucket_size=n, norm="l2", levels="sign_magnitude"
    )
    assert abs(squares.mean() - expected) <= 5 * squares.std() / 20 + 1e-4 * expected


@pytest.mark.parametrize("bits, levels", laws.SCHEMES)
def test_nearest_rounding_is_idempotent(bits, levels):
  codec = QSGD(bits=bits, bucket_size=64, levels=levels, rounding="nearest")
  once = laws.round_trip(codec, ragged(codec))
  if bits == 16:
    # A step is 2^-15 of the scale and a value is rounded to 2^-24 of itself: the value
    # is exact again, though the code of a product may be one ulp off.
    np.testing.assert_allclose(laws.round_trip(codec, once), once, rtol=2.0**-23)
  else:
    np.testing.assert_array_equal(laws.round_trip(codec, once), once)


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("bits, levels", laws.SCHEMES)
def test_constant_buckets_are_exact(bits, levels, rounding):
  codec = QSGD(bits=bits, bucket_size=64, levels=levels, rounding=rounding)
  values = np.float32([1.0, -1 / 3, 3e38, 2.0**-96, -7e-20, 0.1, np.pi])
  x = np.repeat(values, 64)
  np.testing.assert_array_equal(laws.round_trip(codec, x), x)


@pytest.mark.parametrize(
  "codec",
  [QSGD(bits=4, bucket_size=64), QSGD(bits=8, bucket_size=64, levels="uniform")],
  ids=laws.name,
)
def test_the_largest_element_never_misses_its_level(codec):
  """Of 2^20 draws, each with 2^-16 for an error of one fixed-point unit to show."""
  scales = laws.gaussian(2**14)
  x = np.repeat(scales, 64)
  np.testing.assert_array_equal(laws.round_trip(codec, x), x)


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bucket_size", [64, 512])
def test_a_nan_is_seen_wherever_it_is(bucket_size, norm):
  """One in each bucket but the last, at every position: a maximum may drop it."""
  buckets = np.ones((bucket_size + 1, bucket_size), np.float32)
  np.fill_diagonal(buckets, np.nan)
  codec = QSGD(bits=4, bucket_size=bucket_size, norm=norm)
  restored = laws.round_trip(codec, buckets)
  assert np.isnan(restored[:-1]).all()
  assert np.isfinite(restored[-1]).all()


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_zeros_among_others_stay_zero(norm):
  x = laws.gaussian(512)
  x[::3] = 0
  restored = laws.round_trip(QSGD(bits=2, norm=norm), x)
  assert (restored[::3] == 0).all()


def test_scales_of_tiny_and_huge_buckets():
  """Subnormal buckets vanish, tiny ones keep their mean, huge ones do not overflow."""
  codec = QSGD(bits=4, bucket_size=32, norm="l2")
  x = np.repeat(np.float32([1e-40, 1e-30, 3.4e38]), 32)
  restored = laws.round_trip(codec, x)
  assert (restored[:32] == 0).all()
  assert np.isfinite(restored).all()
  assert set(np.abs(restored[32:64])) <= {np.float32(0), np.float32(2.0**-96) / 7}


def test_l2_norms_of_tiny_and_huge_buckets():
  """Squares of their elements would vanish or be infinite; the norms are neither."""
  x = laws.gaussian((5, 64)) * np.float32([[1e-30], [1e-22], [1], [1e22], [1e37]])
  expected = np.sqrt(np.square(x, dtype=np.float64).sum(axis=1))
  # 64 additions and a square root in float32: see test_payload_is_the_oracles.
  np.testing.assert_allclose(norms(jnp.asarray(x), "l2"), expected, rtol=1e-6)


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(
  hnp.arrays(
    np.float32,
    hnp.array_shapes(max_dims=3, min_side=0, max_side=9),
    elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
  )
)
def test_any_values(x):
  """Finite buckets stay finite and below a step's error; others are NaN."""
  codec = QSGD(bits=4, bucket_size=32)
  restored = laws.round_trip(codec, x).ravel()
  flat = x.ravel()
  for start in range(0, flat.size, 32):
    bucket, got = flat[start : start + 32], restored[start : start + 32]
    if not np.isfinite(bucket).all():
      assert np.isnan(got).all()
      continue
    scale = np.maximum(np.abs(bucket).max(), np.float32(2.0**-96)).astype(np.float64)
    assert (np.abs(got.astype(np.float64) - bucket) <= scale / 7 * (1 + 1e-4)).all()


@pytest.mark.parametrize("dtype", list(_DTYPES))
def test_dense_is_the_cast_of_the_dtype(dtype):
  x = np.concatenate([laws.gaussian(1000), np.float32([0, -0.0, np.inf, 1e-41, 3e38])])
  restored = laws.round_trip(Dense(dtype=dtype), x)
  with np.errstate(over="ignore"):
    expected = x.astype(_DTYPES[dtype]).astype(np.float32)
  if dtype != "float32":
    # XLA:CPU flushes subnormal floats to zero in casts; NumPy does not.
    expected = np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), expected)
  np.testing.assert_array_equal(restored, expected)


def test_same_key_same_bits_and_other_key_other_bits():
  codec = QSGD(bits=4)
  x = jnp.asarray(laws.gaussian(5000))
  rows = [
    np.asarray(laws.encoder(codec)(x, key).rows)
    for key in (laws.KEY, laws.KEY, laws.KEY + 1)
  ]
  np.testing.assert_array_equal(rows[0], rows[1])
  assert (rows[0] != rows[2]).mean() > 0.5


def test_typed_and_raw_keys_are_the_same():
  codec, x = QSGD(bits=4), jnp.asarray(laws.gaussian(100))
  typed = jax.random.key(7, impl="threefry2x32")
  np.testing.assert_array_equal(
    np.asarray(codec.encode(x, key=typed).rows),
    np.asarray(codec.encode(x, key=jax.random.key_data(typed)).rows),
  )
