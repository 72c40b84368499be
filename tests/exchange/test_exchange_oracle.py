"""Every exchange is its description in NumPy, bit by bit.

tests/specs/qsgd.py is written from docs/inside/wire-format.md and the papers, so what
these tests compare are two programs with nothing in common but the page. Workers are
emulated: that maps of real devices have the same bits is a law of test_exchange.py.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.codecs.rounds import payload_of
from gradcomp._src.codecs.sums.codes import pack_sums
from gradcomp._src.exchange.collectives import largest
from gradcomp.codecs import QSGD, Context
from tests.plugins.slow_cases import slow
from tests.specs import dithers, qsgd
from tests.specs import exchange as oracle_exchange
from tests.support import laws, modes

STOCHASTIC = QSGD(bits=4, bucket_size=32)
NEAREST = QSGD(bits=8, bucket_size=32, levels="uniform", rounding="nearest")
WHOLE = QSGD(bits=3, bucket_size=None, levels="uniform", rounding="nearest")
SHARED = QSGD(bits=4, bucket_size=32, share_scale=True)
SHARED_WHOLE = QSGD(bits=4, bucket_size=None, levels="uniform", share_scale=True)

SEED, STEPS = 11, 2
LEAF, LATER = "['w']", "['w']\n"  # the names in keys: of the only leaf, and of stages
SIZES = {None: 9000}  # some rows of 512 words, the last one ragged; of 32 words, 700


def gradients(codec, workers):
  """A ragged leaf a worker and step, float32[STEPS, N, size]."""
  size = SIZES.get(codec.bucket_size, 700)
  rng = np.random.default_rng(workers)
  return rng.standard_normal((STEPS, workers, size)).astype(np.float32)


def run(codec, exchange, x, **options):
  """Each step's output, and the residuals after the last one."""
  options |= dict(axis_name="data", exchange=exchange, feedback="error", key=SEED)
  tx = gradcomp.compress(laws.kept(codec), **options)
  steps = [{"w": jnp.asarray(step)} for step in x]
  outputs, residual, owned = modes.run_all("vmap", tx, steps)
  owned = [np.asarray(array) for arrays in (owned or {}).values() for array in arrays]
  return [np.asarray(out["w"][0]) for out in outputs], np.asarray(residual["w"]), owned


def dither(step, name, worker, *more):
  return dithers.leaf_dither(SEED, step, name, worker, *more)


def hyper(codec):
  return dict(bits=codec.bits, bucket_size=codec.bucket_size)


def encode(codec, x, key, **options):
  return qsgd.encode(
    x,
    key=key,
    norm=codec.norm,
    levels=codec.levels,
    rounding=codec.rounding,
    **hyper(codec),
    **options,
  )


def recode(codec, rows, key):
  """What rows decode to after one more encoding."""
  words = encode(codec, rows, key, scale_per_row=True)
  decoded = qsgd.decode(words, rows.size, levels=codec.levels, **hyper(codec))
  return decoded.reshape(rows.shape)


def tiled(x, codec):
  """float32[N, size] as whole rows, float32[N, R, tile]."""
  padded = np.pad(x, ((0, 0), (0, -x.shape[1] % codec.tile_size)))
  return padded.reshape(len(x), -1, codec.tile_size)


def flat(rows, size):
  return rows.reshape(*rows.shape[:-2], -1)[..., :size]


