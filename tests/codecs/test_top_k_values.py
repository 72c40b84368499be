"""What TopK and RandomK send, as values or as means, and what they keep is the leaf."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp._src.codecs.sums.entries import Entries
from gradcomp.codecs import RandomK, TopK
from tests.specs import dithers, random_k, sparse, top_k
from tests.support import laws
from tests.support.assertions import assert_same_bits
from tests.support.cases.exchange import case_name
from tests.support.selections import (
  check_selection,
  data,
  encode,
  entries_of,
  layout,
  values_of,
)

SIZE, DENSITY, K = 100_003, 0.001, 101


def smallest(name):
  """Whether a subnormal number is zero in a sum is the processor's affair."""
  return 2.0**-126 if name in ("subnormal", "powers") else 0


@pytest.mark.parametrize(
  "size, density, method", [(SIZE, DENSITY, "threshold"), (1000, 0.01, "exact")]
)
def test_asq_sends_the_largest_of_one_sign(size, density, method):
  codec = TopK(density=density, selection=method, quantize="asq")
  k, slots = top_k.entries_of(density, size), layout(codec, size)["slots"]
  for name, x in data(size).items():
    for sign in (1, -1):
      rows, rest = encode(codec, x, sign)
      (entries,) = entries_of(codec, rows, size)
      chosen = entries.positions
      own = np.flatnonzero(sign * x > 0)
      assert np.isin(chosen, own).all()
      if own.size < k:
        assert set(chosen) == set(own)
      else:
        places = np.searchsorted(own, chosen)
        check_selection(x[own], places, k, slots)
      left = x.copy()
      if chosen.size:
        mean = entries.values[0]
        np.testing.assert_allclose(
          mean,
          x[chosen].mean(dtype=np.float64),
          laws.mean_bound(chosen.size),
          smallest(name),
        )
        left[chosen] -= mean
      np.testing.assert_allclose(rest, left, 0, smallest(name))
      bound = codec.ranged(size)
      assert bound.used(rows) == chosen.size


def test_asq_takes_turns_and_sends_all_in_the_end():
  """The step decides, for all workers alike; on its own a leaf has the first sign."""
  tx = gradcomp.redsync(0.01, None, quantize="asq", min_leaf_size=1)
  x = data(1000)["normal"]
  step = jax.jit(tx.update)
  state = tx.init({"w": x})
  for number in range(4):
    sent, state = step({"w": x}, state)
    values = np.asarray(sent["w"])
    values = values[values != 0]
    assert values.size == 10 and (values == values[0]).all()
    assert (values[0] > 0) == (number % 2 == 0)
    assert state.memory.own[()][0].used == 10
  codec = TopK(density=0.01, quantize="asq")
  assert_same_bits(encode(codec, x)[0], encode(codec, x, 1)[0])


@pytest.mark.parametrize(
  "size, density, method", [(SIZE, DENSITY, "threshold"), (1000, 0.01, "exact")]
)
def test_strom_sends_a_mean_of_each_sign(size, density, method):
  """Blocks are of 32,768 elements: here are four of them."""
  codec = TopK(density=density, selection=method, quantize="mean")
  k, slots = top_k.entries_of(density, size), layout(codec, size)["slots"]
  for name, x in data(size).items():
    rows, rest = encode(codec, x)
    (entries,) = entries_of(codec, rows, size)
    check_selection(x, entries.positions, k, slots)
    left = x.copy()
    for own in (entries.values > 0, entries.values < 0):
      if own.any():
        place = entries.positions[own]
        np.testing.assert_allclose(
          entries.values[own],
          x[place].mean(dtype=np.float64),
          laws.mean_bound(place.size),
          smallest(name),
        )
        left[place] -= entries.values[own]
    np.testing.assert_allclose(rest, left, 0, smallest(name))


