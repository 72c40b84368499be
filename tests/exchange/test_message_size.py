"""``message_bytes="auto"``: whole leaves, last first, in sizes that obey one rule."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp._src.core import compression
from gradcomp._src.exchange import collectives, plan
from gradcomp._src.exchange.plan import automatic_bytes, cut
from gradcomp._src.mesh.study import platform
from gradcomp.codecs import QSGD, Dense
from gradcomp.exchange import TwoShot
from tests.plugins.slow_cases import slow
from tests.support import laws, modes
from tests.support.assertions import assert_same_bits

MIB = 2**20


def paths_of(tree):
  return [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def pieces(sizes, workers, message_bytes="auto"):
  paths = paths_of([0] * len(sizes))
  return cut(message_bytes, dict(enumerate(sizes)), paths, workers)


def test_the_rule_by_hand():
  assert automatic_bytes(100, 2) == 4 * MIB  # the least
  assert automatic_bytes(64 * MIB, 32) == 4 * MIB  # where all three are equal
  assert automatic_bytes(64 * MIB, 33) == 33 * 128 * 2**10  # workers
  assert automatic_bytes(64 * MIB + 1, 32) == 4 * MIB + 1  # the payload
  assert automatic_bytes(2**40, 8192) == 2**36


def test_messages_partition_the_leaves_from_the_last_one_in_sizes_of_the_rule():
  """Random sizes, of which some are far above the limit, and many far below it."""
  rng = np.random.default_rng(0)
  for _ in range(200):
    count = int(rng.integers(1, 60))
    sizes = [int(x) for x in np.exp(rng.uniform(0, np.log(64 * MIB), count))]
    workers = int(rng.integers(2, 300))
    found = pieces(sizes, workers)
    assert list(itertools.chain(*found)) == list(range(count))
    limit = automatic_bytes(sum(sizes), workers)
    assert len(found) <= 17
    for number, leaves in enumerate(found):
      held = sum(sizes[i] for i in leaves)
      assert held >= limit or (number == 0 and (4 * held >= limit or len(found) == 1))
      # Without its first leaf, which was the last to enter, it was not full. But a rest
      # of less than a quarter may have joined the first message.
      most = 1.25 * limit + max(sizes) if number == 0 else limit
      assert held - sizes[leaves[0]] < most


def test_a_payload_up_to_the_limit_is_one_message_in_the_order_of_the_tree():
  """A small rest joins the message beside it: the first leaves, which come last."""
  assert pieces([MIB] * 4, 2) == [[0, 1, 2, 3]] == pieces([MIB] * 4, 2, None)
  assert pieces([MIB] * 8, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
  assert pieces([MIB] * 8, 64) == [list(range(8))]
  assert pieces([MIB - 1, 4 * MIB, 4 * MIB], 2) == [[0, 1], [2]]
  assert pieces([MIB, 4 * MIB, 4 * MIB], 2) == [[0], [1], [2]]


def test_numbers_in_names_count_as_numbers():
  """``Dense_10`` comes after ``Dense_9``; other nodes keep the order of the tree.

  The kind of a key and equal numbers do not matter: fields have the order of keys, as
  flax.nnx has one or the other.
  """
  paths = paths_of(({f"Dense_{i}": 0 for i in range(12)}, [0] * 4))
  found = cut("auto", dict.fromkeys(range(16), 4 * MIB), paths, 2)
  order = [jax.tree_util.keystr(paths[i], simple=True) for (i,) in found]
  assert order == [f"0Dense_{i}" for i in range(12)] + [f"1{i}" for i in range(4)]
  names = [f"layer_{i}" for i in (1, 10, 2, 9)]
  sizes = dict.fromkeys(range(4), 4 * MIB)
  kinds = jax.tree_util.DictKey, jax.tree_util.GetAttrKey
  orders = [cut("auto", sizes, [(kind(x),) for x in names], 2) for kind in kinds]
  assert orders[0] == orders[1]
  assert sorted(orders[0]) == [[0], [1], [2], [3]] != orders[0]
  mixed = paths_of({"w1": 0, "w01": {"j": 0, "k": 0}, "w2": 0})
  assert sorted(cut("auto", sizes, mixed, 2)) == [[0], [1], [2], [3]]


PARAMS = {f"w{i}": jax.ShapeDtypeStruct((4 * MIB,), jnp.float32) for i in range(6)}


def messages(platform, workers=4, **options):
  """The number of each leaf's message."""
  tx = gradcomp.qsgd(bits=4, axis_name="data", **{"exchange": "two_shot"} | options)
  found = gradcomp.explain(tx, PARAMS, workers=workers, platform=platform)
  return [leaf.message for leaf in found.leaves]