def owner_zeros(tiles, codec):
  workers, rows = tiles.shape[:2]
  return np.zeros((workers, -(-rows // workers), codec.tile_size), np.float32)


def assert_steps_equal(got, expected):
  outputs, residual, owned = got
  for a, b in zip(outputs, expected[0], strict=True):
    np.testing.assert_array_equal(a, b)
  np.testing.assert_array_equal(residual, expected[1])
  assert len(owned) == len(expected[2])
  for a, b in zip(owned, expected[2], strict=True):
    np.testing.assert_array_equal(a.reshape(b.shape), b)


@pytest.mark.bits
@pytest.mark.parametrize("workers", [3, *slow(2, 4)])
@pytest.mark.parametrize("codec", [STOCHASTIC, NEAREST, WHOLE], ids=laws.name)
def test_ring(codec, workers):
  x = gradients(codec, workers)
  residual, outputs = np.zeros_like(x[0]), []
  for step in range(STEPS):
    mean, lost = oracle_exchange.ring(
      tiled(x[step] + residual, codec),
      lambda rows, worker, hop, step=step: recode(
        codec,
        rows,
        dither(step, LATER, workers - 1 - hop, (worker - 1 - hop) % workers),
      ),
    )
    outputs.append(flat(mean, x.shape[2]))
    residual = flat(lost, x.shape[2])
  assert_steps_equal(run(codec, "ring", x), (outputs, residual, []))


@pytest.mark.bits
# Three groups: two addends have no order.
@pytest.mark.parametrize("workers", [6, *slow(2, 4)])
@pytest.mark.parametrize("codec", [STOCHASTIC, NEAREST], ids=laws.name)
def test_hierarchical(codec, workers):
  x = gradients(codec, workers)
  residual, outputs = np.zeros_like(x[0]), []
  owned = owner_zeros(tiled(x[0], codec), codec)
  for step in range(STEPS):
    inside = lambda rows, worker, step=step: recode(
      codec, rows, dither(step, LATER, worker // 2, worker % 2)
    )
    means = lambda rows, owner: recode(
      dataclasses.replace(codec, rounding="nearest"), rows, None
    )
    mean, lost = oracle_exchange.hierarchical(
      tiled(x[step] + residual, codec),
      2,
      inside,
      oracle_exchange.with_feedback(means, owned),
    )
    outputs.append(flat(mean, x.shape[2]))
    residual = flat(lost, x.shape[2])
  got = run(codec, modes.grouped("hierarchical"), x)
  assert_steps_equal(got, (outputs, residual, [owned]))


@pytest.mark.bits
@pytest.mark.parametrize("workers", [3, *slow(2, 8)])
@pytest.mark.parametrize("codec", [STOCHASTIC, NEAREST], ids=laws.name)
def test_two_shot_with_both_residuals(codec, workers):
  x = gradients(codec, workers)
  residual, outputs = np.zeros_like(x[0]), []
  owned = owner_zeros(tiled(x[0], codec), codec)
  for step in range(STEPS):
    corrected = tiled(x[step] + residual, codec)
    sent = np.stack(
      [recode(codec, corrected[i], dither(step, LEAF, i)) for i in range(workers)]
    )
    again = lambda mean, owner: recode(
      dataclasses.replace(codec, rounding="nearest"), mean, None
    )
    mean = oracle_exchange.two_shot(sent, oracle_exchange.with_feedback(again, owned))
    outputs.append(flat(mean, x.shape[2]))
    residual = flat(corrected - sent, x.shape[2])
  assert_steps_equal(run(codec, "two_shot", x), (outputs, residual, [owned]))


def shared_step(codec, x, keys):
  """Each worker's rows and the scales by the oracle, and what the decoder makes of it.

  Returns:
    The words uint32[N, tiles, B], the scales float32[tiles, P or 1], what each worker
    sent float32[N, size], and the mean float32[size].
  """
  workers, size = x.shape
  options = dict(levels=codec.levels, **hyper(codec))
  scales = qsgd.shared_scales(x, norm=codec.norm, **hyper(codec))
  rows = np.stack(
    [encode(codec, x[i], keys[i], scales=scales, inline=False) for i in range(workers)]
  )
  codes = np.stack([qsgd.integers(r, size, **options) for r in rows])
  decode = lambda codes: qsgd.decode_sums(codes, scales, **options)
  values, sent = decode(codes.sum(axis=0)), np.stack([*map(decode, codes)])
  return rows, scales, sent, values * (np.float32(1) / np.float32(workers))


@pytest.mark.bits
@pytest.mark.parametrize("workers", [3, *slow(4)])
@pytest.mark.parametrize("exchange", ["psum", "two_shot", "all_gather"])
@pytest.mark.parametrize("codec", [SHARED, SHARED_WHOLE], ids=laws.name)
def test_shared_scales(codec, exchange, workers):
  """Three ways to send the same integers, and a NaN in the second step."""
  x = gradients(codec, workers)
  x[1, -1, 40] = np.nan
  residual, outputs = np.zeros_like(x[0]), []
  for step in range(STEPS):
    corrected = x[step] + residual
    keys = [dither(step, LEAF, worker) for worker in range(workers)]
    _, _, sent, mean = shared_step(codec, corrected, keys)
    outputs.append(mean)
    kept = np.isfinite(corrected - sent) & np.isfinite(mean)
    residual = np.where(kept, corrected - sent, residual)
  bucket = np.arange(x.shape[2]) // 32 == 1 if codec is SHARED else slice(None)
  assert np.isnan(outputs[1][bucket]).all() and np.isfinite(residual).all()
  assert_steps_equal(run(codec, exchange, x), (outputs, residual, []))


def test_the_largest_statistics_and_nan_wins():
  """Over all orders of what a scale can be, with NaN of both signs."""
  nans = np.array([0x7FC00000, 0xFFC00001], np.uint32).view(np.float32)
  kinds = np.array([0, 2.0**-96, 1, 3.4e38, *nans], np.float32)
  stats = np.array(list(itertools.product(kinds, repeat=3))).T  # float32[3, 6^3]
  find = jax.shard_map(
    lambda x: largest(x[0], "data"),
    mesh=modes.mesh(3),
    in_specs=P("data"),
    out_specs=P(),
  )
  got = np.asarray(jax.jit(find)(stats))
  np.testing.assert_array_equal(got, np.max(stats, axis=0))
  assert np.isnan(got[np.isnan(stats).any(axis=0)]).all()
  (read,) = qsgd.split_stats(got.view(np.int32), [216 * 32], bits=4, bucket_size=32)
  np.testing.assert_array_equal(read.ravel(), got)


@pytest.mark.parametrize("workers", range(2, 10))
@pytest.mark.parametrize(
  "codec",
  [
    SHARED,
    SHARED_WHOLE,
    QSGD(bits=1, bucket_size=32, levels="uniform", share_scale=True),
    QSGD(bits=3, bucket_size=64, share_scale=True),
    QSGD(bits=16, bucket_size=32, levels="uniform", share_scale=True),
  ],
  ids=laws.name,
)
def test_packed_sums_are_the_documented_words(codec, workers):
  """Every sum in its own bits, the extremes too, and what follows the last is zero."""
  options = dict(levels=codec.levels, **hyper(codec))
  limit = workers * codec.max_code
  sums = np.random.default_rng(workers).integers(-limit, limit + 1, 3 * codec.tile_size)
  sums[:2] = -limit, limit
  words = codec.row_words
  given = sums.reshape(3, -1, words).astype(np.int32)
  packed = np.asarray(jax.jit(lambda x: pack_sums(codec, x, workers))(given))
  np.testing.assert_array_equal(packed, qsgd.pack_sums(sums, workers, **options))
  read = qsgd.unpack_sums(packed, sums.size, workers, **options)
  np.testing.assert_array_equal(read, sums)


@pytest.mark.parametrize(
  "bits, bucket_size, levels",
  [
    (3, 64, "uniform"),
    (3, None, "sign_magnitude"),
    *slow(
      (1, 32, "uniform"),
      (4, 32, "sign_magnitude"),
      (16, 32, "sign_magnitude"),
      (8, None, "uniform"),
    ),
  ],
)
def test_a_shared_codec_alone_and_among_others(bits, bucket_size, levels):
  """Its rows are the documented words, and codes of workers add up."""
  shape = dict(bits=bits, bucket_size=bucket_size, levels=levels)
  codec, plain = QSGD(share_scale=True, **shape), QSGD(**shape)
  x = laws.gaussian(2 * codec.tile_size + 45)
  encoder = jax.jit(
    lambda x, agreed: payload_of(codec, x, Context(laws.KEY, agreed=agreed))
  )
  payload = laws.encoder(codec)(jnp.asarray(x), laws.KEY)
  stats = jax.jit(codec.agree)(jnp.asarray(x))
  again = encoder(jnp.asarray(x), stats)
  jax.tree.map(np.testing.assert_array_equal, payload, again)
  scales = qsgd.scales_of(x, norm="max", bits=bits, bucket_size=bucket_size)
  np.testing.assert_array_equal(np.broadcast_to(stats, scales.shape), scales)
  rows = encode(codec, x, np.asarray(laws.KEY), inline=False)
  np.testing.assert_array_equal(payload.rows, rows)
  # The unshared codec says the same; only a zero's sign is lost in an integer.
  np.testing.assert_array_equal(laws.round_trip(codec, x), laws.round_trip(plain, x))

  other = encoder(jnp.asarray(x[::-1].copy()), 2 * stats)
  both = np.stack([payload.rows, other.rows])
  added = np.asarray(jax.jit(codec.codes)(jnp.asarray(both))).sum(axis=0)
  sums = sum(qsgd.integers(rows, added.size, **shape) for rows in both)
  np.testing.assert_array_equal(added.ravel(), sums)
  values = np.asarray(jax.jit(codec.from_codes)(jnp.asarray(added), stats)).ravel()
  expected = qsgd.decode_sums(sums, scales, **shape)
  np.testing.assert_array_equal(values.view(np.uint32), expected.view(np.uint32))
