"""The bytes that explain reads from a trace are those of arithmetic by hand."""

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
from gradcomp.exchange import Hierarchical
from tests.errors import table
from tests.support import modes
from tests.support.assertions import assert_same_bits


def like(**shapes):
  return {name: jax.ShapeDtypeStruct(x, jnp.float32) for name, x in shapes.items()}


PARAMS = like(b=(512,), w=(512, 512))
ROW = 4 * (512 + 8)  # bytes of 512 words and 8 scales, for 4096 elements at 4 bits
TWO = ("host", "chip")
MESH = {"host": 2, "chip": 4}
OVER_TWO = gradcomp.qsgd(axis_name=TWO, exchange="hierarchical")
of = lambda tx, workers: gradcomp.explain(tx, PARAMS, workers=workers)


def explain(workers, params=PARAMS, wrap=lambda tx: tx, **options):
  tx = wrap(gradcomp.qsgd(bits=4, axis_name="data", **options))
  return gradcomp.explain(optax.chain(tx, optax.adam(1e-3)), params, workers=workers)


def test_bytes_of_each_leaf_by_hand():
  """64 rows of w, 16 a worker; 4 rows of 128 floats of b, one a worker."""
  explanation = explain(workers=4)
  b, w = explanation.leaves
  assert (b.path, b.codec, b.exchange) == ("['b']", Dense(), "two_shot")
  assert (w.path, w.codec, w.exchange) == ("['w']", QSGD(bits=4), "two_shot")
  assert (b.bytes_sent, w.bytes_sent) == (2 * 3 * 512, 2 * 3 * 16 * ROW)
  sent = 2 * 3 * (512 + 16 * ROW)
  assert explanation.bytes_sent == explanation.bytes_received == sent
  assert explanation.ratio == sent / (2 * 3 * (512 + 512 * 512) * 4 / 4)
  # Few workers gather.
  one, two = explain(workers=1), explain(workers=2)
  assert (one.bytes_sent, one.ratio, two.bytes_sent) == (0, 1.0, 2048 + 64 * ROW)
  # 65 rows among 4 workers are 4 shares of 17.
  (leaf,) = explain(workers=4, params=like(w=(65 * 4096,))).leaves
  assert leaf.bytes_sent == 2 * 3 * 17 * ROW
  # Leaves of a plain mean are not filled up.
  sizes = dict(a=(3,), b=(64,), c=(1000,))
  dense = gradcomp.explain(gradcomp.dense(), like(**sizes), workers=4).leaves
  assert [x.bytes_sent for x in dense] == [Fraction(6 * n) for (n,) in sizes.values()]