def test_nothing_is_cut_where_nothing_can_hide():
  """A leaf has 2 MiB of codes, and their scales."""
  for other in ("tpu", "gpu"):
    assert messages(other) == [0, 0, 1, 1, 2, 2]
  whole = [0] * 6
  assert messages("cpu") == whole
  assert messages("cpu", message_bytes=1) == [*range(6)]
  assert messages("tpu", workers=1) == whole
  assert messages("tpu", exchange="local") == whole
  assert messages("tpu", message_bytes=None) == whole


def test_the_platform_is_that_of_the_mesh():
  """A program for TPUs that are not here is planned for them, in ``explain`` too."""
  assert platform() == jax.default_backend() == "cpu"
  device = jax.sharding.AbstractDevice("TPU v5 lite", 1, "tpu")
  mesh = jax.sharding.AbstractMesh((4,), ("data",), abstract_device=device)
  tx = gradcomp.qsgd(bits=4, axis_name="data")
  explain = functools.partial(gradcomp.explain, tx, PARAMS, workers=4)
  assert explain().messages == 1
  with jax.sharding.use_abstract_mesh(mesh):
    assert platform() == "tpu"
    found = explain()
  assert explain().messages == 1
  assert explain(platform="tpu") == found
  assert found.messages == 3
  assert found.bytes_sent == explain().bytes_sent  # there is nothing to fill up
  # The last message goes first, in two stages.
  assert [x.message for x in found.collectives] == [2, 2, 1, 1, 0, 0]
  assert "3 messages; the last goes first. 0 bytes" in str(found)


@pytest.fixture
def cut_small(monkeypatch):
  """Makes ``"auto"`` cut small leaves into several messages, on CPUs too."""
  monkeypatch.setattr(compression.study, "platform", lambda: "tpu")
  monkeypatch.setattr(plan, "automatic_bytes", lambda payload, workers: 300)


def four_bits(exchange="two_shot", feedback="error", **options):
  codec = QSGD(bits=4, bucket_size=32)
  return laws.compressed(codec, exchange, feedback, min_leaf_size=0, **options)


@pytest.mark.bits
@pytest.mark.parametrize("exchange", ["two_shot", TwoShot(in_turn=True)])
def test_messages_have_the_bits_of_one(exchange, cut_small):
  """Rows are encoded to nearest by their owners, whoever these are."""
  shapes = {"a": (33, 40), "b": (7,), "c": (50, 41)}
  steps = [laws.tree(shapes, 4, seed=i) for i in range(2)]
  like = {x: jax.ShapeDtypeStruct(y, jnp.float32) for x, y in shapes.items()}
  auto, one = four_bits(exchange), four_bits(exchange, message_bytes=None)
  assert gradcomp.explain(auto, like, workers=4).messages == 2
  assert_same_bits(*(modes.run("vmap", tx, steps) for tx in (auto, one)))


def test_the_program_sends_what_is_explained(cut_small):
  """Ten rows and seven, in place of 17, are filled up to twelve and eight."""
  like = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in (2560, 1792)]
  tx, row = four_bits(feedback=None), 160
  found = gradcomp.explain(tx, like, workers=4)
  assert found.messages == 2
  assert found.bytes_sent == 2 * 3 / 4 * (12 + 8) * row
  assert found.bytes_filling == 2 * 3 / 4 * (2 + 1) * row
  lowered = modes.traced(tx, like, 4).lower()
  assert gradcomp.wire_report(lowered).bytes_sent == found.bytes_sent


def barriers(platform, exchange):
  """The waits in a program of three messages."""
  # Kernels have barriers of their own.
  codec = QSGD(bits=4, bucket_size=32, implementation="xla")
  codec = Dense(dtype=jnp.float32) if exchange == "psum" else codec
  tx = gradcomp.compress(codec, exchange=exchange, min_leaf_size=0, axis_name="data")
  like = [jax.ShapeDtypeStruct((2560,), jnp.float32)] * 3
  text = modes.traced(tx, like, 4).lower(lowering_platforms=(platform,)).as_text()
  stage = "reduce" if exchange == "psum" else "gather"
  assert text.count(f"stablehlo.all_{stage}") == 3
  return text.count("stablehlo.optimization_barrier")


@pytest.mark.parametrize("exchange", ["two_shot", "psum", *slow("all_gather", "ring")])
def test_a_gpu_ends_one_message_after_the_other(exchange, cut_small, monkeypatch):
  """So that XLA:GPU cannot join the last stages; elsewhere none waits for another."""
  platforms = "cuda", "tpu", "cpu"
  found = [barriers(x, exchange) for x in platforms]
  monkeypatch.setattr(collectives, "in_turn", lambda arrays, before: list(arrays))
  jax.clear_caches()
  others = [barriers(x, exchange) for x in platforms]  # of decoders for TPUs
  assert np.subtract(found, others).tolist() == [2, 0, 0]


def test_a_message_waits_for_the_one_before_it_if_asked(cut_small):
  """Each needs the line that the one before it brought."""
  counts = [barriers("tpu", TwoShot(in_turn=x)) for x in (False, True)]
  assert counts[1] - counts[0] == 2
