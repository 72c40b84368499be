"""The bytes that explain reads from a trace are those of arithmetic by hand.

test_wire_proof.py compares them with the optimized HLO.
"""

import dataclasses
import functools
import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import QSGD, Dense
from tests.support import modes
from tests.support.assertions import assert_same_bits, says

PARAMS = {
  "b": jax.ShapeDtypeStruct((512,), jnp.float32),
  "w": jax.ShapeDtypeStruct((512, 512), jnp.float32),
}
ROW = 4 * (512 + 8)  # bytes of 512 words and 8 scales, for 4096 elements at 4 bits


def explain(workers, params=PARAMS, wrap=lambda tx: tx, **options):
  tx = wrap(gradcomp.qsgd(bits=4, axis_name="data", **options))
  return gradcomp.explain(optax.chain(tx, optax.adam(1e-3)), params, workers=workers)


def test_bytes_of_each_leaf_by_hand():
  """64 rows of w, 16 a worker; 4 rows of 128 floats of b, one a worker."""
  b, w = explain(workers=4).leaves
  assert (b.path, b.codec, b.exchange) == ("['b']", Dense(), "two_shot")
  assert (w.path, w.codec, w.exchange) == ("['w']", QSGD(bits=4), "two_shot")
  assert b.bytes_sent == 2 * 3 * 512
  assert w.bytes_sent == 2 * 3 * 16 * ROW
  explanation = explain(workers=4)
  assert (
    explanation.bytes_sent == explanation.bytes_received == 2 * 3 * (512 + 16 * ROW)
  )
  plain = 2 * 3 * (512 + 512 * 512) * 4 / 4
  assert explanation.ratio == explanation.bytes_sent / plain
  # 65 rows among 4 workers are 4 shares of 17.
  params = {"w": jax.ShapeDtypeStruct((65 * 4096,), jnp.float32)}
  (leaf,) = explain(workers=4, params=params).leaves
  assert leaf.bytes_sent == 2 * 3 * 17 * ROW


@pytest.mark.parametrize(
  "workers, exchange, sent",
  [(1, "all_gather", 0), (2, "all_gather", 2048 + 64 * ROW), (8, "two_shot", None)],
)
def test_auto(workers, exchange, sent):
  explanation = explain(workers=workers)
  assert {leaf.exchange for leaf in explanation.leaves} == {exchange}
  assert sent is None or explanation.bytes_sent == sent
  if workers == 1:
    assert explanation.ratio == 1.0


