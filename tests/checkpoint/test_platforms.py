"""A state goes on on another platform, where "auto" cuts other messages."""

import collections
import contextlib
import copy
import itertools
import json

import chex
import jax
import numpy as np
import optax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import gradcomp
from gradcomp._src.exchange import message_size
from gradcomp._src.mesh.platforms import planned_for
from gradcomp.codecs import QSGD, PowerSGD, RandomK
from gradcomp.local import LocalOptions, local_steps
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits, says
from tests.support.cases import recipe
from tests.support.cases import reshard as cases

EXCHANGES = ("auto", "all_gather", "two_shot", "psum", "ring", "hierarchical")


def made(name, exchange, **options):
  """The recipe with every leaf coded; None if it refuses the exchange."""
  exchange = modes.grouped(exchange)
  options = dict(axis_name="data", exchange=exchange, min_leaf_size=0) | options
  try:
    return recipe.make(name, **options)
  except (TypeError, ValueError):
    return None


RECIPES = {
  f"{name} {exchange} {feedback}": tx
  for name, exchange in itertools.product(recipe.RECIPES, EXCHANGES)
  for feedback in (None, "error")
  if (tx := made(name, exchange, feedback=feedback)) is not None
}
RECIPES["local steps"] = local_steps(
  optax.sgd(0.1),
  optax.sgd(0.5),
  axis_name="data",
  every=2,
  codec=QSGD(bits=4),
  options=LocalOptions(exchange="two_shot", feedback="error", min_leaf_size=0),
)
# One message, or each of its codecs on a way of its own.
RECIPES["mixed"] = gradcomp.policy(
  [("u", RandomK(density=0.1)), ("v", PowerSGD(rank=2)), (".*", QSGD(bits=4))],
  axis_name="data",
  feedback="error",
  min_leaf_size=0,
)
QUICK = (
  *("qsgd two_shot error", "topk two_shot error", "policy auto error"),
  *("terngrad psum None", "aps hierarchical error", "powersgd all_gather error"),
  *("qsgd ring error", "local steps", "mixed"),
)


@pytest.fixture(autouse=True)
def cut_small(monkeypatch):
  """Lets ``"auto"`` cut where it cuts large leaves: here each is a message."""
  monkeypatch.setattr(message_size, "automatic_bytes", lambda payload, workers: 1)


# Three leaves of many rows, and two that travel as they are.
LIKE = {"b": (7,), "one": (), "u": (64, 1024), "v": (3, 5, 4096), "w": (130, 1000)}
LIKE = {name: jax.ShapeDtypeStruct(x, np.float32) for name, x in LIKE.items()}


def first_shapes(tx, platform):
  """Returns the shapes of ``init`` under a mesh of devices that are not here."""
  device = AbstractDevice(platform, 1, platform)
  mesh = AbstractMesh((4,), ("data",), abstract_device=device)
  with use_abstract_mesh(mesh):
    return jax.eval_shape(tx.init, LIKE)


def recorded(tx, platform, params=cases.PARAMS):
  """As a file gives it back."""
  found = gradcomp.checkpoint.record(tx, params, workers=4, platform=platform)
  return json.loads(json.dumps(found))


def shapes(tx, platform, workers=4, params=cases.PARAMS):
  options = dict(axis_name="data", workers=workers, platform=platform)
  return gradcomp.checkpoint.state_shapes(tx, params, **options)


@pytest.mark.parametrize(
  "name", [*QUICK, *slow(*(x for x in RECIPES if x not in QUICK))]
)
def test_states_differ_in_what_their_records_say(name):
  """In the arrays of owners, and only there; and records without any are equal."""
  tx = RECIPES[name]
  found = {x: first_shapes(tx, x) for x in ("cpu", "tpu")}
  records = {x: recorded(tx, x, LIKE) for x in found}
  saved, here = copy.deepcopy([*records.values()])
  for platform, state in found.items():
    chex.assert_trees_all_equal_shapes_and_dtypes(
      shapes(tx, platform, params=LIKE), state
    )
    assert records[platform].pop("platform") == platform
  arrays = [
    {jax.tree_util.keystr(path): x for path, x in cases.leaves(state)}
    for state in found.values()
  ]
  differ = {
    path
    for path in {**arrays[0], **arrays[1]}
    if len({getattr(x.get(path), "shape", None) for x in arrays}) > 1
  }
  assert all("server_residual" in path for path in differ)
  refused = pytest.raises(ValueError, match="the platform that cut the messages was")
  with refused if differ else contextlib.nullcontext():
    gradcomp.checkpoint.check_record(saved, here)
  owned = [
    [part.pop("arrays") for part in record["transformations"]]
    for record in records.values()
  ]
  assert records["cpu"] == records["tpu"]
  assert (owned[0] != owned[1]) == bool(differ)


def filled(tx, workers):
  """A state that a TPU has saved, with random numbers."""
  with planned_for("tpu"):
    return cases.filled(tx, workers)


