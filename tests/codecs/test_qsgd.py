"""QSGD is the paper's: errors, variance and bias, and levels that clip."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp._src.kernels.common.scales import norms
from gradcomp._src.testing.noise import mean_is_the_leaf
from gradcomp.codecs import QSGD
from tests.plugins.slow_cases import one_in, slow
from tests.specs import qsgd
from tests.support import laws, modes
from tests.table.settings import QSGD_CASES, SCHEMES

# Other widths between them are the same code.
every_scheme = [
  pytest.param(*scheme, marks=() if scheme[0] in (1, 4) else pytest.mark.slow)
  for scheme in SCHEMES
]


def clipped(bits, **hyper):
  return QSGD(bits=bits, norm="rms", levels="uniform", rounding="nearest", **hyper)


def error(codec, x):
  """The squared error of what is sent, relative to the square of x."""
  x = np.float64(x)
  return np.square(x - laws.round_trip(codec, np.float32(x))).sum() / np.square(x).sum()


@pytest.mark.parametrize(
  "codec", one_in(3, [x.codec for x in QSGD_CASES]), ids=laws.name
)
def test_errors_stay_below_a_step(codec):
  """Stochastic: less than a step of the bucket's scale; nearest: half of it."""
  x = laws.gaussian(2 * codec.tile_size + 77)  # a size that divides nothing
  rows = np.asarray(laws.encoder(codec)(jnp.asarray(x), laws.KEY).rows)
  step = rows[:, codec.bucket_size or 512 :].view(np.float32)
  top = qsgd.top_of(codec.bits, codec.levels)
  step = step / top if codec.levels == "sign_magnitude" else 2 * step / top
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
  rule = dict(bits=bits, bucket_size=n, norm="l2")
  codec, s = QSGD(**rule), 2 ** (bits - 1) - 1
  one = lambda key, x: codec.decode(codec.encode(x, key=key), like=x)
  draw = jax.jit(jax.vmap(one, in_axes=(0, None)))
  for x in (laws.gaussian(n), np.eye(1, n, 3, dtype=np.float32)[0] + 1e-3):
    batch = np.stack([laws.KEY] * 400)
    batch[:, 1] = np.arange(400)
    wrong = np.asarray(draw(batch, x), np.float64) - x
    squares = (wrong**2).sum(axis=1)
    bound = min(n / s**2, np.sqrt(n) / s) * np.sum(np.float64(x) ** 2)
    # The sample mean of 400 draws, less 5 of its standard errors.
    assert squares.mean() - 5 * squares.std() / 20 <= bound
    expected = qsgd.expected_variance(x, levels="sign_magnitude", **rule)
    assert abs(squares.mean() - expected) <= 5 * squares.std() / 20 + 1e-4 * expected


@pytest.mark.parametrize(
  "codec",
  [QSGD(bits=4, bucket_size=64), QSGD(bits=8, bucket_size=64, levels="uniform")],
  ids=laws.name,
)
def test_the_largest_element_never_misses_its_level(codec):
  """Of 2^20 draws, each with 2^-16 for an error of one fixed-point unit to show."""
  x = np.repeat(laws.gaussian(2**14), 64)
  np.testing.assert_array_equal(laws.round_trip(codec, x), x)


def test_l2_norms_of_tiny_and_huge_buckets():
  """Squares of their elements would vanish or be infinite; the norms are neither."""
  x = laws.gaussian((5, 64)) * np.float32([[1e-30], [1e-22], [1], [1e22], [1e37]])
  expected = np.sqrt(np.square(x, dtype=np.float64).sum(axis=1))
  # 64 additions and a square root in float32, each within half an ulp, of which
  # random signs leave few: 1e-6 is 8 ulp.
  found = jax.jit(norms, static_argnums=1)(x, "l2")
  np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_typed_and_raw_keys_are_the_same():
  codec, x = QSGD(bits=4), jnp.asarray(laws.gaussian(100))
  typed = jax.random.key(7, impl="threefry2x32")
  encode = jax.jit(lambda x, key: codec.encode(x, key=key).rows)
  raw = encode(x, jax.random.key_data(typed))
  np.testing.assert_array_equal(encode(x, typed), raw)


@pytest.mark.parametrize("bits", [*slow(1), 2, *slow(3), 4])
def test_steps_lose_least_of_gaussian_buckets(bits):
  """The loss is the least of uniform quantizers of 2 to 16 levels (Max 1960, table II).

  Of 2^17 elements, whose sample error of the mean is below 1 %. A norm over 512
  elements is 3 % off, which costs another 1 % at most.
  """
  least = {1: 0.3634, 2: 0.1188, 3: 0.03744, 4: 0.01154}[bits]
  x = laws.gaussian(2**17)
  lost = error(clipped(bits), x)
  assert abs(lost / least - 1) < 0.02
  assert lost < error(QSGD(bits=bits, levels="uniform"), x)


def steady(codec, steps=60, size=2**14):
  """The power of the residual after some steps, in powers of the gradient."""

  @jax.jit
  def run(key):
    def step(residual, key):
      first, second = jax.random.split(key)
      x = residual + jax.random.normal(first, (size,))
      key = second if codec.needs_key else None
      return x - codec.decode(codec.encode(x, key=key), like=x), None

    return jax.lax.scan(step, jnp.zeros(size), jax.random.split(key, steps))[0]

  return float(np.square(run(jax.random.key(0))).mean())


def test_residual_at_two_bits():
  """A quarter of what other nearest levels leave, and a tenth of stochastic ones.

  All three are means over 2^14 elements, some 2 % off.
  """
  assert 0.13 < steady(laws.here(clipped(2))) < 0.145
  uniform = dict(bits=2, levels="uniform", implementation="xla")
  assert 0.5 < steady(QSGD(rounding="nearest", **uniform)) < 0.65
  assert 1.5 < steady(QSGD(**uniform)) < 2.5


def test_rings_fill_tiles_as_encoders_do():
  """A ring of one worker encodes the tiles of a leaf: to the bits of that leaf."""
  x = {"w": jnp.asarray(laws.gaussian((1, 70, 5)))}
  options = dict(axis_name="data", min_leaf_size=0)
  codec = laws.here(clipped(4, bucket_size=64))
  ring, alone = (
    modes.run("vmap", gradcomp.compress(codec, exchange=exchange, **options), [x])
    for exchange in ("ring", "all_gather")
  )
  np.testing.assert_array_equal(ring[0][0]["w"], alone[0][0]["w"])