def test_shared_scales_take_the_cheaper_of_two_exact_sums():
  """At 4 workers, sums of 2-bit codes need 4 bits, or 8 as integers that are added."""
  params = {"w": jax.ShapeDtypeStruct((2**20,), jnp.float32)}
  options = dict(params=params, share_scale=True)
  (leaf,) = explain(workers=4, **options).leaves
  assert leaf.exchange == "two_shot"
  rows, stats = 2**20 // 4096, Fraction(2 * 3, 4) * 4 * 2**20 // 512
  # 57 sums need 6 bits: 5 buckets of 512 share 512 words.
  sums = -(-rows // 4 * 8 // 5) * 2048
  assert leaf.bytes_sent == 3 * (rows // 4 * 2048 + sums) + stats


def test_leaves_of_a_plain_mean_have_bytes_of_their_own():
  """No rows are filled up there: the ratio is 1 for each."""
  sizes = {"a": 3, "b": 64, "c": 1000}
  like = {name: jax.ShapeDtypeStruct((n,), jnp.float32) for name, n in sizes.items()}
  explanation = gradcomp.explain(gradcomp.dense(axis_name="data"), like, workers=4)
  assert [leaf.bytes_sent for leaf in explanation.leaves] == [
    Fraction(2 * 3, 4) * 4 * n for n in sizes.values()
  ]


def test_each_transformation_has_its_own_axes():
  """All are of as many workers; one takes them from types that are not there yet."""
  axes = ("data", ("host", "chip"), None)
  chained = optax.chain(*(gradcomp.qsgd(bits=4, axis_name=name) for name in axes))
  sent = explain(workers=8).bytes_sent
  for workers in (8, (2, 4)):
    assert gradcomp.explain(chained, PARAMS, workers=workers).bytes_sent == 3 * sent


def test_each_axis_has_its_own_size():
  """In a mesh of two axes: each exchange is what it is alone, with its own workers."""
  axes = {"host": 2, "chip": 4}
  make = functools.partial(gradcomp.qsgd, exchange="two_shot")
  chip, host = make(axis_name="chip"), make(axis_name="host")
  found = gradcomp.explain(optax.chain(chip, host), PARAMS, workers=axes)
  each = [gradcomp.explain(chip, PARAMS, workers=n) for n in (4, 2)]
  assert found.workers == 8
  assert found.bytes_sent == sum(x.bytes_sent for x in each)
  got, alone = found.leaves, each[0].leaves + each[1].leaves
  for name in ("path", "bytes_sent", "work"):
    assert [getattr(x, name) for x in got] == [getattr(x, name) for x in alone]
  # Chips are neighbors. Bytes between hosts cross the whole row of workers.
  assert [(x.workers, x.span) for x in found.collectives] == [(4, 4)] * 2 + [(2, 8)] * 2
  plain = gradcomp.explain(gradcomp.dense(), PARAMS, workers=8)
  assert found.ratio == found.bytes_sent / plain.bytes_sent


def test_names_are_another_way_to_say_the_sizes():
  over_two = gradcomp.qsgd(axis_name=("host", "chip"), exchange="hierarchical")
  explain = functools.partial(gradcomp.explain, over_two, PARAMS)
  assert explain(workers={"host": 2, "chip": 4}) == explain(workers=(2, 4))
  assert (
    explain(workers={"chip": 4, "host": 2}).leaves == explain(workers=(2, 4)).leaves
  )
  for name in ("data", None):
    tx = gradcomp.qsgd(axis_name=name)
    named = gradcomp.explain(tx, PARAMS, workers={"data": 4})
    assert named == gradcomp.explain(tx, PARAMS, workers=4)
  three = {"data": 2, "host": 2, "chip": 2}
  (sent,) = {
    gradcomp.explain(gradcomp.qsgd(axis_name=name), PARAMS, workers=workers).bytes_sent
    for name, workers in ((None, three), (tuple(three), three), ("data", 8))
  }
  assert sent > 0


def test_permutations_between_hosts_cross_the_row_of_workers():
  ring = functools.partial(gradcomp.qsgd, exchange="ring")
  spans = lambda tx: {
    x.span
    for x in gradcomp.explain(tx, PARAMS, workers={"host": 2, "chip": 4}).collectives
    if x.kind == "collective-permute"
  }
  assert spans(ring(axis_name="host")) == {8}
  assert spans(ring(axis_name="chip")) == {4}


def test_an_axis_without_a_size_is_named():
  tx = optax.chain(gradcomp.dense(axis_name="chip"), gradcomp.dense(axis_name="host"))
  said = says("`workers`", "each axis", "{'chip': 4}", "over 'host'", "add its size")
  with pytest.raises(ValueError, match=said):
    gradcomp.explain(tx, PARAMS, workers={"chip": 4})


def test_a_fit_is_not_a_part_of_a_leaf():
  """It all-reduces 32-bit counts, of one leaf here."""
  codec = QSGD(bits=4, levels="nonuniform")
  counts = jax.eval_shape(codec.measure, PARAMS["w"]).size
  tx = gradcomp.compress(codec, axis_name="data")
  explanation = gradcomp.explain(tx, PARAMS, workers=4)
  assert explanation.bytes_fitting == Fraction(2 * 3, 4) * 4 * counts
  leaves = sum(leaf.bytes_sent for leaf in explanation.leaves)
  assert explanation.bytes_sent == leaves + explanation.bytes_fitting
  assert "only where levels are fitted" in str(explanation)


def every_other(tx):
  """Exchanges in odd steps alone: in the branch that is written first."""

  def update(updates, state, params=None):
    step, inner = state
    branches = [lambda u, s: tx.update(u, s, params), lambda u, s: (u, s)]
    updates, inner = jax.lax.switch((step + 1) % 2, branches, updates, inner)
    return updates, (step + 1, inner)

  return optax.GradientTransformation(
    lambda params: (jnp.zeros([], jnp.int32), tx.init(params)), update
  )


def test_of_branches_the_last_that_sends_something_is_shown():
  assert explain(4, wrap=every_other).leaves == explain(4).leaves
  dense, last = gradcomp.dense(axis_name="data"), gradcomp.qsgd(axis_name="data")
  switched = gradcomp.wrappers.switch([10], [dense, last])
  alone = gradcomp.explain(last, PARAMS, workers=4)
  found = gradcomp.explain(switched, PARAMS, workers=4)
  assert found.leaves == alone.leaves
  assert all(x.in_branch for x in found.collectives)
  assert alone.collectives == tuple(
    dataclasses.replace(x, branches=()) for x in found.collectives
  )


def test_slots_that_were_used_are_found_behind_branches():
  """Two sparse transformations, one in a branch, each with a state of its own."""
  sparse = functools.partial(
    gradcomp.redsync, axis_name="data", exchange="all_gather", min_leaf_size=0
  )
  both = {
    "v": every_other(sparse(0.01)),
    "w": gradcomp.wrappers.switch([1], [sparse(0.5)] * 2),
  }
  params = {name: jnp.zeros((64, 64)) for name in "vw"}
  tx = optax.partition(both, {"v": "v", "w": "w"})
  state = jax.vmap(tx.init, axis_name="data", axis_size=2, in_axes=None)(params)
  found = itertools.count(1)

  def sent(path, x):
    is_used = jax.tree_util.keystr(path).endswith(".used")
    return jnp.zeros(x.shape).at[:, 0].set(next(found)).ravel() if is_used else x

  state = jax.tree_util.tree_map_with_path(sent, state)
  leaves = gradcomp.explain(tx, params, workers=2, opt_state=state).leaves
  assert {leaf.path: leaf.used for leaf in leaves} == {"['v']": 1, "['w']": 2}


def test_inside_a_map_it_explains_other_workers():
  """The map's axis has the same name, and the mesh has other devices."""
  mesh = modes.mesh(2, AxisType.Explicit)
  found = []

  def traced(x):
    found.append(explain(workers=8))
    return x

  with jax.set_mesh(mesh):
    found.append(explain(workers=8))
    for check_vma in (True, False):
      specs = dict(in_specs=P(), out_specs=P(), check_vma=check_vma)
      jax.make_jaxpr(jax.shard_map(traced, mesh=mesh, **specs))(1.0)
  assert found == [explain(workers=8)] * 3


def test_workers_that_are_no_groups():
  over_two = gradcomp.qsgd(axis_name=("host", "chip"), exchange="hierarchical")
  with pytest.raises(ValueError, match="`workers` must be the sizes of both axes"):
    gradcomp.explain(over_two, PARAMS, workers=8)
  with pytest.raises(ValueError, match="`group_size` must divide the 6 workers"):
    explain(workers=6, exchange=gradcomp.exchange.Hierarchical(group_size=4))


def test_jit_inside_the_optimizer_keeps_no_trace():
  """Neither does explain see an old one, nor does an update after it."""
  tx = gradcomp.qsgd(bits=4, rounding="nearest")
  jitted = optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update))
  grads = {"w": jnp.linspace(-1.0, 1.0, 4096)}
  for _ in range(2):
    assert len(gradcomp.explain(jitted, grads, workers=4).leaves) == 1
    output, _ = jitted.update(grads, jitted.init(grads))
    assert (output["w"] != grads["w"]).any()


