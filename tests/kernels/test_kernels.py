"""Packing loses no bit, and random bits are the cipher's, each used once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from gradcomp._src.kernels.common import dithers, fixed_point, planes
from gradcomp.kernels import pack_planes, random_lanes, threefry2x32, unpack_planes
from tests.plugins.slow_cases import slow
from tests.specs import dithers as dithers_spec
from tests.specs import planes as planes_spec
from tests.support import laws
from tests.support.assertions import rank


# Each width has others of the sizes up to 200, and the ends of tiles.
@pytest.mark.parametrize("step", [8, *slow(1)])
@pytest.mark.parametrize("bits", [1, 3, 16, *slow(2, 4, 5, 6, 7, 8)])
def test_every_size_round_trips_through_packing(bits, step):
  bucket_size = 8  # so that 200 elements are up to 12 tiles and a part of one
  count = planes.planes_per_word(bits)
  rng = np.random.default_rng(bits)
  edges = [k * bucket_size * count + d for k in range(3) for d in (0, 1, -1)]
  sizes = sorted({*range(bits % step, 201, step), *(e for e in edges if 0 <= e <= 200)})
  leaves = [rng.integers(0, 2**bits, size, dtype=np.uint32) for size in sizes]

  @jax.jit
  def pack(leaves):
    empty = jnp.zeros((0, bucket_size), jnp.uint32)
    return [
      jnp.concatenate(
        [empty]
        + [
          pack_planes(segment.planes, bits)
          for segment in planes.tile_segments(leaf, count, bucket_size)
        ]
      )
      for leaf in leaves
    ]

  words = pack([jnp.asarray(leaf) for leaf in leaves])
  unpacked = jax.jit(lambda words: [unpack_planes(w, bits) for w in words])(words)
  for leaf, word, codes in zip(leaves, words, unpacked, strict=True):
    np.testing.assert_array_equal(
      np.asarray(word), planes_spec.pack(leaf, bits, bucket_size)
    )
    np.testing.assert_array_equal(np.asarray(codes).reshape(-1)[: leaf.size], leaf)
    assert not np.asarray(codes).reshape(-1)[leaf.size :].any()


def test_threefry_of_20_rounds_is_jaxs_own():
  key = jnp.array([123, 456], jnp.uint32)
  counter = jnp.arange(2000, dtype=jnp.uint32) * jnp.uint32(2654435761)
  ours = threefry2x32(key, (counter[:1000], counter[1000:]))
  np.testing.assert_array_equal(
    np.concatenate([np.asarray(word) for word in ours]),
    np.asarray(threefry_2x32(key, counter)),
  )


@pytest.mark.parametrize("rounds", [8, 13])
def test_threefry_of_fewer_rounds_is_the_oracles(rounds):
  key = jnp.array([123, 456], jnp.uint32)
  counter = jnp.arange(50, dtype=jnp.uint32) * jnp.uint32(2654435761)
  ours = threefry2x32(key, (counter, counter + 7), rounds)
  theirs = dithers_spec.threefry2x32((123, 456), counter, counter + 7, rounds)
  np.testing.assert_array_equal(ours, theirs)


def test_lanes_are_quarters_of_blocks_and_sums_of_them():
  shape, lanes = (3, 64), 10
  dither = jnp.array(
    [*np.asarray(laws.KEY), dithers_spec.mask(5) * 0x10001], jnp.uint32
  )
  got = np.stack(random_lanes(dither, shape, lanes, first_row=5), axis=1)
  words = (*np.asarray(laws.KEY).tolist(), dithers_spec.mask(5))
  # Ten planes of three bits.
  expected = dithers_spec.random_lanes(words, 3, bits=3, bucket_size=64, first_row=5)
  np.testing.assert_array_equal(got, expected)


def test_any_two_lanes_are_independent():
  """Each bit of a lane is a sum of the cipher's: of two lanes, all 32 differ in rank.

  A lane is linear over the integers modulo 2, so that one bit at a time shows it whole.
  """
  rows = []
  for bit in range(64):
    word = [np.uint32(1 << bit) if bit < 32 else np.uint32(0)]
    word.append(np.uint32(1 << bit - 32) if bit >= 32 else np.uint32(0))
    a, b = (jnp.full((1, 1), x) for x in word)
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(dithers, "threefry2x32", lambda *_, a=a, b=b: (a, b))
      lanes = random_lanes(jnp.zeros(3, jnp.uint32), (1, 1), 8)
    rows.append([int(lane[0, 0]) for lane in lanes])
  assert len(set(zip(*rows, strict=True))) == 8
  for one in range(8):
    for other in range(one):
      assert rank([row[one] << 16 | row[other] for row in rows]) == 32


def test_masks_are_the_pages():
  traced = jax.jit(jax.vmap(dithers_spec.mask))(jnp.arange(300))
  expected = [dithers_spec.mask(i) for i in range(300)]
  assert traced.tolist() == expected
  assert [int(dithers_spec.mask(i)) for i in range(300)] == expected
  # Half of the pairs lie on either side of any half, quarter, eighth...
  for count in (2, 4, 8, 16):
    places = [(0x5A5A ^ m) * count >> 16 for m in expected[: 2 * count : 2]]
    assert sorted(places) == list(range(count))


def test_part_of_the_rows_draws_the_same_bits():
  whole = random_lanes(dithers.dither(laws.KEY), (8, 32), 4)
  part = random_lanes(dithers.dither(laws.KEY), (3, 32), 4, first_row=5)
  for all_rows, last_rows in zip(whole, part, strict=True):
    np.testing.assert_array_equal(np.asarray(all_rows[5:]), np.asarray(last_rows))


def test_lanes_are_uniform():
  """Mean and variance of 2^20 lanes, and each bit's frequency, within 5 sigma."""
  lanes = (
    np.stack(random_lanes(dithers.dither(laws.KEY), (256, 512), 8)).astype(np.float64)
    / 65535
  )
  n = lanes.size
  assert abs(lanes.mean() - 0.5) <= 5 * np.sqrt(1 / 12 / n)
  assert abs(lanes.var() - 1 / 12) <= 5 * np.sqrt(1 / 180 / n)
  codes = np.stack(random_lanes(dithers.dither(laws.KEY), (256, 512), 8))
  for bit in range(16):
    assert abs(((codes >> bit) & 1).mean() - 0.5) <= 5 * 0.5 / np.sqrt(n)


