"""Levels in multiples of a root mean square, which clip, and what they are for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp.codecs import QSGD
from tests.plugins.slow_cases import slow
from tests.specs import qsgd
from tests.support import laws, modes
from tests.support.laws import name
from tests.table.settings import CLIPPED_QSGD_CASES

INLINE = [case for case in CLIPPED_QSGD_CASES if not case.codec.share_scale]


def clipped(bits, **hyper):
  hyper = {"rounding": "nearest", **hyper}
  return QSGD(bits=bits, norm="rms", levels="uniform", **hyper)


def error(x, y):
  """The squared error of y, relative to the square of x."""
  x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
  return np.square(x - y).sum() / np.square(x).sum()


@pytest.mark.parametrize(
  "case",
  [
    pytest.param(case, id=name(case.codec), marks=[pytest.mark.slow][: case.slow])
    for case in INLINE
  ],
)
def test_payload_is_the_oracles(case):
  """Bit for bit; the scales to 1e-6, for the order of additions of at most 64."""
  codec = case.codec
  x = laws.gaussian(case.leaf)
  x[3], x[40], x[64:96] = 0.0, -0.0, 0.0
  hyper = dict(bits=codec.bits, bucket_size=codec.bucket_size)
  rows = np.asarray(laws.encoder(codec)(jnp.asarray(x), laws.KEY).rows)
  scales = rows[:, codec.bucket_size :].view(np.float32)
  np.testing.assert_allclose(scales, qsgd.scales_of(x, norm="rms", **hyper), rtol=1e-6)
  expected = qsgd.encode(
    x,
    key=np.asarray(laws.KEY) if codec.needs_key else None,
    norm="rms",
    levels="uniform",
    rounding=codec.rounding,
    scales=scales,
    **hyper,
  )
  np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("bits", [*slow(1), 2, *slow(3), 4])
def test_steps_lose_least_of_gaussian_buckets(bits):
  """The loss is the least of uniform quantizers of 2 to 16 levels (Max 1960, table II).

  Of 2^17 elements, whose sample error of the mean is below 1 %. A norm over 512
  elements is 3 % off, which costs another 1 % at most.
  """
  least = {1: 0.3634, 2: 0.1188, 3: 0.03744, 4: 0.01154}[bits]
  x = laws.gaussian(2**17)
  lost = error(x, laws.round_trip(clipped(bits), x))
  assert abs(lost / least - 1) < 0.02
  assert lost < error(x, laws.round_trip(QSGD(bits=bits, levels="uniform"), x))


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


@pytest.mark.slow
@pytest.mark.parametrize("bits, lost", [(1, 0.3634), (3, 0.03744), (4, 0.01154)])
def test_residual_at_other_widths(bits, lost):
  """A power r with r = lost (1 + r), if what is encoded is Gaussian: 5 % off at most.

  What is encoded is a Gaussian gradient and a residual, which is no Gaussian.
  """
  assert abs(steady(laws.here(clipped(bits))) * (1 - lost) / lost - 1) < 0.05


def test_what_is_clipped_is_sent_later():
  """An element of 20 root mean squares arrives in full, after some steps."""
  codec = laws.here(clipped(4, bucket_size=512))
  x = jnp.asarray(laws.gaussian(512)).at[7].set(20.0)
  once = laws.round_trip(codec, x)
  assert once[7] < 5 and once[7] == np.abs(once).max()
  residual, sent = jnp.zeros_like(x), []
  for _ in range(40):
    corrected = x + residual
    sent.append(laws.round_trip(codec, corrected))
    residual = corrected - sent[-1]
  # The residual is bounded, so its share of a sum over steps vanishes.
  assert abs(np.mean(sent[20:], axis=0)[7] - 20) < 1


@pytest.mark.parametrize("size", [1, 33, 200, 511])
def test_leaves_shorter_than_a_bucket_have_scales_of_their_own(size):
  """Zeros behind a leaf would shrink its scale, and clip all of it."""
  x = laws.gaussian(size)
  rows = laws.encoder(clipped(4))(jnp.asarray(x), None).rows
  scale = np.asarray(rows)[:, 512:].view(np.float32)[0]
  copies = np.resize(np.float64(x), 512)
  # 512 additions in binary32 by halves.
  np.testing.assert_allclose(scale[0], 2.5125 * np.sqrt(np.mean(copies**2)), rtol=1e-6)
  np.testing.assert_array_equal(scale[1:], 0)


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


def test_it_is_biased_and_keeps_a_residual():
  assert not clipped(2).unbiased and not clipped(2).needs_key
  stochastic = clipped(2, rounding="stochastic")
  assert not stochastic.unbiased and stochastic.needs_key
  tx = gradcomp.qsgd(2, norm="rms", levels="uniform")
  assert tx.init({"w": jnp.zeros(2048)}).residual is not None
