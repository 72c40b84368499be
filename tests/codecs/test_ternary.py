"""Ternary sends what the paper's equations say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp._src.codecs.protocol import payload_of
from gradcomp._src.testing.noise import mean_is_the_leaf
from gradcomp.codecs import Context, Ternary
from tests.plugins.slow_cases import slow
from tests.specs import dithers, ternary
from tests.support import laws

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


@pytest.mark.parametrize(
  "codec",
  [
    Ternary(),
    Ternary(bucket_size=96, clip_sigmas=1.0, share_scale=False),
    Ternary(packing="base3", bucket_size=64, scaler="sigma", share_scale=False),
    *slow(
      Ternary(share_scale=False),
      Ternary(clip_sigmas=None, share_scale=False),
      Ternary(packing="base3", bucket_size=64),
    ),
  ],
  ids=laws.name,
)
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


def test_sigma_is_about_the_mean_and_follows_the_gradient():
  """Squares neither vanish nor overflow."""
  x = 100 + laws.gaussian(10**5)
  sigma = x.std(dtype=np.float64)
  for factor in 2.0 ** np.array([-60, 0, 60, 100]):
    found = scale_of(Ternary(), x * np.float32(factor))
    np.testing.assert_allclose(found, 2.5 * sigma * factor, rtol=SIGMA)


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


@pytest.mark.parametrize("bucket_size", [64, *slow(None)])
def test_a_larger_shared_scale_leaves_the_own_limit(bucket_size):
  codec = Ternary(bucket_size=bucket_size, clip_sigmas=1.0)
  x = ragged(codec)
  own = jax.jit(codec.agree)(x)
  shared = np.asarray(4 * own)
  encode = lambda x, agreed: payload_of(codec, x, Context(laws.KEY, agreed=agreed))
  payload = jax.jit(encode)(x, shared)
  np.testing.assert_array_equal(payload.agreed, shared)
  rows = np.asarray(payload.rows)
  scales = np.broadcast_to(shared, (len(rows), shared.shape[1]))
  rule = dict(key=laws.KEY, scales=scales, inline=False, **options(codec))
  limits = np.max(own), np.inf
  expected, unlimited = (ternary.encode(x, limit=limit, **rule) for limit in limits)
  assert (expected != unlimited).any()
  np.testing.assert_array_equal(rows, expected)


def test_later_stages_have_no_limit():
  codec = Ternary(share_scale=False)
  tiles = laws.gaussian((2, codec.tile_size))
  scales = ternary.scales_of(tiles, scale_per_row=True, **options(codec))
  expected = ternary.encode(tiles, key=laws.KEY, scales=scales, **options(codec))
  np.testing.assert_array_equal(laws.encoded_rows(codec, tiles), expected)


@pytest.mark.parametrize("scaler", ["clipped", "sigma"])
def test_constants_are_not_clipped(scaler):
  codec = Ternary(scaler=scaler)
  for value in np.float32([0.1, -1 / 3, 3.4e38, 2.0**-96, 7e-20]):
    x = np.full(1000, value)
    np.testing.assert_array_equal(laws.round_trip(codec, x), x)