def test_shared_scales_take_the_cheaper_of_two_exact_sums():
  """At 4 workers, sums of 2-bit codes need 4 bits, or 8 as integers that are added."""
  (leaf,) = explain(workers=4, params=like(w=(2**20,)), share_scale=True).leaves
  assert leaf.exchange == "two_shot"
  rows, stats = 2**20 // 4096, Fraction(2 * 3, 4) * 4 * 2**20 // 512
  # 57 sums need 6 bits: 5 buckets of 512 share 512 words.
  sums = -(-rows // 4 * 8 // 5) * 2048
  assert leaf.bytes_sent == 3 * (rows // 4 * 2048 + sums) + stats


def test_each_axis_has_its_own_size():
  """In a mesh of two axes: each exchange is what it is alone, with its own workers."""
  make = functools.partial(gradcomp.qsgd, exchange="two_shot")
  chip, host = make(axis_name="chip"), make(axis_name="host")
  found, each = of(optax.chain(chip, host), MESH), [of(chip, n) for n in (4, 2)]
  assert found.workers == 8
  assert found.bytes_sent == sum(x.bytes_sent for x in each)
  got, alone = found.leaves, each[0].leaves + each[1].leaves
  for name in ("path", "bytes_sent", "work"):
    assert [getattr(x, name) for x in got] == [getattr(x, name) for x in alone]
  # Chips are neighbors. Bytes between hosts cross the whole row of workers.
  assert [(x.workers, x.span) for x in found.collectives] == [(4, 4)] * 2 + [(2, 8)] * 2
  assert found.ratio == found.bytes_sent / of(gradcomp.dense(), 8).bytes_sent
  for axis, span in (("host", 8), ("chip", 4)):
    found = of(gradcomp.qsgd(axis_name=axis, exchange="ring"), MESH).collectives
    assert {x.span for x in found if x.kind == "collective-permute"} == {span}


def test_names_are_another_way_to_say_the_sizes():
  assert of(OVER_TWO, MESH) == of(OVER_TWO, (2, 4))
  turned = dict(reversed(MESH.items()))
  assert of(OVER_TWO, turned).leaves == of(OVER_TWO, (2, 4)).leaves
  three = {"data": 2, "host": 2, "chip": 2}
  ways = ((None, three), (tuple(three), three), ("data", 8), (None, 8), (TWO, (2, 4)))
  (sent,) = {of(gradcomp.qsgd(axis_name=x), n).bytes_sent for x, n in ways}
  # A chain has the bytes of all; one takes its axes from types that are not there yet.
  chained = optax.chain(*(gradcomp.qsgd(axis_name=x) for x in ("data", TWO, None)))
  assert [of(chained, n).bytes_sent for n in (8, (2, 4))] == [3 * sent] * 2 != [0] * 2


BOTH = optax.chain(gradcomp.dense(axis_name="chip"), gradcomp.dense(axis_name="host"))
IN_FOURS = gradcomp.qsgd(axis_name="data", exchange=Hierarchical(group_size=4))
ROWS = """
of(BOTH, {"chip": 4}) -> `workers` ... each axis ... over 'host' ... add its size
of(OVER_TWO, 8) -> `workers` must be the sizes of both axes
of(IN_FOURS, 6) -> `group_size` must divide the 6 workers
"""
test_workers_that_do_not_fit = table.refused(ROWS, globals())


def test_a_fit_is_not_a_part_of_a_leaf():
  """It all-reduces 32-bit counts, of one leaf here."""
  codec = QSGD(bits=4, levels="nonuniform")
  bound = codec.bind(gradcomp.codecs.Leaf(()))
  counts = jax.eval_shape(bound.measure, PARAMS["w"]).size
  explanation = of(gradcomp.compress(codec, axis_name="data"), 4)
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

  init = lambda params: (jnp.zeros([], jnp.int32), tx.init(params))
  return optax.GradientTransformation(init, update)


def test_of_branches_the_last_that_sends_something_is_shown():
  assert explain(4, wrap=every_other).leaves == explain(4).leaves
  dense, last = gradcomp.dense(axis_name="data"), gradcomp.qsgd(axis_name="data")
  alone = of(last, 4)
  found = of(gradcomp.wrappers.switch([10], [dense, last]), 4)
  assert found.leaves == alone.leaves
  assert all(x.in_branch for x in found.collectives)
  out = (dataclasses.replace(x, branches=()) for x in found.collectives)
  assert alone.collectives == tuple(out)


def test_slots_that_were_used_are_found_behind_branches():
  """Two sparse transformations, one in a branch, each with a state of its own."""
  options = dict(axis_name="data", exchange="all_gather", min_leaf_size=0)
  sparse = functools.partial(gradcomp.redsync, **options)
  switched = gradcomp.wrappers.switch([1], [sparse(0.5)] * 2)
  params = {name: jnp.zeros((64, 64)) for name in "vw"}
  labels = {"v": "v", "w": "w"}
  tx = optax.partition({"v": every_other(sparse(0.01)), "w": switched}, labels)
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
  mesh, found = modes.mesh(2, AxisType.Explicit), []
  traced = lambda x: found.append(explain(workers=8)) or x
  with jax.set_mesh(mesh):
    traced(0)
    for check_vma in (True, False):
      specs = dict(in_specs=P(), out_specs=P(), check_vma=check_vma)
      jax.make_jaxpr(jax.shard_map(traced, mesh=mesh, **specs))(1.0)
  assert found == [explain(workers=8)] * 3


def test_nothing_runs_otherwise_for_it():
  """Neither after an error inside nor behind a jit, whose trace is not that of it."""
  tx = gradcomp.qsgd(bits=4, rounding="nearest")
  jitted = optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update))
  grads = {"w": jnp.linspace(-1.0, 1.0, 4096)}
  fails = optax.stateless(lambda updates, params: 1 / 0)
  before = tx.update(grads, tx.init(grads))
  for _ in range(2):
    with pytest.raises(ZeroDivisionError):
      gradcomp.explain(optax.chain(tx, fails), grads, workers=4)
    assert len(gradcomp.explain(jitted, grads, workers=4).leaves) == 1
    output, _ = jitted.update(grads, jitted.init(grads))
    assert (output["w"] != grads["w"]).any()
  assert_same_bits(tx.update(grads, tx.init(grads)), before)


def test_hierarchical_over_two_axes():
  """2 hosts of 4 chips: 64 rows are 8 shares of 8, and 4 rows 8 shares of one."""
  explanation = of(OVER_TWO, (2, 4))
  b, w = explanation.leaves
  dense, inside = 3 * 2 * 8 * 4096 * 4, 3 * 2 * 8 * ROW
  assert w.bytes_sent == dense + 1 * 8 * ROW + 7 * 8 * ROW
  assert b.bytes_sent == (3 * 2 + 1 + 7) * 512
  assert explanation.bytes_sent == w.bytes_sent + b.bytes_sent
  assert explanation.bytes_inside == dense + inside + 2 * 3 * 2 * 512
  between = 2 * 8 * ROW + 2 * 512
  assert explanation.bytes_between == between
  ratio = between / (2 * (2 - 1) / 2 * 4 * (b.elements + w.elements) / 4)
  assert explanation.ratio_between == ratio
  assert f"{between:,} of them go between groups, {ratio:.4g} x" in str(explanation)


def test_transformations_inside_others():
  """Only what a gradcomp transformation is given is in the table, each time."""
  paths = lambda wrap: [leaf.path for leaf in explain(4, wrap=wrap).leaves]
  assert paths(lambda tx: optax.masked(tx, {"b": False, "w": True})) == ["['w']"]
  every = lambda tx: optax.MultiSteps(tx, 2).gradient_transformation()
  assert paths(every) == ["['b']", "['w']"]
  assert paths(lambda tx: optax.chain(tx, gradcomp.qsgd())) == ["['b']", "['w']"] * 2
  none = of(optax.sgd(0.1), 4)
  assert none.leaves == () and none.bytes_sent == 0 and none.ratio == 1.0
  assert explain(4, params={}).leaves == ()


def test_table_and_messages():
  assert [x.message for x in explain(workers=4, message_bytes=1000).leaves] == [0, 1]
  lines = str(explain(workers=4)).splitlines()
  header = "leaf shape codec bits exchange message sent /f32 /bf16"
  assert lines[0].split() == header.split()
  assert lines[2].split()[-6:] == "4.062 two_shot 0 199,680 0.127 0.2539".split()
  first, second, owner = lines[-3:]
  assert first == "Bytes that each of 4 workers sends a step. It receives as many."
  assert second == "two_shot: it sends 2/N of all_gather's bytes."
  assert owner.startswith("An owner keeps what encoding a mean loses, 262,144 bytes")
