"""Leaves share messages, and groups that add in pieces have the bits of the whole."""

import jax
import jax.numpy as jnp
import pytest

import gradcomp
from gradcomp._src.core.compression import Compression
from gradcomp._src.exchange import hierarchical
from gradcomp._src.exchange.schedules import AllReduce
from gradcomp._src.mesh.types import Place
from gradcomp.codecs import QSGD, Dense, FloatCast
from gradcomp.exchange import AllGather, TwoShot
from tests.support import laws, modes
from tests.support.assertions import assert_same_bits

WORKERS = 4
CODEC = QSGD(bits=4, bucket_size=32)


def plan(sizes, codec=CODEC, others=None, **options):
  leaves = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes]
  options = dict(exchange=TwoShot(), min_leaf_size=0, message_bytes=None) | options
  others = [()] * len(sizes) if others is None else others
  place = Place("data", WORKERS, others=others)
  return Compression(codec, **options).plan(leaves, place).messages


def test_leaves_share_a_message_up_to_its_bytes():
  """Four rows of 32 words and 8 scales are 640 bytes; a leaf is never cut."""
  four_rows = [4 * CODEC.tile_size] * 5
  assert [m.leaves for m in plan(four_rows)] == [(0, 1, 2, 3, 4)]
  two = plan(four_rows, message_bytes=1280)
  assert [m.leaves for m in two] == [(0, 1), (2, 3), (4,)]
  assert all(m.layout.nbytes <= 1280 for m in two)
  each = plan(four_rows, message_bytes=0)
  assert [m.leaves for m in each] == [(0,), (1,), (2,), (3,), (4,)]


def test_a_message_has_one_type_and_dense_leaves_travel_apart_from_sums():
  messages = plan([1024] * 3, others=[(), ("model",), ()])
  assert [(m.leaves, m.others) for m in messages] == [((0, 2), ()), ((1,), ("model",))]
  shared = QSGD(bits=4, bucket_size=32, share_scale=True)
  messages = plan([8, 2048], shared, exchange=AllReduce(), min_leaf_size=100)
  assert [m.leaves for m in messages] == [(0,), (1,)]
  assert [m.exchange for m in messages] == [AllGather(), AllReduce()]
  assert messages[0].layout.codecs == (Dense(),)


@pytest.mark.parametrize(
  "codec, names",
  [(CODEC, "abcd"), (CODEC, "e"), (FloatCast(accumulate="kahan"), "abcd")],
  ids=str,
)
def test_groups_that_add_piece_by_piece_have_the_bits_of_the_whole(
  codec, names, monkeypatch
):
  """Shares of several rows, zeros behind the last, in pieces of unequal length."""
  shapes = {"a": (70, 71), "b": (3,), "c": (33, 40), "d": (0,), "e": (90, 70)}
  shapes = {name: shapes[name] for name in names}
  steps = [laws.tree(shapes, WORKERS, seed=i) for i in range(2)]
  asked = []

  def run(pieces):
    patched = lambda _, share: asked.append(share) or pieces
    monkeypatch.setattr(hierarchical, "pieces_of", patched)
    jax.clear_caches()  # an equal update would not be traced again
    return modes.run("vmap", laws.compressed(codec, "hierarchical", "error"), steps)

  assert_same_bits(run(1), run(3))
  assert len(asked) == 2  # both were traced
  assert asked[0] > 3
  assert asked[0] % 3


@pytest.mark.parametrize("elements, pieces", [(2**21 - 1, 1), (2**21, 2), (2**25, 8)])
def test_groups_add_large_messages_piece_by_piece(elements, pieces):
  """Each piece is a permute inside groups of two. A small leaf does not have rows."""
  like = [jax.ShapeDtypeStruct((n,), jnp.float32) for n in (elements - 8, 8)]
  tx = laws.compressed(CODEC, "hierarchical")
  found = gradcomp.explain(tx, like, workers=WORKERS).collectives
  permutes = [x for x in found if x.kind == "collective-permute"]
  assert len(permutes) == pieces + 1  # one is between groups
  sent = sum(x.bytes_in for x in permutes[:-1])
  assert 0 <= sent - 4 * elements / 2 < 4 * 4 * CODEC.tile_size
