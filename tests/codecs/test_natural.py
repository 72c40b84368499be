"""Natural compression is the paper's: powers of two, unbiased, variance below 1/8."""

import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp._src.testing.noise import mean_is_the_leaf
from gradcomp.codecs import Natural
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


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_payload_is_the_oracles(rounding):
  """Rows and values bit for bit, of all floats, and in the middle of two powers."""
  codec = Natural(rounding=rounding)
  key = laws.KEY if codec.needs_key else None
  x = any_float32(8 * codec.tile_size + 77)
  x[:400] = np.float32(1.5) * np.ldexp(np.float32(1), np.arange(400) % 130 - 64)
  x[:400:3] *= -1
  payload = laws.encoder(codec)(x, laws.KEY)
  np.testing.assert_array_equal(payload.rows, natural.encode(x, key=key))
  r = None if key is None else dithers.of_leaf(key, x, bits=8)
  values = laws.decoder(codec, x.shape)(payload)
  assert_same_floats(values, natural.values(x, r))


def test_unbiased():
  """Over the range, and below it: by the z-test, sharp for each element's own step."""
  x = wide_leaf(500, spread=60)
  x[::10] = np.float32(2.0**-63) * laws.gaussian(50)
  lower, upper, _ = natural.neighbors(x)
  mean_is_the_leaf(CODEC, x, draws=1000, step=upper - lower)


def test_variance_is_within_the_papers_bound():
  """It is (|x| - a)(2a - |x|), at most x^2 / 8: as much at 4/3 of a power of two."""
  x = np.float32([*np.linspace(1, 2, 8, endpoint=False), 4 / 3])
  many = jnp.broadcast_to(x[:, None], (9, 10_000))
  squares = (np.float64(laws.round_trip(CODEC, many)) - x[:, None]) ** 2
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
