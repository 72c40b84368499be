"""Eden has the rows of its formula, the papers' error, and the bias that it owns to.

So has the model in NumPy, but for the rows; it shares no random number with it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import gradcomp
from gradcomp.codecs import Context
from gradcomp.contrib import Eden
from gradcomp.contrib._eden import normal_levels
from gradcomp.testing import CheckOptions, check_codec
from tests.plugins.slow_cases import slow
from tests.specs.dithers import threefry2x32
from tests.specs.methods import eden as published
from tests.support import laws
from tests.support.assertions import assert_same_bits

KEY = np.array([7, 11], np.uint32)
SCALES = ("unbiased", "least squares")


def squared(x, axis=None):
  return np.square(np.float64(x)).sum(axis)


LEAST = Eden(bits=3, block_size=256, scale="least squares")
TWICE = Eden(bits=6, block_size=512, rotations=2)


@pytest.mark.parametrize(
  "codec, exchange",
  [
    (Eden(bits=1, block_size=512), "all_gather"),
    *slow((LEAST, "two_shot"), (TWICE, "ring")),
  ],
  ids=str,
)
def test_every_law(codec, exchange):
  options = CheckOptions(spoils=codec.block_size)
  check_codec(codec, workers=2, exchanges=[exchange], options=options)


def signs(seed, turn, size):
  """The signs of a turn of a row."""
  words, _ = threefry2x32((seed, turn), np.arange(size // 32), 0, 13)
  bits = (words[None] >> np.arange(32, dtype=np.uint32)[:, None]) & 1
  return np.where(bits.ravel() == 1, np.float32(-1), np.float32(1))


def hadamard(x):
  """The transform of a row by entries 1 and -1, one addition after the other."""
  width = 1
  while width < x.size:
    first, second = x.reshape(-1, 2, width).swapaxes(0, 1)
    x = np.stack([first + second, first - second], 1).ravel()
    width *= 2
  return x


def by_halves(x):
  while x.size > 1:
    x = x[: x.size // 2] + x[x.size // 2 :]
  return x[0]


def words_of(codes, bits):
  """A row's words: of each width in ``bits`` the planes, from the lowest bit up."""
  words, first = [], 0
  for width in (1, 2, 4, 8):
    if bits & width:
      planes = ((codes >> first) % 2**width).reshape(32 // width, -1)
      shifts = np.arange(0, 32, width, dtype=np.uint32)[:, None]
      words.append(np.bitwise_or.reduce(np.uint32(planes) << shifts))
      first += width
  return np.concatenate(words)


def oracle(codec, x, key, worker_word=0):
  """The rows of blocks of numbers near 1, and the values they stand for."""
  levels = normal_levels(codec.bits)
  edges, turns = (levels[1:] + levels[:-1]) / 2, range(codec.rotations)
  halvings = codec.rotations * (codec.block_size.bit_length() - 1) // 2
  rows, values = [], []
  for number, block in enumerate(x):
    (seed,), _ = threefry2x32(key, [number], worker_word, 13)
    exponent = np.frexp(np.abs(block).max())[1] - 1  # its largest is from 1 to 2
    turned = np.ldexp(block, -exponent)
    for turn in turns:
      turned = hadamard(turned * signs(seed, turn, block.size))
    size, energy = np.abs(turned), by_halves(turned * turned)
    number = np.searchsorted(
      edges, size * (np.float32(np.sqrt(block.size)) / np.sqrt(energy)), "right"
    )
    along, length = by_halves(size * levels[number]), by_halves(levels[number] ** 2)
    scale = energy / along if codec.scale == "unbiased" else along / length
    scale = np.ldexp(scale, exponent - halvings - 4)
    code = number + np.signbit(turned) * 2 ** (codec.bits - 1)
    rows.append([*words_of(code, codec.bits), seed, scale.view(np.uint32)])
    value = np.where(np.signbit(turned), -levels[number], levels[number])
    for turn in reversed(turns):
      value = hadamard(value)
      value *= signs(seed, turn, block.size)
    values.append(value * np.ldexp(scale, 4 + halvings) / block.size**codec.rotations)
  return np.array(rows, np.uint32), np.array(values)


@pytest.mark.parametrize(
  "bits, block, rotations, scale",
  [
    (1, 64, 1, "unbiased"),
    (4, 128, 2, "least squares"),
    *slow((3, 32, 1, "least squares"), (7, 256, 1, "unbiased")),
  ],
)
def test_rows_and_values_are_those_of_numpy(bits, block, rotations, scale):
  codec = Eden(bits=bits, block_size=block, rotations=rotations, scale=scale)
  x = laws.gaussian((5, block)) * np.float32([[1], [3e-5], [1e30], [0.1], [7]])
  payload = laws.encoder(codec)(x, KEY)
  rows, values = oracle(codec, x, KEY)
  assert_same_bits(payload.rows, rows)
  assert_same_bits(laws.decoder(codec, x.shape)(payload), np.float32(values))


@functools.cache
def distortion(bits):
  """The squared error of the levels for a normal number, by integration."""
  levels = published.lloyd_max(bits)
  edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
  # The levels are means, so it is 1 less their mean square.
  return 1 - levels**2 @ np.diff(stats.norm.cdf(edges))


def errors(bits):
  """Of the two scales, in the papers."""
  d = distortion(bits)
  return dict(zip(SCALES, (d / (1 - d), d), strict=True))


@pytest.mark.parametrize("bits", [1, 4, *slow(2, 3, 5, 6, 7, 8)])
def test_the_error_is_the_papers(bits):
  """D, or D / (1 - D) unbiased, for numbers of every kind, as in the model in NumPy."""
  rng = np.random.default_rng(bits)
  x = np.stack([rng.standard_normal((16, 4096)), rng.laplace(size=(16, 4096))])
  x, key = np.float32(x), jax.random.key(bits)
  codecs = [Eden(bits=bits, scale=scale) for scale in SCALES]
  sent = jax.jit(lambda x, key: [y.roundtrip(x, key=key) for y in codecs])(x, key)
  for (scale, expected), mine in zip(errors(bits).items(), sent, strict=True):
    model = [published.eden(np.float64(blocks), bits, scale, seed=1) for blocks in x]
    both = np.asarray(mine), np.array(model)
    own, others = (squared(y - x, -1) / squared(x, -1) for y in both)
    # 32 blocks, and corrections of the order of 1 / 4096, for which a Gaussian is only
    # a limit.
    bound = 5 * own.std() / np.sqrt(own.size) + expected / 4096
    assert own.mean() == pytest.approx(expected, abs=bound)
    error = np.hypot(own.std(), others.std()) / np.sqrt(own.size)
    assert own.mean() == pytest.approx(others.mean(), abs=5 * error)


# Max, Quantizing for Minimum Distortion, 1960, table I, with 2 to 16 levels.
MAX_1960 = (0.3634, 0.1175, 0.03454, 0.009497)
# The outermost levels of 1 to 8 bits, printed in the authors' constants of EDEN.
OUTERMOST = (0.7978845608, 1.5104176087, 2.1519456699, 2.7325888048)
OUTERMOST += (3.2607262956, 3.7440690237, 4.1895219330, 4.6018710595)


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_model_has_the_printed_levels_and_errors(bits):
  """One bit is DRIVE: 1 - 2 / pi, and pi / 2 - 1."""
  # The outermost level converges last: ends differ by a thousandth at 8 bits.
  assert published.lloyd_max(bits)[-1] == pytest.approx(OUTERMOST[bits - 1], rel=2e-3)
  # The last printed digits are too low: 0.03454 and 0.009497 are below the minimum,
  # which is 0.034548 and 0.009501 by a general minimizer, too.
  for printed in MAX_1960[bits - 1 : bits]:
    assert distortion(bits) == pytest.approx(printed, rel=5e-4)
  x = np.random.default_rng(0).standard_normal((1, 2**16))
  # Relative deviations are below 3 / 2**8 an element's; four of them are 5 %.
  for scale, expected in errors(bits).items():
    found = squared(published.eden(x, bits, scale, seed=1) - x) / squared(x)
    assert found == pytest.approx(expected, rel=0.05), scale


@pytest.mark.parametrize("dither", ["shared", *slow("independent")])
def test_the_mean_of_16_workers_has_a_16th_of_the_error(dither):
  """Errors of the same vector are independent, however workers draw."""
  x = laws.gaussian((4, 4096))
  given = {"axis_name": "data", "exchange": "all_gather", "feedback": None}
  tx = gradcomp.compress(Eden(bits=1), dither=dither, **given)
  update = jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data")
  found = np.asarray(jax.jit(update)(np.broadcast_to(x, (16, *x.shape))))[0]
  share = squared(found - x, -1) / squared(x, -1) * 16
  # Elements of 4 blocks have errors that are nearly normal.
  assert share.mean() == pytest.approx(np.pi / 2 - 1, rel=5 * np.sqrt(2 / x.size))


@pytest.mark.parametrize(
  "share, rotations, rest", [(0.5, 1, 0.83), (0.5, 2, 1), *slow((0.999999, 1, 0))]
)
def test_what_a_large_element_leaves_of_the_others(share, rotations, rest):
  """One turn is no uniform rotation: others are shrunk, which a second turn cures."""
  x, draws = laws.gaussian(1024), 2000
  others = np.arange(x.size) != 5
  x[5] = np.sqrt(share / (1 - share) * squared(x[others]))
  codec = Eden(bits=1, block_size=1024, rotations=rotations)

  @jax.jit
  def mean(x, key):
    send = lambda key: codec.roundtrip(x, key=key)
    return jax.vmap(send)(jax.random.split(key, draws)).mean(0)

  found = np.float64(mean(x, jax.random.key(0)))
  along = found[others] @ x[others] / squared(x[others])
  # Errors of |x|^2 (pi / 2 - 1) are spread over all elements.
  sigma = np.sqrt((np.pi / 2 - 1) / ((1 - share) * draws * x.size))
  assert along == pytest.approx(rest, abs=0.005 + 5 * sigma if rest else 1e-3)
  assert found @ x == pytest.approx(squared(x), rel=1e-5)  # of each message, so it is


def test_one_number_is_exact_and_tiny_ones_are_zeros():
  x = np.zeros((3, 64), np.float32)
  x[0, 3], x[1, 9], x[2] = 3.0, -(2.0**-90), 2.0**-97
  sent = laws.round_trip(Eden(bits=3, block_size=64), x)
  np.testing.assert_allclose(sent[:2], x[:2], rtol=1e-6)
  assert not sent[2].any()


@pytest.mark.parametrize(
  "rotations, scale",
  [(2, "unbiased"), *slow((1, SCALES[0]), (1, SCALES[1]), (2, SCALES[1]))],
)
def test_the_largest_numbers_stay_finite(rotations, scale):
  """Their squares and their transform overflow, and so may what they decode to."""
  # Times 2**127, the largest ones.
  x = np.float32(31 / 16) * np.sign(laws.gaussian((64, 32)))
  codec = Eden(bits=1, block_size=32, rotations=rotations, scale=scale)
  sent, small = (laws.round_trip(codec, x * np.float32(y)) for y in (2.0**127, 1))
  most = np.finfo(np.float32).max
  assert (np.abs(sent) == most).any()
  expected = np.clip(np.float64(small) * 2.0**127, -most, most)
  np.testing.assert_array_equal(sent, expected)


def test_many_rows_have_the_bits_of_few():
  """A CPU encodes and decodes some rows at a time, the last ones with zeros behind."""
  codec = Eden(bits=3, block_size=512)
  x = laws.gaussian((300, 512))  # 153,600 elements, more than are done at once

  @jax.jit
  def many_and_few(x, key):
    encode = functools.partial(codec.encode_rows, context=Context(key=key))
    rows = encode(x)
    few = encode(x[:100]), codec.decode_rows(rows[200:])
    three = jnp.stack([rows, rows[::-1], rows])
    return rows, codec.decode_rows(rows), few, codec.sum_rows(three)

  rows, values, few, total = jax.device_get(many_and_few(x, KEY))
  assert_same_bits(few, (rows[:100], values[200:]))
  assert_same_bits(total, values + values[::-1] + values)


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_bytes_are_those_of_the_docstring(bits):
  """A leaf of 10,000 elements has three blocks, and two words beside each.

  Owners that keep what they lose take the scale that loses least.
  """
  codec, leaf = Eden(bits=bits), jax.ShapeDtypeStruct((10_000,), np.float32)
  payload = jax.eval_shape(functools.partial(codec.encode, key=KEY), leaf)
  assert payload.rows.size * 4 == 3 * (4096 * bits // 8 + 8)
  assert codec.to_nearest() == Eden(bits=bits, scale="least squares")
  assert (codec.unbiased, codec.to_nearest().unbiased) == (True, False)


@pytest.mark.parametrize("bits", range(1, 9))
def test_each_level_is_the_mean_of_its_numbers(bits):
  levels = np.float64(normal_levels(bits))
  assert not (levels * 2**16 % 1).any()
  edges = np.concatenate([[0], (levels[1:] + levels[:-1]) / 2, [np.inf]])
  means = -np.diff(stats.norm.pdf(edges)) / np.diff(stats.norm.cdf(edges))
  np.testing.assert_allclose(levels, means, atol=2**-16, rtol=0)
