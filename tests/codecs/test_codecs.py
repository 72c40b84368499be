"""Every codec obeys every law, and sends what the page says, to the bit.

Each test is a table over settings. What only one codec has is in its own file.
"""

import collections
import dataclasses
import types
import typing

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp.codecs
from gradcomp.codecs import (
  QSGD,
  Dense,
  EightBit,
  FloatCast,
  OneBit,
  RandomK,
  Sign,
  Ternary,
  TopK,
)
from gradcomp.testing import laws as kit
from tests.plugins.slow_cases import one_in, slow
from tests.support import factories, laws
from tests.support.laws import name

every_case = pytest.mark.parametrize(
  "case",
  [
    pytest.param(case, id=name(case.codec), marks=[pytest.mark.slow][: case.slow])
    for case in laws.CASES
  ],
)


def leaf(case):
  """Gaussian numbers, zeros of both signs, a bucket of them, and small numbers."""
  x = laws.gaussian(case.leaf)
  x.flat[3], x.flat[40], x.flat[64:96] = 0.0, -0.0, 0.0
  x.flat[41:45] = -1e-6, 1e-6, -1e-9, -1e-4
  return x


@every_case
def test_every_law(case):
  """By two programs: of a leaf, and of a batch."""
  laws.obeys(case, leaf(case))
  laws.the_page_has_the_payload(case, leaf(case))
  kit.shapes_and_dtypes_return(case.codec)


@pytest.mark.parametrize("codec", one_in(32, laws.CODECS), ids=name)
def test_laws_that_compile_more(codec):
  codec = laws.here(codec)
  kit.is_pure(codec)
  kit.padding_never_leaks(codec)
  kit.odd_sizes_work(codec, sizes=(1, 33))
  kit.workers_choose_alike(codec)
  kit.bytes_are_the_claim(codec)


@pytest.mark.parametrize("codec", one_in(16, laws.CODECS), ids=name)
def test_half_precision_is_computed_in_float32(codec):
  kit.half_precision_is_computed_in_float32(codec)


@pytest.mark.slow
@every_case
def test_what_is_not_compiled_has_the_same_bits(case):
  kit.same_bits_without_jit(laws.here(case.codec), leaf(case))


def test_every_codec_that_can_be_built_is_held_to_the_laws():
  """Each public codec, and each value of each of its fields that names a choice."""
  held = collections.defaultdict(set)
  for codec in laws.CODECS:
    held[type(codec), ""] = set()
    for field in dataclasses.fields(codec):
      held[type(codec), field.name].add(getattr(codec, field.name))
  public = {x for x in factories.codecs() if issubclass(x, gradcomp.codecs.Codec)}
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


def facts(codec):
  """Whether it is unbiased, needs a key, and has workers agree."""
  return codec.unbiased, codec.needs_key, codec.agree(jnp.ones(3)) is not None


FACTS = {
  QSGD(): (True, True, False),
  QSGD(rounding="nearest", share_scale=True): (False, False, True),
  QSGD(bits=2, norm="rms", levels="uniform"): (False, True, False),
  QSGD(levels="nonuniform"): (True, True, False),
  OneBit(): (False, False, False),
  Ternary(): (True, True, True),
  Ternary(share_scale=False): (True, True, False),
  EightBit(): (False, False, False),
  EightBit(rounding="stochastic"): (True, True, False),
  Dense(): (True, False, False),
  Dense(dtype=jnp.bfloat16): (False, False, False),
  Dense(dtype=jnp.bfloat16, rounding="stochastic"): (True, True, False),
  # Not with stochastic casts either: sums are rounded to nearest.
  FloatCast(rounding="stochastic"): (False, True, True),
  FloatCast(scale=1.0): (False, False, False),
  TopK(): (False, False, False),
  RandomK(): (False, True, False),
}


def test_what_codecs_say_of_themselves():
  assert {codec: facts(codec) for codec in FACTS} == FACTS


@pytest.mark.parametrize("codec", one_in(37, laws.CODECS), ids=name)
def test_double_precision_changes_nothing(codec):
  """With jax_enable_x64, where what has no dtype of its own becomes float64."""
  x = laws.gaussian((31, 67))
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
    QSGD(bits=4, bucket_size=64),
    QSGD(bits=4, bucket_size=512, norm="l2"),
    Ternary(bucket_size=64),
    OneBit(),
    Sign(),
  ],
  ids=name,
)
def test_what_is_not_finite_spoils_its_bucket_wherever_it_is(codec):
  """One in each bucket but the last, at every position: a maximum may drop it."""
  buckets = np.ones((codec.bucket_size + 1, codec.bucket_size), np.float32)
  buckets[:, ::2] = -1
  for bad in (np.nan, np.inf, -np.inf):
    np.fill_diagonal(buckets, bad)
    restored = laws.round_trip(codec, buckets)
    assert np.isnan(restored[:-1]).all()
    assert np.isfinite(restored[-1]).all()


