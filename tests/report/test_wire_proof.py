"""What crosses the wire is what the codec says, read from traces and optimized HLO.

The laws of the table compare the bytes of all compiled rows with those of `explain`.
"""

import jax
import jax.numpy as jnp
import pytest

import gradcomp
from gradcomp._src.exchange.layout import plan_rows
from gradcomp._src.transforms.low_rank import PowerSGD
from gradcomp.codecs import QSGD, Dense, FloatCast, RandomK
from tests.plugins.slow_cases import slow
from tests.support import laws, modes
from tests.table import run as table

SHAPES = {"w": (512, 512), "b": (512,), "v": (3, 3, 64, 128), "c": (100, 37)}
LIKE = laws.tree(SHAPES)


def sent(tx):
  """The collectives of an update by eight workers."""
  return modes.collectives(tx, LIKE, laws.tree(SHAPES, 8))


OTHERS = slow(QSGD(bits=2, bucket_size=128), Dense(dtype=jnp.bfloat16))


@pytest.mark.parametrize("codec", [QSGD(bits=4), *OTHERS])
def test_two_shot_sends_two_stages_of_words_in_place_of_a_plain_mean(codec):
  """2 (N-1)/N c bytes, one u32 message a stage."""
  found = sent(gradcomp.compress(codec, axis_name="data", exchange="two_shot"))
  layout = plan_rows(jax.tree.leaves(LIKE), codec)
  rows = zip(layout.codecs, layout.rows, strict=True)
  stage = sum(4 * codec.row_words * (n + -n % 8) for codec, n in rows) * 7 // 8
  expected = [(kind, "u32", stage) for kind in ("all-gather", "all-to-all")]
  assert sorted((c.kind, c.dtype, c.bytes_sent) for c in found) == expected
  plain = sum(c.bytes_sent for c in sent(gradcomp.dense(axis_name="data")))
  elements = sum(x.size for x in LIKE.values())
  assert sum(c.dense_bytes for c in found) == plain == 2 * 4 * elements * 7 // 8


def test_all_gather_sends_one_message_of_words():
  codec = QSGD(bits=4)
  tx = gradcomp.compress(codec, axis_name="data", exchange="all_gather")
  (gather,) = sent(tx)
  assert (gather.kind, gather.dtype) == ("all-gather", "u32")
  nbytes = plan_rows(jax.tree.leaves(LIKE), codec).nbytes
  lanes = -(-nbytes // 512)  # the line is long enough to be cut into lanes
  assert gather.bytes_sent == 7 * 512 * lanes
  assert 512 * lanes < 1.01 * nbytes


# A plain run has one setting of each type of codec.
NAMES = {type(x.codec): name for name, x in reversed(laws.SETTINGS.items())}.values()


@pytest.mark.parametrize("name", [*NAMES, *slow(*sorted({*laws.SETTINGS} - {*NAMES}))])
def test_words_are_sent_and_integers_are_added(name):
  """Beside words, patterns of shared scales are s32, and shared exponents u8."""
  codec = laws.SETTINGS[name].codec
  shared = "u8" if isinstance(codec, FloatCast) else "s32"
  for exchange in ("all_gather", "two_shot", "ring", "hierarchical", "psum"):
    row = table.Row(name, exchange, "none", "vmap", 4)
    if row.allowed:
      found = gradcomp.explain(row.transformation(), LIKE, workers=4).collectives
      dtypes = {x.dtype for x in found} - {"u32", shared}
      assert bool(dtypes) == (exchange == "psum")
      assert dtypes <= {"s8", "s16"} or isinstance(codec, Dense | RandomK | PowerSGD)


@pytest.fixture
def names_in_cache_keys():
  """Lets no compiled program of a cache stand for one with other names of scopes."""
  option = "jax_compilation_cache_include_metadata_in_key"
  before = getattr(jax.config, option)
  jax.config.update(option, True)
  yield
  jax.config.update(option, before)


@pytest.mark.usefixtures("names_in_cache_keys")
def test_factors_stand_for_their_leaves():
  """A message of factors is one mean of its leaves, however XLA combines its sums."""
  workers, tx = 4, gradcomp.powersgd(rank=2, axis_name="data")
  like = {"w": (64, 96), "v": (64, 96), "b": (96,)}  # XLA adds b with left factors
  own = laws.tree(like)
  found = modes.collectives(tx, own, laws.tree(like, workers))
  elements = sum(x.size for x in own.values())
  dense = sum(x.times * x.dense_bytes for x in found)
  assert dense == 8 * elements * (workers - 1) // workers
  explained = gradcomp.explain(tx, own, workers=workers)
  assert sum(x.times * x.bytes_sent for x in found) == explained.bytes_sent