@pytest.mark.parametrize("quantize", ["asq", "mean"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_mean_of_what_is_not_finite_is_not(quantize, bad):
  codec = TopK(density=0.01, selection="exact", quantize=quantize)
  x = data(1000)["normal"].copy()
  x[500] = bad
  for sign in (1, -1):
    stats = sign if quantize == "asq" else None
    rows, rest = encode(codec, x, stats)
    (entries,) = entries_of(codec, rows, 1000)
    assert 500 in entries.positions
    (value,) = entries.values[entries.positions == 500]
    assert not np.isfinite(value)
    assert np.isnan(rest[500])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_rounding_to_16_bits_loses_is_left(dtype):
  codec = TopK(density=DENSITY, selection="threshold", dtype=jnp.dtype(dtype))
  for name in ("normal", "uniform", "half constant", "sorted"):
    x = data(SIZE)[name]
    rows, rest = encode(codec, x)
    (entries,) = entries_of(codec, rows, SIZE)
    check_selection(x, entries.positions, K, 2 * K)
    narrow = np.asarray(jnp.asarray(x[entries.positions]).astype(dtype), np.float32)
    assert_same_bits(entries.values, narrow)
    # The difference of two numbers that are almost equal is exact.
    np.testing.assert_array_equal(values_of(codec, rows, SIZE) + rest, x)
    assert name == "half constant" or np.count_nonzero(rest[entries.positions])


def test_what_is_too_large_for_16_bits_is_sent_in_part():
  """The largest finite number goes, and the rest waits; infinities stay what they are.

  Of the same shapes as the test before, so that nothing is compiled.
  """
  codec = TopK(density=DENSITY, selection="threshold", dtype=jnp.float16)
  x = data(SIZE)["normal"].copy()
  x[[3, 7, 9]] = 1e6, -65520, np.inf
  rows, rest = encode(codec, x)
  sent = values_of(codec, rows, SIZE)
  np.testing.assert_array_equal(sent[[3, 7, 9]], [65504, -65504, np.inf])
  np.testing.assert_array_equal(rest[[3, 7]], [1e6 - 65504, -16])


def test_an_odd_number_of_slots():
  """The last half word is filled."""
  codec = TopK(density=0.011, selection="exact", dtype=jnp.bfloat16)
  x = data(1000)["normal"]
  rows, rest = encode(codec, x)
  chex.assert_shape(rows, (1, 1 + 6 + 6))
  (entries,) = entries_of(codec, rows, 1000)
  assert len(entries.positions) == 11
  np.testing.assert_array_equal(values_of(codec, rows, 1000) + rest, x)


@pytest.mark.parametrize(
  "codec, size",
  [
    (TopK(density=0.01, selection="threshold"), 70_001),
    (TopK(density=0.05, quantize="mean", range_size=400), 1000),
    (TopK(density=0.05, dtype=jnp.float16, range_size=33_000), 70_001),
    (TopK(density=0.05, quantize="asq"), 1000),
  ],
  ids=case_name,
)
def test_the_library_decodes_what_the_page_says(codec, size):
  """And adds payloads in order, each value scaled before."""
  first, second = data(size)["normal"], data(size)["half constant"]
  rows = [encode(codec, x)[0] for x in (first, second)]
  values = [values_of(codec, x, size) for x in rows]
  bound = codec.ranged(size)

  @jax.jit
  def decode(rows):
    payload = gradcomp.codecs.Payload(rows[0])
    return codec.decode(payload, like=first), Entries(bound).mean(rows, 1 / 3)

  alone, total = decode(jnp.stack(rows))
  np.testing.assert_array_equal(alone, values[0])
  np.testing.assert_array_equal(
    np.ravel(total)[:size], sparse.sparse_sum(values, np.float32(1) / 3)
  )


def test_half_precision_is_selected_as_float32():
  codec, x = TopK(density=0.01), data(1000)["normal"].astype(jnp.bfloat16)
  rest = laws.encoded(codec, jnp.asarray(x)).unsent
  sent = codec.roundtrip(jnp.asarray(x))
  chex.assert_type([sent, rest], [jnp.bfloat16, jnp.float32])
  wide = np.asarray(x, np.float32)
  check_selection(wide, np.flatnonzero(sent), 10, 10)
  np.testing.assert_array_equal(np.asarray(sent, np.float32) + np.asarray(rest), wide)


def test_a_threshold_is_used_again():
  """As it is, even by fewer than k; not by more than there are slots for."""
  codec = TopK(density=DENSITY, selection="sampled")
  x = data(SIZE)["normal"]
  rows, _ = encode(codec, x, 0.0)
  np.testing.assert_array_equal(rows, encode(codec, x)[0])
  limit = np.abs(entries_of(codec, rows, SIZE)[0].values).min()
  for factor in (0.8, 0.1, 1.0, 1.02):
    y = x * np.float32(factor)
    reach = np.flatnonzero(np.abs(y) >= np.float32(limit))
    assert reach.size <= 2 * K
    rows, rest = encode(codec, y, limit)
    (entries,) = entries_of(codec, rows, SIZE)
    np.testing.assert_array_equal(np.sort(entries.positions), reach)
    np.testing.assert_array_equal(values_of(codec, rows, SIZE) + rest, y)
  for factor in (2, 100):
    y = x * np.float32(factor)
    (entries,) = entries_of(codec, encode(codec, y, limit)[0], SIZE)
    check_selection(y, entries.positions, K, 2 * K)


def test_thresholds_are_searched_every_interval():
  """And in a step whose elements would not fit, without forgetting the old one."""
  tx = gradcomp.compress(
    TopK(density=0.01, selection="sampled", search_every=3), feedback=None
  )
  x = data(1000)["normal"]
  step, state = jax.jit(tx.update), tx.init({"w": x})
  limits = []
  for number, factor in enumerate((1, 0.5, 8, 1, 0.9, 0.01, 0.01, 0.01)):
    y = x * np.float32(factor)
    sent, state = step({"w": y}, state)
    chosen = np.flatnonzero(sent["w"])
    own = state.memory.own[()][0]
    limits.append(float(own.threshold[0]))
    assert int(own.used[0]) == chosen.size
    if number % 3 == 0:
      check_selection(y, chosen, 10, 20)
      assert limits[-1] == np.abs(y[chosen]).min()
    else:
      assert limits[-1] == limits[-2]
      reach = np.flatnonzero(np.abs(y) >= limits[-1])
      if reach.size > 20:
        assert number == 2
        check_selection(y, chosen, 10, 20)
      else:
        np.testing.assert_array_equal(chosen, reach)


@pytest.mark.parametrize("size, options", [(1000, {}), (1000, dict(range_size=300))])
def test_random_k_sends_one_of_each_stride(size, options):
  """The same of all leaves with the same key: positions need no bytes."""
  codec = RandomK(density=0.03, **options)
  n = codec.range_size or size
  ranges, stride = -(-size // n), random_k.stride_of(0.03, n)
  keys = [(7, 9), (0, 2**32 - 1)]
  for key, name in zip(keys, ("normal", "half zero"), strict=True):
    x = data(size)[name]
    words = jnp.array(key, jnp.uint32)
    rows = np.asarray(laws.encoder(codec)(jnp.asarray(x), words).rows)
    sent = random_k.decode(rows, size, range_size=n, stride=stride)
    positions = random_k.positions(key, ranges, n, 0.03)
    expected = np.zeros(ranges * n + 1, np.float32)
    padded = np.append(x, np.zeros(ranges * n + 1 - size, np.float32))
    flat = np.where(positions < n, positions + n * np.arange(ranges)[:, None], -1)
    expected[flat] = padded[flat]
    np.testing.assert_array_equal(sent, expected[:size])
    for row, number in zip(rows, range(ranges), strict=True):
      assert tuple(row[:2]) == tuple(
        map(int, dithers.threefry2x32(key, number, number))
      )
    np.testing.assert_array_equal(
      laws.decoder(codec, x.shape)(gradcomp.codecs.Payload(rows)), sent
    )


def test_random_k_chooses_all_elements_alike():
  """Counts of 512 keys: each element of a stride of 32 expects 16 a block."""
  counts = np.zeros(1024)
  for key in range(512):
    counts[random_k.positions((0, key), 1, 1024, 1 / 32)[0]] += 1
  # Binomial, sigma 3.9; 5.5 sigma are passed by 1024 elements with probability 4e-5.
  assert np.abs(counts - 16).max() < 5.5 * 3.94


def test_what_the_codecs_say_of_themselves():
  for codec in (TopK(), RandomK()):
    assert not codec.unbiased
    assert codec.ranged(5000, ranges=3).range_size == 1667
    assert codec.ranged(5000).ranged(10) == codec.ranged(5000)
  assert RandomK().needs_key and not TopK().needs_key
  assert TopK(density=0.001).ranged(1000).slots == 1
  assert TopK(density=0.001).ranged(1001).slots == 2
  assert TopK(density=1).ranged(7).slots == 7