def test_hierarchical_over_two_axes():
  """2 hosts of 4 chips: 64 rows are 8 shares of 8, and 4 rows 8 shares of one."""
  tx = gradcomp.qsgd(axis_name=("host", "chip"), exchange="hierarchical")
  explanation = gradcomp.explain(tx, PARAMS, workers=(2, 4))
  b, w = explanation.leaves
  dense, inside = 3 * 2 * 8 * 4096 * 4, 3 * 2 * 8 * ROW
  assert w.bytes_sent == dense + 1 * 8 * ROW + 7 * 8 * ROW
  assert b.bytes_sent == (3 * 2 + 1 + 7) * 512
  assert explanation.bytes_sent == w.bytes_sent + b.bytes_sent
  assert explanation.bytes_inside == dense + inside + 2 * 3 * 2 * 512
  between = 2 * 8 * ROW + 2 * 512
  plain = 2 * (2 - 1) / 2 * 4 * (b.elements + w.elements) / 4
  assert explanation.bytes_between == between
  assert explanation.ratio_between == between / plain
  told = f"{between:,} of them go between groups, {between / plain:.4g} x those of a"
  assert told in str(explanation) and "stay inside groups" in str(explanation)


def test_transformations_inside_others():
  """Only what a gradcomp transformation is given is in the table, each time."""
  masked = explain(4, wrap=lambda tx: optax.masked(tx, {"b": False, "w": True}))
  assert [leaf.path for leaf in masked.leaves] == ["['w']"]
  every = explain(4, wrap=lambda tx: optax.MultiSteps(tx, 2).gradient_transformation())
  assert len(every.leaves) == 2
  other = gradcomp.qsgd(bits=2)
  twice = explain(4, wrap=lambda tx: optax.chain(tx, other))
  assert [leaf.path for leaf in twice.leaves] == ["['b']", "['w']"] * 2
  none = gradcomp.explain(optax.sgd(0.1), PARAMS, workers=4)
  assert none.leaves == () and none.bytes_sent == 0 and none.ratio == 1.0
  assert explain(4, params={}).leaves == ()


def test_nothing_runs_otherwise_while_it_is_asked():
  """The same transformation works before, after, and after an error inside."""
  tx = gradcomp.qsgd(bits=8, rounding="nearest")
  grads = {"w": jnp.linspace(-1.0, 1.0, 512)}
  before = tx.update(grads, tx.init(grads))
  fails = optax.stateless(lambda updates, params: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    gradcomp.explain(optax.chain(tx, fails), grads, workers=2)
  gradcomp.explain(tx, grads, workers=2)
  after = tx.update(grads, tx.init(grads))
  assert_same_bits(after, before)


def test_table_and_messages():
  messages = explain(workers=4, message_bytes=1000).leaves
  assert [leaf.message for leaf in messages] == [0, 1]
  lines = str(explain(workers=4)).splitlines()
  assert lines[0].split() == (
    "leaf shape codec bits exchange message sent /f32 /bf16".split()
  )
  assert lines[2].split()[-6:] == "4.062 two_shot 0 199,680 0.127 0.2539".split()
  assert lines[-3:] == [
    "Bytes that each of 4 workers sends a step. It receives as many.",
    "two_shot: it sends 2/N of all_gather's bytes.",
    "An owner keeps what encoding a mean loses, 262,144 bytes, if optimizer.init knows "
    "the workers.",
  ]
