"""Every codec obeys every law, and QSGD is the paper's."""

import collections
import dataclasses
import types
import typing

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import gradcomp.codecs
from gradcomp._src.kernels.common.scales import norms
from gradcomp._src.testing.noise import mean_is_the_leaf, workers_choose_alike
from gradcomp._src.testing.payloads import (
  bytes_are_the_claim,
  half_precision_is_computed_in_float32,
  shapes_and_dtypes_return,
)
from gradcomp._src.testing.pure import is_pure, same_bits_without_jit
from gradcomp._src.testing.values import odd_sizes_work, padding_never_leaks
from gradcomp.codecs import (
  QSGD,
  Dense,
  EightBit,
  FloatCast,
  OneBit,
  RandomK,
  Ternary,
  TopK,
)
from tests.plugins.slow_cases import one_in, slow
from tests.specs import qsgd
from tests.support import laws
from tests.support.cases.codec import QSGD_CASES, SCHEMES
from tests.support.laws import name


def every(cases):
  """Parametrizes a test by cases, of which plain runs leave some out."""
  marks = {True: pytest.mark.slow, False: ()}
  return pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name(case.codec), marks=marks[case.slow]) for case in cases],
  )


every_case, every_qsgd = every(laws.CASES), every(QSGD_CASES)

# Other widths between them are the same code.
every_scheme = [
  pytest.param(*scheme, marks=() if scheme[0] in (1, 4) else pytest.mark.slow)
  for scheme in SCHEMES
]

_DTYPES = {
  "float32": np.float32,
  "float16": np.float16,
  "bfloat16": ml_dtypes.bfloat16,
}


def ragged(codec):
  """Two whole tiles and a part of a third, of a size that divides nothing."""
  return laws.gaussian(2 * codec.tile_size + 77)


@every_case
def test_every_law(case):
  x = laws.gaussian(case.leaf)
  laws.obeys(case, x)
  laws.the_page_reads_the_payload(case, x)
  laws.nothing_behind_a_leaf_counts(case, x)
  shapes_and_dtypes_return(case.codec)


@pytest.mark.parametrize("case", one_in(32, laws.CASES), ids=lambda x: name(x.codec))
def test_laws_that_compile_more(case):
  codec = laws.here(case.codec)
  is_pure(codec)
  padding_never_leaks(codec)
  odd_sizes_work(codec, sizes=(1, 33))
  workers_choose_alike(codec)
  bytes_are_the_claim(codec)


@pytest.mark.slow
@every_case
def test_what_is_not_compiled_has_the_same_bits(case):
  x = laws.gaussian(case.leaf)
  same_bits_without_jit(laws.here(case.codec), x)


def test_every_codec_that_can_be_built_is_held_to_the_laws():
  """Each public codec, and each value of each of its fields that names a choice.

  Codecs without rows of their own send those of others, and have tests of their own.
  """
  held = collections.defaultdict(set)
  for codec in laws.CODECS:
    held[type(codec), ""] = set()
    for field in dataclasses.fields(codec):
      held[type(codec), field.name].add(getattr(codec, field.name))
  public = {
    kind
    for kind in vars(gradcomp.codecs).values()
    if dataclasses.is_dataclass(kind)
    if getattr(kind, "rounds", None) is gradcomp.codecs.Codec.rounds
  }
  assert {kind for kind, _ in held} == public
  for kind in public:
    for field, hint in typing.get_type_hints(kind).items():
      if field in ("implementation", "accumulate") or (kind, field) not in held:
        continue  # kernels have tests of their own, and so have sums
      assert _choices(hint) <= held[kind, field], (kind, field)


def _choices(hint):
  """The values that a type hint lists: those of literals, bool and None."""
  if typing.get_origin(hint) is typing.Literal:
    return set(typing.get_args(hint))
  if hint is bool:
    return {True, False}
  if hint is types.NoneType:
    return {None}
  return set().union(*map(_choices, typing.get_args(hint)))


@pytest.mark.parametrize(
  "codec",
  [
    QSGD(bits=3, bucket_size=64, levels="nonuniform"),
    OneBit(per_column=True),
    *slow(
      QSGD(bits=4, bucket_size=None, norm="l2"),
      Ternary(bucket_size=64),
      QSGD(bits=4, bucket_size=64),
      OneBit(),
      Ternary(packing="base3"),
      EightBit(bucket_size=64),
      Dense(dtype=jnp.bfloat16),
    ),
  ],
  ids=name,
)
def test_double_precision_changes_nothing(codec):
  """With jax_enable_x64, where what has no dtype of its own becomes float64."""
  x = ragged(codec)
  key = laws.KEY if codec.needs_key else None
  encode = lambda x: codec.encode(x, key=key)
  rows = np.asarray(jax.jit(encode)(jnp.asarray(x)).rows)

  @jax.jit
  def both_ways(x, nothing):
    payload = encode(x)
    return payload, encode(nothing), codec.decode(payload, like=x)

  with jax.enable_x64(True):
    wide, empty, restored = both_ways(x, np.zeros(0, np.float32))
  assert wide.rows.dtype == empty.rows.dtype == jnp.uint32
  assert restored.dtype == jnp.float32
  np.testing.assert_array_equal(wide.rows, rows)