def moved(state, tx, old, new, where, **options):
  """The state on the second of two platforms."""
  before, after = where
  with planned_for(after):
    return cases.reshard(state, tx, old, new, old_platform=before, **options)


MORE = [(2, 4), (8, 3), (1, 4)]
LEAVES = [("b",), ("one",), ("v",), ("w",)]
WHOLE = [tuple(cases.PARAMS)]


@pytest.mark.parametrize("pair", [(4, 4), (4, 2), *slow(*zip(MORE))])
def test_rows_move_with_their_leaves_and_come_back(pair):
  old, new = pair
  tx = cases.compressed("two_shot", "error")
  state = filled(tx, old)
  groups = lambda n: LEAVES if n > 1 else WHOLE
  before = cases.owned_leaves(state, groups(old))
  there = moved(state, tx, old, new, ("tpu", "cpu"))
  chex.assert_trees_all_equal_shapes_and_dtypes(there, shapes(tx, "cpu", new))
  after = cases.owned_leaves(there, WHOLE)
  for name, x in before.items():
    np.testing.assert_array_equal(after[name], x * np.float32(old / new))
  back = moved(there, tx, new, old, ("cpu", "tpu"))
  chex.assert_trees_all_equal_shapes_and_dtypes(back, state)
  rows = lambda state: cases.owned_leaves(state, groups(old))
  if max(pair) % min(pair) == 0:  # factors that are powers of two
    assert_same_bits(rows(back), before)
  if old == new:
    assert_same_bits(back, state)
  else:
    for name in cases.PARAMS:
      sums = [cases.total(x.residual[name], old) for x in (state, back)]
      # Of at most 8 numbers below 8, each rounded by 2**-24.
      np.testing.assert_allclose(*sums, atol=4e-6)


@pytest.mark.bits
def test_a_training_goes_on_with_the_bits_of_one_that_stayed():
  """One message and several have equal bits, if each row keeps what its owner kept."""
  tx = cases.compressed("two_shot", "error")
  zeros = lambda x: np.zeros(x.shape, x.dtype)
  results = []
  for platforms in (("cpu", "cpu", "cpu"), ("tpu", "cpu", "tpu")):
    state = jax.tree.map(zeros, shapes(tx, platforms[0]))
    outputs = []
    for number, where in enumerate(platforms):
      if number:
        state = moved(state, tx, 4, 4, (platforms[number - 1], where))
      with planned_for(where):
        output, state = cases.step(tx, state, cases.gradients(4, number))
      outputs.append(output)
    results.append((outputs, state.residual))
  assert_same_bits(*results)


def test_the_error_names_the_platforms_and_a_cure_that_works():
  tx = cases.compressed("two_shot", "error")
  saved, here = recorded(tx, "tpu"), recorded(tx, None)
  cure = "that platform=, and take gradcomp.reshard_state with it as old_platform="
  said = "the platform that cut the messages was tpu and is cpu, what the owners"
  with pytest.raises(ValueError, match=says("`saved`", said, cure)):
    gradcomp.checkpoint.check_record(saved, here)
  state = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes(tx, "tpu"))
  with pytest.raises(
    ValueError, match="is too much.* Pass old_workers=, old_platform="
  ):
    cases.reshard(state, tx, 4, 2)
  platform = saved["platform"]
  gradcomp.checkpoint.check_record(saved, recorded(tx, platform))
  chex.assert_trees_all_equal_shapes_and_dtypes(shapes(tx, platform), state)
  went = cases.reshard(state, tx, 4, 2, old_platform=platform)
  chex.assert_trees_all_equal_shapes_and_dtypes(went, shapes(tx, "cpu", 2))


def test_a_record_whose_owners_keep_nothing_fits_any_platform():
  ring = cases.compressed("ring", "error")
  gradcomp.checkpoint.check_record(recorded(ring, "tpu"), recorded(ring, "cpu"))


@pytest.fixture
def default_is_tpu(monkeypatch):
  """A process with TPUs, where a mesh of its CPUs is used."""
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")


def test_a_state_goes_to_the_platform_of_the_mesh(default_is_tpu):
  tx = cases.compressed("two_shot", "error")
  state = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes(tx, None))
  went = cases.reshard(state, tx, 4, 2, mesh=modes.mesh(2), old_platform="tpu")
  chex.assert_trees_all_equal_shapes_and_dtypes(went, shapes(tx, "cpu", 2))
  kinds = collections.Counter(len(x.server_residual["data",]) for x in (state, went))
  assert kinds == {4: 1, 1: 1}


@pytest.mark.parametrize("mode", [*slow(*modes.MODES)])
def test_init_and_update_plan_for_one_platform(mode, default_is_tpu):
  """Whatever the default is: the step would refuse the state of other messages."""
  tx = cases.compressed("two_shot", "error")
  modes.run_with_state(mode, tx, [cases.gradients(4, 0)])
