"""Ternary sends what the paper's equations and the page say."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp._src.codecs.rounds import payload_of
from gradcomp._src.testing.noise import mean_is_the_leaf
from gradcomp.codecs import Context, Ternary
from tests.plugins.slow_cases import slow
from tests.specs import dithers, ternary
from tests.support import laws

CODECS = [
  Ternary(),
  Ternary(share_scale=False),
  Ternary(clip_sigmas=None, share_scale=False),
  Ternary(packing="base3", bucket_size=64),
  Ternary(packing="base3", bucket_size=64, scaler="sigma", share_scale=False),
  Ternary(bucket_size=96, clip_sigmas=1.0, share_scale=False),
]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=laws.name)

# A sum of squares of some 10^4 to 10^6 elements in binary32, in no documented order.
SIGMA = 1e-5


def encode(codec, x):
  """The words, and float32[tiles, P or 1] scales from wherever they are."""
  payload = laws.encoder(codec)(jnp.asarray(x), laws.KEY)
  rows, words = np.asarray(payload.rows), codec.bucket_size or 512
  if not codec.share_scale:
    return rows[:, :words], np.ascontiguousarray(rows[:, words:]).view(np.float32)
  scales = np.asarray(payload.agreed)
  return rows, np.broadcast_to(scales, (len(rows), scales.shape[1]))


def options(codec):
  return dict(packing=codec.packing, bucket_size=codec.bucket_size)


def scale_of(codec, x):
  """The one scale of a leaf."""
  return float(np.asarray(jax.jit(codec.agree)(jnp.asarray(x)))[0, 0])


def ragged(codec):
  x = laws.gaussian(codec.tile_size + 3 * (codec.bucket_size or 64) + 13)
  x[3], x[40] = 0.0, -0.0
  return x


def test_what_the_codec_says_of_itself():
  for share in (True, False):
    codec = Ternary(share_scale=share)
    assert (codec.agree(jnp.ones(3)) is not None) == share
    assert codec.unbiased and codec.needs_key and codec.max_code == 1


@pytest.mark.parametrize(
  "codec",
  [*CODECS, Ternary(bucket_size=64, share_scale=False, rounding="nearest")],
  ids=laws.name,
)
def test_payload_is_the_oracles(codec):
  """Codes bit for bit; scales to the last bits of a standard deviation."""
  x = ragged(codec)
  words, scales = encode(codec, x)
  expected = ternary.scales_of(
    x,
    scaler=codec.scaler,
    limit=ternary.clip_limit(x, codec.clip_sigmas),
    **options(codec),
  )
  tolerance = 0 if codec.clip_sigmas is None else SIGMA
  np.testing.assert_allclose(scales, expected, rtol=tolerance)
  np.testing.assert_array_equal(
    words,
    ternary.encode(
      x,
      key=np.asarray(laws.KEY),
      scales=scales,
      # The largest scale is the limit, or all are below it and nothing is clipped.
      limit=scales.max(),
      rounding=codec.rounding,
      inline=False,
      **options(codec),
    ),
  )


@every_codec
def test_values_are_those_of_the_papers_equations(codec):
  x = ragged(codec)
  words, scales = encode(codec, x)
  shape = dict(bits=1, bucket_size=codec.bucket_size)
  lanes = dithers.random_lanes(np.asarray(laws.KEY), len(words), **shape)
  lanes = lanes[:, : ternary.PER_WORD[codec.packing]]
  each = np.broadcast_to(scales[:, :, None], lanes.shape).ravel()[: x.size]
  lanes = dithers.signed_lanes(lanes.ravel()[: x.size], x)
  uniform = (lanes + 0.5) / 2**16
  clipped = ternary.clip(x, scales.max())
  ideal = ternary.ternarize(clipped, uniform, each.astype(np.float64))
  # The fixed-point grid moves a choice with 2^-16: of at most 11,000, 3 are 1 in 1000.
  assert (laws.round_trip(codec, x) != ideal.astype(np.float32)).sum() <= 3


@every_codec
def test_an_independent_decoder_reads_shared_scales_too(codec):
  x = ragged(codec)
  payload = laws.encoder(codec)(jnp.asarray(x), laws.KEY)
  rows, scales = np.asarray(payload.rows), payload.agreed
  decoded = ternary.decode(rows, x.size, scales=scales, **options(codec))
  np.testing.assert_array_equal(laws.round_trip(codec, x), decoded)
  codes = np.asarray(codec.codes(payload.rows)).ravel()[: x.size]
  z = ternary.integers(rows, x.size, scales=scales, **options(codec))
  np.testing.assert_array_equal(codes, z)


@pytest.mark.parametrize("scaler", ["clipped", "sigma"])
@pytest.mark.parametrize("packing", ["base3", *slow("2bit")])
def test_the_mean_is_the_clipped_gradient(packing, scaler):
  codec = Ternary(packing=packing, scaler=scaler, bucket_size=32)
  x = laws.gaussian(500)
  scale = np.max(jax.jit(codec.agree)(x))  # the limit, which some element is above
  assert (np.abs(x) > scale).any()  # or nothing would be clipped
  clipped = ternary.clip(x, scale).astype(np.float32)
  mean_is_the_leaf(codec, x, mean=clipped, step=scale)


@pytest.mark.parametrize("packing", ["2bit", "base3"])
def test_every_trit_comes_back(packing):
  """All -1, all 1, all 0 and 10^5 random words; no scale cuts or rounds them."""
  per_word = ternary.PER_WORD[packing]
  z = np.random.default_rng(0).integers(-1, 2, (199, per_word, 512))
  z[0], z[1], z[2] = -1, 1, 0
  codec = Ternary(packing=packing, clip_sigmas=None)
  words, _ = encode(codec, z.astype(np.float32))
  np.testing.assert_array_equal(words, ternary.pack(z, packing))
  np.testing.assert_array_equal(np.asarray(jax.jit(codec.codes)(words)), z)


def test_bits_an_element():
  """1.6 in base 3, 2 with two bits, and the scales that are not shared."""
  for codec, bits in [
    (Ternary(packing="base3"), 1.6),
    (Ternary(), 2),
    (Ternary(packing="base3", share_scale=False), 1.6 + 32 / (20 * 512)),
    (Ternary(bucket_size=512, share_scale=False), 2 + 32 / 512),
  ]:
    x = jax.ShapeDtypeStruct((4 * codec.tile_size,), jnp.float32)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    payload = jax.eval_shape(lambda x, key, c=codec: c.encode(x, key=key), x, key)
    assert 32 * payload.rows.size == bits * x.size


def test_clipping_a_gaussian_changes_what_the_paper_says():
  """At 2.5 sigma: the length by 1.0 to 1.5 %, the direction by 2 to 3 degrees."""
  x = laws.gaussian(10**6)
  scale = scale_of(Ternary(), x)
  np.testing.assert_allclose(scale, 2.5 * x.std(dtype=np.float64), rtol=SIGMA)
  clipped = ternary.clip(x, scale)
  length, expected = np.linalg.norm(x.astype(np.float64)), np.linalg.norm(clipped)
  assert 0.010 <= 1 - expected / length <= 0.015
  angle = np.degrees(np.arccos(x @ clipped / (length * expected)))
  assert 2 <= angle <= 3


@pytest.mark.parametrize("exponent", [-60, 60, 100])
def test_the_scale_follows_the_gradient(exponent):
  """Squares neither vanish nor overflow."""
  x, factor = laws.gaussian(3000), np.float32(2.0**exponent)
  np.testing.assert_allclose(
    scale_of(Ternary(), x * factor), scale_of(Ternary(), x) * factor, rtol=SIGMA
  )


def test_sigma_is_about_the_mean():
  x = 100 + laws.gaussian(10**5)
  np.testing.assert_allclose(
    scale_of(Ternary(), x), 2.5 * x.std(dtype=np.float64), rtol=SIGMA
  )


def test_scales_of_each_scaler():
  x = np.random.default_rng(0).uniform(-1, 1, 4000).astype(np.float32)
  x[7] = -1
  sigma = x.std(dtype=np.float64)
  assert scale_of(Ternary(clip_sigmas=None), x) == 1
  assert scale_of(Ternary(), x) == 1  # the limit, 1.44, is above all
  for codec, expected in [
    (Ternary(scaler="sigma"), 2.5 * sigma),
    (Ternary(clip_sigmas=1.0), sigma),
    (Ternary(clip_sigmas=1.0, scaler="sigma"), sigma),
  ]:
    np.testing.assert_allclose(scale_of(codec, x), expected, rtol=SIGMA)


@pytest.mark.parametrize("bucket_size", [None, 64])
def test_a_larger_shared_scale_leaves_the_own_limit(bucket_size):
  codec = Ternary(bucket_size=bucket_size, clip_sigmas=1.0)
  x = ragged(codec)
  own = jax.jit(codec.agree)(x)
  shared = np.asarray(4 * own)
  run = jax.jit(
    lambda x, agreed: payload_of(codec, x, Context(laws.KEY, agreed=agreed))
  )
  payload = run(x, shared)
  np.testing.assert_array_equal(payload.agreed, shared)
  rows = np.asarray(payload.rows)
  expected, unlimited = (
    ternary.encode(
      x,
      key=np.asarray(laws.KEY),
      scales=np.broadcast_to(shared, (len(rows), shared.shape[1])),
      limit=limit,
      inline=False,
      **options(codec),
    )
    for limit in (np.max(own), np.inf)
  )
  assert (expected != unlimited).any()
  np.testing.assert_array_equal(rows, expected)


def test_codes_of_workers_add_up():
  codec = Ternary(packing="base3")
  x = laws.gaussian(2000)
  agreed = jax.jit(codec.agree)(x)
  run = jax.jit(lambda x, key: payload_of(codec, x, Context(key, agreed=agreed)))
  payloads = [run(x, laws.KEY + np.uint32(worker)) for worker in range(3)]
  add = jax.jit(lambda rows: codec.from_codes(sum(map(codec.codes, rows)), agreed))
  added = np.asarray(add([payload.rows for payload in payloads])).ravel()[: x.size]
  single = [np.asarray(laws.decoder(codec, x.shape)(payload)) for payload in payloads]
  # Three times a scale is rounded once here, and after each addition there.
  np.testing.assert_allclose(added, sum(single), rtol=2.0**-22)


@pytest.mark.parametrize("scaler", ["clipped", "sigma"])
def test_later_stages_have_no_limit(scaler):
  codec = Ternary(share_scale=False, scaler=scaler)
  tiles = laws.gaussian((2, codec.tile_size))
  rows = np.asarray(laws.encoded_rows(codec, tiles))
  scales = ternary.scales_of(tiles, scale_per_row=True, **options(codec))
  np.testing.assert_array_equal(
    rows,
    ternary.encode(tiles, key=np.asarray(laws.KEY), scales=scales, **options(codec)),
  )


@pytest.mark.parametrize("scaler", ["clipped", "sigma"])
def test_constants_are_not_clipped(scaler):
  codec = Ternary(scaler=scaler)
  for value in np.float32([0.1, -1 / 3, 3.4e38, 2.0**-96, 7e-20]):
    x = np.full(1000, value)
    np.testing.assert_array_equal(laws.round_trip(codec, x), x)


@every_codec
def test_leaves_of_none_and_of_one(codec):
  chex.assert_shape(laws.round_trip(codec, np.zeros(0, np.float32)), (0,))
  np.testing.assert_array_equal(laws.round_trip(codec, np.float32([-5])), [-5])
  np.testing.assert_array_equal(laws.round_trip(codec, np.float32([0])), [0])


@pytest.mark.parametrize("codec", [Ternary(), CODECS[3]], ids=laws.name)
def test_a_nan_is_seen_wherever_it_is(codec):
  """In all of a leaf, or in all of its own bucket; others are not clipped then."""
  x = ragged(codec)
  unclipped = dataclasses.replace(codec, clip_sigmas=None)
  clean = laws.round_trip(unclipped, x)
  for position in (0, 1, 63, 64, 511, 512, x.size // 2, x.size - 1):
    for bad in (np.nan, np.inf):
      dirty = x.copy()
      dirty[position] = bad
      restored = laws.round_trip(codec, dirty)
      count = codec.bucket_size or x.size
      bucket = np.arange(x.size) // count == position // count
      assert np.isnan(restored[bucket]).all()
      np.testing.assert_array_equal(restored[~bucket], clean[~bucket])