@pytest.mark.parametrize(
  "codec",
  [
    QSGD(bits=4),
    *slow(
      QSGD(bits=3, bucket_size=None, levels="uniform"),
      QSGD(bits=3, levels="nonuniform"),
      Ternary(packing="base3", share_scale=False),
    ),
    Dense(),
    *slow(OneBit(), EightBit()),
    OneBit(per_column=True),
    *slow(Ternary(), FloatCast()),
    TopK(density=0.1),
    *slow(RandomK(density=0.1)),
  ],
  ids=name,
)
def test_half_precision_is_computed_in_float32(codec):
  half_precision_is_computed_in_float32(codec)


@every_qsgd
def test_payload_is_the_oracles(case):
  """Bit for bit, codes and scales; l2 scales to 2 ulp, for the order of additions."""
  codec = case.codec
  x = ragged(codec)
  x[3], x[40] = 0.0, -0.0
  x[64:96] = 0.0
  hyper = dict(bits=codec.bits, bucket_size=codec.bucket_size)
  rows = np.asarray(laws.encoder(codec)(jnp.asarray(x), laws.KEY).rows)
  scales = rows[:, codec.bucket_size or 512 :].view(np.float32)
  expected = qsgd.scales_of(x, norm=codec.norm, **hyper)
  if codec.norm == "max":
    np.testing.assert_array_equal(scales, expected.reshape(scales.shape))
  else:
    # 64 additions and a square root in float32, each within half an ulp, of which
    # random signs leave few: 1e-6 is 8 ulp.
    np.testing.assert_allclose(scales, expected.reshape(scales.shape), rtol=1e-6)
  np.testing.assert_array_equal(
    rows,
    qsgd.encode(
      x,
      key=np.asarray(laws.KEY) if codec.needs_key else None,
      norm=codec.norm,
      levels=codec.levels,
      rounding=codec.rounding,
      scales=scales,
      **hyper,
    ),
  )


@every_qsgd
def test_errors_stay_below_a_step(case):
  """Stochastic: less than a step of the bucket's scale; nearest: half of it."""
  codec = case.codec
  x = ragged(codec)
  rows = np.asarray(laws.encoder(codec)(jnp.asarray(x), laws.KEY).rows)
  step = rows[:, codec.bucket_size or 512 :].view(np.float32)
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
  [pytest.param(*p.values, "max", marks=p.marks) for p in every_scheme]
  + [(4, "sign_magnitude", "l2"), (2, "uniform", "l2")],
)
def test_stochastic_rounding_is_unbiased(bits, levels, norm):
  codec = QSGD(bits=bits, bucket_size=64, levels=levels, norm=norm)
  mean_is_the_leaf(codec, laws.gaussian(500))


@pytest.mark.parametrize("bits", [2, 4, *slow(3, 5, 8)])
def test_variance_is_within_the_papers_bound(bits):
  """E||Q(x)-x||^2 <= min(n/s^2, sqrt(n)/s) ||x||^2 with the l2 norm, per bucket."""
  n = 256
  codec = QSGD(bits=bits, bucket_size=n, norm="l2")
  s = 2 ** (bits - 1) - 1
  one = lambda key, x: codec.decode(codec.encode(x, key=key), like=x)
  draw = jax.jit(jax.vmap(one, in_axes=(0, None)))
  for x in (laws.gaussian(n), np.eye(1, n, 3, dtype=np.float32)[0] + 1e-3):
    batch = np.stack([laws.KEY] * 400)
    batch[:, 1] = np.arange(400)
    error = np.asarray(draw(batch, x), np.float64) - x
    squares = (error**2).sum(axis=1)
    bound = min(n / s**2, np.sqrt(n) / s) * np.sum(np.float64(x) ** 2)
    # The sample mean of 400 draws, less 5 of its standard errors.
    assert squares.mean() - 5 * squares.std() / 20 <= bound
    expected = qsgd.expected_variance(
      x, bits=bits, bucket_size=n, norm="l2", levels="sign_magnitude"
    )
    assert abs(squares.mean() - expected) <= 5 * squares.std() / 20 + 1e-4 * expected


@pytest.mark.parametrize("bits, levels", every_scheme)
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
@pytest.mark.parametrize("bits, levels", every_scheme)
def test_constant_buckets_are_exact(bits, levels, rounding):
  codec = QSGD(bits=bits, bucket_size=64, levels=levels, rounding=rounding)
  values = np.float32([1.0, -1 / 3, 3e38, 2.0**-96, -7e-20, 0.1, np.pi])
  x = np.repeat(values, 64)
  np.testing.assert_array_equal(laws.round_trip(codec, x), x)


@pytest.mark.parametrize(
  "codec",
  [QSGD(bits=4, bucket_size=64), QSGD(bits=8, bucket_size=64, levels="uniform")],
  ids=name,
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
  found = jax.jit(norms, static_argnums=1)(x, "l2")
  np.testing.assert_allclose(found, expected, rtol=1e-6)


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(
  hnp.arrays(
    np.float32,
    (9, 7, 3),  # one shape, for each compiles anew: five buckets and a part of one
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
