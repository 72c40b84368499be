"""Natural compression is the paper's: powers of two, unbiased, variance below 1/8."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp._src.kernels.common.dithers import dither
from gradcomp._src.testing.noise import mean_is_the_leaf
from gradcomp.codecs import Context, Natural
from tests.specs import dithers, natural
from tests.support import laws
from tests.support.assertions import assert_same_floats
from tests.support.cases.float import wide_leaf

CODEC = Natural()
# The ends of the range, what is beside them, and numbers of no range at all.
EDGES = [2.0**-62, 2.0**-63, 2.0**-78, 2.0**-80, 2.0**63, 1.5 * 2.0**63, 2.0**64, 3e38]
STRANGE = [0.0, -0.0, 1e-45, 1e-39, 2.0**-126, np.inf, -np.inf, np.nan]


def any_float32(size):
  """Every exponent, sign and mantissa alike, and special values at the end."""
  rng = np.random.default_rng(0)
  x = rng.integers(0, 2**32, size, dtype=np.uint32).view(np.float32)
  special = np.float32([*EDGES, *np.negative(EDGES), *STRANGE])
  x[-special.size :] = special
  return x


@pytest.mark.parametrize("leaf", [wide_leaf, any_float32])
def test_payload_is_the_oracles(leaf):
  """Rows and values, bit for bit, by the same random numbers."""
  x = leaf(8 * CODEC.tile_size + 77)
  payload = laws.encoder(CODEC)(jnp.asarray(x), laws.KEY)
  rows = natural.encode(x, key=np.asarray(laws.KEY))
  chex.assert_shape(payload.rows, (9, CODEC.row_words))
  np.testing.assert_array_equal(payload.rows, rows)
  lanes = dithers.random_lanes(np.asarray(laws.KEY), 9, bits=8, bucket_size=128)
  lanes = dithers.signed_lanes(lanes.ravel()[: x.size], x)
  expected = natural.values(x, lanes)
  assert_same_floats(laws.decoder(CODEC, x.shape)(payload), expected)


def test_nearest_payload_is_the_oracles():
  """With numbers in the middle between two powers, and below the smallest."""
  x = wide_leaf(CODEC.tile_size)
  x[:400] = np.float32(1.5) * np.ldexp(np.float32(1), np.arange(400) % 130 - 64)
  x[:400:3] *= -1
  nearest = Natural(rounding="nearest")
  payload = laws.encoder(nearest)(jnp.asarray(x), None)
  np.testing.assert_array_equal(payload.rows, natural.encode(x))


def test_the_pages_example():
  """Two workers of a pair make -1 and -2 of -1.5."""
  x = jnp.array([1, -1.5, 0, 3e30], jnp.float32)
  key = jnp.zeros(2, jnp.uint32)
  rows = [
    laws.encoded(laws.here(CODEC), x, Context(dither=dither(key, i))).rows
    for i in range(2)
  ]
  assert rows[0][0, :4].tolist() == [0x3F, 0xBF, 0x00, 0x7F]
  assert rows[1][0, :4].tolist() == [0x3F, 0xC0, 0x00, 0x7F]


def test_unbiased():
  """Over the range, and below it: by the z-test, sharp for each element's own step."""
  x = wide_leaf(500, spread=60)
  x[::10] = np.float32(2.0**-63) * laws.gaussian(50)
  lower, upper, _ = natural.neighbors(x)
  mean_is_the_leaf(CODEC, x, draws=1000, step=upper - lower)


def test_variance_is_within_the_papers_bound():
  """It is (|x| - a)(2a - |x|), at most x^2 / 8: as much at 4/3 of a power of two."""
  x = np.float32(np.linspace(1, 2, 8, endpoint=False))
  x = np.concatenate([x, [np.float32(4 / 3)]])
  many = jnp.broadcast_to(x[:, None], (9, 10_000))
  error = np.float64(laws.round_trip(CODEC, many)) - x[:, None]
  squares = error**2
  mean, standard = squares.mean(axis=1), squares.std(axis=1) / 100
  expected = (np.float64(x) - 1) * (2 - np.float64(x))
  # Five standard errors of 10^4 draws; chances are short by less than 2^-16.
  assert (np.abs(mean - expected) <= 5 * standard + 2.0**-16).all()
  assert (expected <= np.float64(x) ** 2 / 8 + 2.0**-52).all()  # a rounding in binary64
  assert (mean - 5 * standard <= np.float64(x) ** 2 / 8).all()


def test_powers_of_two_are_exact():
  """All of the range, of both signs, whatever is drawn."""
  powers = np.float32(2.0) ** np.arange(-62, 64, dtype=np.float32)
  x = np.repeat(np.concatenate([powers, -powers, np.float32([0.0, -0.0])]), 100)
  assert_same_floats(laws.round_trip(CODEC, x), x)


def test_what_is_too_large_is_seen():
  """From 2^64 on always, and between it and 2^63 where it is rounded up."""
  x = np.float32([1.5 * 2.0**63] * 1000 + [2.0**64] * 100 + [-3e38] * 100)
  restored = laws.round_trip(CODEC, x)
  assert np.isnan(restored[1000:]).all()
  between = restored[:1000]
  assert (np.isnan(between) | (between == np.float32(2.0**63))).all()
  # Half of 1000, give or take 5 standard deviations of sqrt(1000) / 2.
  assert abs(np.isnan(between).sum() - 500) <= 80


def test_the_short_form_keeps_no_residual():
  tx = gradcomp.natural(key=3)
  gradient = {"w": jnp.asarray(wide_leaf(700))}
  state = tx.init(gradient)
  assert not jax.tree.leaves(state.residual)
  other = gradcomp.compress(CODEC, key=3, feedback=None)
  expected = other.update(gradient, other.init(gradient))[0]
  chex.assert_trees_all_equal(tx.update(gradient, state)[0], expected)