def test_exact_division_is_correctly_rounded():
  rng = np.random.default_rng(0)
  x, by = np.float32(2) ** rng.uniform(-60, 60, (2, 20_000)).astype(np.float32)
  x *= rng.choice(np.float32([-1, 1]), x.size)
  by[:4] = np.float32([1, 3, 2**-96, np.nan])
  x[4:10] = np.float32([0, 1e-40, np.inf, -np.inf, np.nan, -0.0])
  expected = x / by
  expected[5] = 0  # subnormal numbers count as zero
  np.testing.assert_array_equal(jax.jit(fixed_point.exact_divide)(x, by), expected)


def test_a_division_by_a_constant_is_one():
  """Compilers would multiply by its reciprocal."""
  x = np.exp(np.random.default_rng(0).uniform(-60, 60, 20_000)).astype(np.float32)
  for by in np.float32([0.7, 3, 64 * 0.79788]):
    found = jax.jit(lambda x, by=by: fixed_point.divide(x, jnp.full_like(x, by)))(x)
    np.testing.assert_array_equal(found, x / by)


@pytest.mark.parametrize(("platform", "corrects"), [("cpu", False), ("cuda", True)])
def test_integers_correct_the_division_of_gpus(platform, corrects):
  """XLA's division of floats there is not correctly rounded."""
  x = jax.ShapeDtypeStruct((8,), jnp.float32)
  traced = jax.jit(fixed_point.divide).trace(x, x)
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  assert text.count("stablehlo.divide") == 1
  assert ("stablehlo.shift_left" in text) == corrects