CONSTANT = [
  QSGD(bits=1, bucket_size=64, levels="uniform", rounding="nearest"),
  QSGD(bits=4, bucket_size=64),
  *slow(QSGD(bits=4, bucket_size=64, levels="uniform"), QSGD(bits=8, bucket_size=64)),
  *slow(QSGD(bits=16, bucket_size=64), QSGD(bits=16, bucket_size=64, levels="uniform")),
  Ternary(bucket_size=64, clip_sigmas=None),
  EightBit(dtype="linear", bucket_size=64),
  OneBit(),
  OneBit(per_column=True),
  Sign(),
]


@pytest.mark.parametrize("codec", CONSTANT, ids=name)
def test_constant_buckets_are_exact(codec):
  """Whatever is drawn, though sums and products are rounded; a short last one too."""
  values = np.float32([1, -0.5, 2.0**127, 2.0**-96, -1 / 3, 3e38, -7e-20, np.pi])
  x = np.repeat(values, 64)[:-5]
  if getattr(codec, "per_column", False):
    x = np.stack([values] * 59)
  np.testing.assert_array_equal(laws.round_trip(codec, x), x)


# Around buckets of 32. Each size compiles anew, so few of those up to 200.
SIZES, MORE_SIZES = (65, 200), (0, 1, 32)

SPECIAL = np.float32(
  [0, -0.0, 1e-45, -1e-40, 2.0**-126, 2.0**-96, 1, -1, 3e38, -np.finfo(np.float32).max]
)

# How many elements share a scale, None for all; and how often the largest of them the
# largest value may be, None where levels do not depend on the leaf: one above may be
# the nearest.
ANY = {
  OneBit(bucket_size=32): (32, 1),
  OneBit(per_column=True): (None, 1),
  Ternary(bucket_size=32, share_scale=False): (32, 1),
  # Sigma is at most the largest element.
  Ternary(packing="base3", scaler="sigma", clip_sigmas=2.5): (None, 2.5),
  EightBit(dtype="dynamic_map", bucket_size=32, rounding="stochastic"): (32, 1),
  EightBit(dtype="mantissa", exponent_offset=0): (None, None),
  EightBit(): (None, 1),
  QSGD(bits=3, bucket_size=32, levels="nonuniform"): (32, 1),
  # A root mean square is at most the largest element.
  QSGD(bits=2, bucket_size=32, norm="rms", levels="uniform"): (32, 1.494),
  QSGD(bits=4, bucket_size=32): (32, 1),
}


@st.composite
def leaves(draw, sizes):
  """Constants, special values, one huge range, or any floats; finite or not."""
  size = draw(st.sampled_from(sizes))
  kinds = [
    st.just(draw(st.sampled_from(SPECIAL))),
    st.sampled_from(SPECIAL),
    st.floats(-1, 1, width=32),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(width=32),
  ]
  elements = draw(st.sampled_from(kinds))
  # Without a fill every element is drawn, so that few leaves are almost constant.
  return draw(hnp.arrays(np.float32, size, elements=elements, fill=st.nothing()))


@pytest.mark.parametrize("sizes", [SIZES, *slow((MORE_SIZES,))], ids=["few", "more"])
@pytest.mark.parametrize("codec", one_in(3, ANY), ids=name)
@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(data=st.data())
def test_any_values(codec, sizes, data):
  """Finite buckets stay finite, within the largest element; others are NaN."""
  x = data.draw(leaves(sizes))
  restored = laws.round_trip(codec, x)
  assert restored.shape == x.shape and restored.dtype == x.dtype
  count, most = ANY[codec]
  count = count or max(x.size, 1)
  for start in range(0, x.size, count):
    bucket, got = x[start : start + count], restored[start : start + count]
    if not np.isfinite(bucket).all():
      assert np.isnan(got).all()
      continue
    assert np.isfinite(got).all()
    largest = np.abs(bucket.astype(np.float64)).max()
    if largest == 0:
      assert (got == 0).all()
    if most is not None:
      # The smallest scale; and the order of additions in a sum of 200 at most.
      limit = max(most * largest * (1 + 200 * 2.0**-24), 2.0**-96)
      assert (np.abs(got.astype(np.float64)) <= limit).all()
    if type(codec) is QSGD and codec.norm == "max" and codec.levels != "nonuniform":
      step = max(largest, 2.0**-96) / 7 * (1 + 1e-4)
      assert (np.abs(got.astype(np.float64) - bucket) <= step).all()
