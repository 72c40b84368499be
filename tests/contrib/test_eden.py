"""Eden has the rows of its formula, the papers' error, and the bias that it owns to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import gradcomp
from gradcomp._src.kernels.common.normal_levels import normal_levels
from gradcomp.codecs import Context
from gradcomp.contrib import Eden
from gradcomp.testing import CheckOptions, check_codec, laws
from tests.plugins.slow_cases import slow
from tests.specs import eden as published
from tests.specs.dithers import threefry2x32
from tests.support.assertions import assert_same_bits

KEY = np.array([7, 11], np.uint32)
SCALES = ("unbiased", "least squares")
BITS = (1, 2, 4, *slow(3, 5, 6, 7, 8))


# As one program each: operations one by one are some thirty.
encode = jax.jit(lambda codec, x, key: codec.encode(x, key=key), static_argnums=0)
decode = jax.jit(
  lambda codec, payload, like: codec.decode(payload, like=like), static_argnums=0
)
roundtrip = jax.jit(lambda codec, x, key: codec.roundtrip(x, key=key), static_argnums=0)


def gaussian(*shape, seed=0):
  return np.float32(np.random.default_rng(seed).standard_normal(shape))


def squared(x, axis=None):
  return np.square(np.float64(x)).sum(axis)


@pytest.mark.parametrize(
  "codec, exchange",
  [
    (Eden(bits=1, block_size=512), "all_gather"),
    *slow(
      (Eden(bits=3, block_size=256, scale="least squares"), "two_shot"),
      (Eden(bits=6, block_size=512, rotations=2), "ring"),
    ),
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


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
  "bits, block, rotations", [(1, 64, 1), (4, 128, 2), *slow((3, 32, 1), (7, 256, 1))]
)
def test_rows_and_values_are_those_of_numpy(bits, block, rotations, scale):
  codec = Eden(bits=bits, block_size=block, rotations=rotations, scale=scale)
  x = gaussian(5, block) * np.float32([[1], [3e-5], [1e30], [0.1], [7]])
  payload = encode(codec, x, KEY)
  rows, values = oracle(codec, x, KEY)
  assert_same_bits(payload.rows, rows)
  assert_same_bits(decode(codec, payload, x), np.float32(values))


def distortion(bits):
  """The squared error of the levels for a normal number."""
  levels = published.lloyd_max(bits)
  edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
  return 1 - np.sum(levels**2 * np.diff(stats.norm.cdf(edges)))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("bits", BITS)
def test_the_error_is_the_papers(bits, scale):
  """D, or D / (1 - D) unbiased, for numbers of every kind, as in the model in NumPy."""
  rng = np.random.default_rng(bits)
  x = np.float32(
    np.stack([rng.standard_normal((16, 4096)), rng.laplace(size=(16, 4096))])
  )
  codec = Eden(bits=bits, scale=scale)
  sent = roundtrip(codec, x, jax.random.key(bits))
  model = [published.eden(np.float64(blocks), bits, scale, seed=1) for blocks in x]
  both = np.asarray(sent), np.array(model)
  own, others = (squared(y - x, -1) / squared(x, -1) for y in both)
  expected = distortion(bits)
  if scale == "unbiased":
    expected /= 1 - expected
  # 32 blocks, and corrections of the order of 1 / 4096, for which a Gaussian is only a
  # limit.
  bound = 5 * own.std() / np.sqrt(own.size) + expected / 4096
  assert own.mean() == pytest.approx(expected, abs=bound)
  error = np.hypot(own.std(), others.std()) / np.sqrt(own.size)
  assert own.mean() == pytest.approx(others.mean(), abs=5 * error)


@pytest.mark.parametrize("dither", ["shared", *slow("independent")])
def test_the_mean_of_16_workers_has_a_16th_of_the_error(dither):
  """Errors of the same vector are independent, however workers draw."""
  x = gaussian(4, 4096)
  tx = gradcomp.compress(
    Eden(bits=1), axis_name="data", exchange="all_gather", feedback=None, dither=dither
  )
  update = jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data")
  found = np.asarray(jax.jit(update)(np.broadcast_to(x, (16, *x.shape))))[0]
  share = squared(found - x, -1) / squared(x, -1) * 16
  expected = np.pi / 2 - 1
  # Elements of 4 blocks have errors that are nearly normal.
  assert share.mean() == pytest.approx(expected, rel=5 * np.sqrt(2 / x.size))


def with_a_large_element(size, share):
  """Gaussian numbers and an element that has a share of the squared length."""
  x = gaussian(size)
  x[5] = 0
  x[5] = np.sqrt(share / (1 - share) * squared(x))
  return x


@pytest.mark.parametrize(
  "share, rotations, rest", [(0.5, 1, 0.83), (0.5, 2, 1), (0.999999, 1, 0)]
)
def test_what_a_large_element_leaves_of_the_others(share, rotations, rest):
  """One turn is no uniform rotation: others are shrunk, which a second turn cures."""
  x, draws = with_a_large_element(1024, share), 2000
  codec = Eden(bits=1, block_size=1024, rotations=rotations)
  keys = jax.random.split(jax.random.key(0), draws)
  send = lambda key: codec.roundtrip(jnp.asarray(x), key=key)
  mean = np.float64(jax.jit(lambda: jax.vmap(send)(keys).mean(0))())
  others = np.arange(x.size) != 5
  along = mean[others] @ x[others] / squared(x[others])
  # Errors of |x|^2 (pi / 2 - 1) are spread over all elements.
  sigma = np.sqrt((np.pi / 2 - 1) / ((1 - share) * draws * x.size))
  assert along == pytest.approx(rest, abs=0.005 + 5 * sigma if rest else 1e-3)
  assert mean @ x == pytest.approx(squared(x), rel=1e-5)  # of each message, so it is


def test_one_number_is_exact_and_zeros_and_bad_numbers_are_alone():
  codec = Eden(bits=3, block_size=64)
  x = np.zeros((6, 64), np.float32)
  x[0, 3], x[1, 9] = 3.0, -(2.0**-90)
  x[2] = 2.0**-97
  x[3, 5], x[4, 6] = np.nan, -np.inf
  sent = np.asarray(roundtrip(codec, x, jax.random.key(0)))
  np.testing.assert_allclose(sent[:2], x[:2], rtol=1e-6)
  assert not sent[2].any() and not sent[5].any()
  assert np.isnan(sent[3:5]).all()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("rotations", [1, 2])
def test_the_largest_numbers_stay_finite(rotations, scale):
  """Their squares and their transform overflow, and so may what they decode to."""
  x = np.float32(31 / 16) * np.sign(gaussian(64, 32))  # times 2**127, the largest ones
  codec = Eden(bits=1, block_size=32, rotations=rotations, scale=scale)
  send = lambda x: np.asarray(roundtrip(codec, x, jax.random.key(0)))
  sent, small = send(x * np.float32(2.0**127)), send(x)
  most = np.finfo(np.float32).max
  assert (np.abs(sent) == most).any()
  np.testing.assert_array_equal(
    sent, np.clip(np.float64(small) * 2.0**127, -most, most)
  )


def test_many_rows_have_the_bits_of_few():
  """A CPU encodes and decodes some rows at a time, the last ones with zeros behind."""
  codec = Eden(bits=3, block_size=512)
  x = gaussian(300, 512)  # 153,600 elements, more than are done at once

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


@pytest.mark.parametrize("workers", slow(2))
def test_large_leaves_have_the_same_bits_in_every_mode(workers):
  """Also where parts of the rows are a loop in a map, or sharded."""
  tx = gradcomp.compress(Eden(bits=2), axis_name="data", exchange="all_gather")
  given = [jnp.asarray(gaussian(workers, 40, 4096))]
  laws.workers_agree(tx, given)
  laws.same_bits_in_every_mode(tx, given)


def test_owners_that_keep_what_they_lose_lose_least():
  codec = Eden(bits=2)
  assert codec.to_nearest() == Eden(bits=2, scale="least squares")
  assert (codec.unbiased, codec.to_nearest().unbiased) == (True, False)


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_bytes_are_those_of_the_docstring(bits):
  """A leaf of 10,000 elements has three blocks, and two words beside each."""
  payload = encode(Eden(bits=bits), np.zeros(10_000, np.float32), jax.random.key(0))
  assert payload.rows.nbytes == 3 * (4096 * bits // 8 + 8)
  laws.bytes_are_the_claim(Eden(bits=bits), jnp.zeros(10_000))


@pytest.mark.parametrize("bits", range(1, 9))
def test_each_level_is_the_mean_of_its_numbers(bits):
  levels = np.float64(normal_levels(bits))
  assert not (levels * 2**16 % 1).any()
  edges = np.concatenate([[0], (levels[1:] + levels[:-1]) / 2, [np.inf]])
  means = -np.diff(stats.norm.pdf(edges)) / np.diff(stats.norm.cdf(edges))
  np.testing.assert_allclose(levels, means, atol=2**-16, rtol=0)


@pytest.mark.parametrize(
  "options, rule",
  [
    ({"bits": 0}, "`bits` must be 1 to 8, got 0"),
    ({"bits": 9}, "`bits` must be 1 to 8, got 9"),
    ({"block_size": 96}, "`block_size` must be a power of two from 32 to 65536"),
    ({"block_size": 16}, "`block_size` must be a power of two from 32 to 65536"),
    ({"scale": "largest"}, "`scale` must be one of"),
    ({"rotations": 3}, "`rotations` must be 1 or 2, got 3"),
  ],
  ids=str,
)
def test_a_bad_hyperparameter_is_an_error(options, rule):
  with pytest.raises(ValueError, match=rule):
    Eden(**options)
