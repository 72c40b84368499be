"""A record says what a state belongs to, and anything else is refused by its name."""

import contextlib
import copy
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import gradcomp
from gradcomp._src.checkpoint import records
from gradcomp._src.exchange import plan as plans
from gradcomp.codecs import QSGD, Dense, RandomK, TopK
from gradcomp.exchange import Hierarchical, TwoShot
from gradcomp.local import local_steps
from gradcomp.parallel import zero
from tests.support.assertions import says
from tests.support.cases import reshard as cases

check = gradcomp.checkpoint.check_record
make = gradcomp.checkpoint.make_record
OWNED = "what the owners of messages keep a part of"
PARAMS = {"w": jnp.zeros((64, 64)), "v": jnp.zeros(4096), "b": jnp.zeros(8)}


def recorded(tx, params=PARAMS, workers=4, platform=None):
  """As a file gives it back."""
  return json.loads(json.dumps(make(tx, params, workers=workers, platform=platform)))


def qsgd(bits=4, **options):
  given = {"bucket_size": 64, "exchange": "two_shot", "feedback": "error"}
  return gradcomp.qsgd(bits, **({"axis_name": "data"} | given | options))


def adam_zero(bits, **options):
  codecs = {"grads": QSGD(bits=4), "params": QSGD(bits=bits)}
  return zero(optax.adam(0.1), **codecs, axis_name="data", **options)


def local(**options):
  given = {"axis_name": "data", "every": 2, "codec": QSGD(bits=4)}
  return local_steps(optax.adam(0.1), optax.sgd(0.5), **given, **options)


# What was saved, what goes on, and what the error says.
STORED = gradcomp.ErrorFeedback(residual_dtype="int8", residual_decay=0.5)
switched = lambda first: gradcomp.wrappers.switch([3], [first, qsgd()])
chained = lambda inner: optax.chain(qsgd(), inner)
grouped = lambda size: qsgd(exchange=Hierarchical(group_size=size))
decay = lambda x: qsgd(feedback=gradcomp.MomentumFeedback(decay=x))
PAIRS = [
  (qsgd(), qsgd(8), "the codec of ['v'] was", "bits=4", "bits=8"),
  (qsgd(), gradcomp.onebit_sgd(axis_name="data"), "QSGD", "OneBit"),
  (qsgd(), qsgd(min_leaf_size=4097), "codec of ['v'] was QSGD", "Dense"),
  (qsgd(), qsgd(feedback="momentum"), "was ErrorFeedback and is MomentumFeedback."),
  (decay(0.9), decay(0.5), "decay=0.9", "decay=0.5"),
  (qsgd(), qsgd(feedback=STORED), "dtype='float32', residual_decay=1.0", "'int8'"),
  (qsgd(), qsgd(axis_name="x"), "the axis of workers was ['data'] and is ['x']"),
  (grouped(2), grouped(4), "the exchange of", "group_size=2", "group_size=4"),
  (qsgd(), qsgd(exchange=TwoShot(feedback=False)), "owners", "['w'] and is nothing"),
  (qsgd(), qsgd(message_bytes=3000), "owners", "; ['w']"),
  (switched(qsgd()), qsgd(), "number of gradcomp transformations was 2 and is 1"),
  (switched(qsgd()), switched(qsgd(norm="l2")), "norm='l2'", "of transformation 0"),
  (adam_zero(4), adam_zero(4, message_bytes=3000), "owners of messages", "['w'] and"),
  (adam_zero(4), adam_zero(8), "of parameters was QSGD(bits=4) and is QSGD(bits=8)"),
  (local(fragments=2), local(), "number of gradcomp transformations was 2 and is 1"),
  (local(delay=1), local(), "delay", "was 1 and is 0"),
]
NAMES = "codec kind small feedback decay storage axis exchange owners messages"
NAMES = [*NAMES.split(), "number", "branch", "rows", "zero", "parts", "delay"]


@pytest.mark.parametrize("pair", PAIRS, ids=NAMES)
def test_what_differs_is_named_with_both_values_and_a_cure(pair):
  old, new, *words = pair
  saved = recorded(old)
  check(saved, recorded(old))
  with pytest.raises(ValueError, match=says("`saved`", *words, "optimizer.init")):
    check(saved, recorded(new))


TURNED = PARAMS | {"w": jnp.zeros((32, 128))}
OTHERS = {"w": PARAMS["w"], "u": PARAMS["v"], "b": PARAMS["b"]}
MOVED = [
  ({"workers": 8}, "number of workers was 4 and is 8", "gradcomp.reshard_state"),
  ({"params": TURNED}, "the shape of ['w'] was [64, 64] and is [32, 128]"),
  ({"params": OTHERS}, "the shape of ['v'] was [4096] and is nothing", "['u']"),
]


@pytest.mark.parametrize("moved", MOVED, ids=["workers", "shape", "leaves"])
def test_other_workers_and_parameters_are_named(moved):
  how, *words = moved
  with pytest.raises(ValueError, match=says("`saved`", *words)):
    check(recorded(qsgd()), recorded(qsgd(), **how))


SOUND = {
  "implementation": (qsgd(), qsgd(implementation="xla")),
  "dither": (qsgd(), qsgd(dither="independent", key=5)),
  "min_leaf_size": (qsgd(), qsgd(min_leaf_size=9)),
  "what auto picks": (qsgd(exchange="all_gather"), qsgd(exchange="auto")),
  "no owners": (qsgd(exchange="ring"), qsgd(exchange="all_gather")),
  "messages": (qsgd(exchange="ring"), qsgd(exchange="ring", message_bytes=3000)),
  "what is behind": (chained(optax.sgd(0.1)), chained(optax.adam(1.0))),
  "first steps": (local(), local(start=5)),
}


@pytest.mark.parametrize("name", SOUND)
def test_what_changes_no_state_may_differ(name):
  saved, record = map(recorded, SOUND[name])
  check(saved, record)
  check(record, saved)


def test_workers_that_keep_nothing_may_be_any_number():
  tx = qsgd(feedback=None, exchange="all_gather")
  saved = recorded(tx)
  assert not saved["stacked"]
  check(saved, recorded(tx, workers=8))
  around = optax.MultiSteps(tx, 2).gradient_transformation()
  assert recorded(around)["stacked"]  # gradients that are not exchanged yet
  # Under Explicit axes ``init`` does not know who will exchange.
  unnamed = recorded(gradcomp.compress(QSGD(bits=4), exchange="two_shot"))
  assert not unnamed["stacked"] and not unnamed["transformations"][0][OWNED]
  alone = recorded(gradcomp.compress(Dense()), workers=1)
  assert alone["workers"] == [1] and not alone["stacked"]


def test_bound_codecs_say_nothing_of_the_workers():
  """Ranges of a sparse leaf are theirs, and told by their number."""
  tx = gradcomp.compress(TopK(density=0.1), axis_name="data", exchange="two_shot")
  first, other = (recorded(tx, workers=n)["transformations"][0] for n in (2, 4))
  assert all(first[x] == other[x] for x in first if x.startswith("the codec"))


def test_another_version_may_go_on_but_not_with_another_format(monkeypatch):
  saved = recorded(qsgd())
  (facts,) = saved["transformations"]
  turned = saved | {"transformations": [dict(reversed(facts.items()))]}
  with pytest.raises(ValueError, match=says("`saved`", "the order of leaves was")):
    check(turned, saved)
  saved["gradcomp"] = "0.0.1"
  check(saved, recorded(qsgd()))
  monkeypatch.setattr(records, "FORMAT", 1000)
  with pytest.raises(ValueError, match=says("of the format 1000", "got 1,", "go on")):
    check(saved, recorded(qsgd()))


def test_a_part_of_the_leaves_and_no_leaves():
  parts = {"x": gradcomp.dense(jnp.bfloat16, axis_name="data"), "y": optax.sgd(0.1)}
  labels = {"w": "x", "v": "y", "b": "y"}
  (found,) = recorded(optax.partition(parts, labels))["transformations"]
  assert [x for x in found if x.startswith("the shape")] == ["the shape of ['w']"]
  assert found["the codec of ['w']"] == "Dense(dtype='bfloat16', rounding='nearest')"
  (found,) = recorded(qsgd(), params={})["transformations"]
  assert not found[OWNED] and not any(x.startswith("the shape") for x in found)


def test_a_record_lies_in_the_metadata_of_orbax(tmp_path):
  made = make(qsgd(), PARAMS, workers=4)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", PARAMS, custom_metadata=made)
    checkpointer.wait_until_finished()
    check(checkpointer.metadata(tmp_path / "state").custom_metadata, made)


def test_shapes_and_names_of_sizes_are_enough():
  expected = recorded(qsgd())
  assert recorded(qsgd(), jax.eval_shape(lambda: PARAMS)) == expected
  assert recorded(qsgd(), workers={"data": 4}) == expected


# On TPUs "auto" cuts messages, which owners keep what they lost of.
KEPT = {"axis_name": "data", "feedback": "error", "min_leaf_size": 0}
MIXED = [("u", RandomK(density=0.1)), ("v", QSGD(bits=8)), (".*", QSGD(bits=4))]
PLANNED = {
  "qsgd two_shot": gradcomp.qsgd(exchange="two_shot", **KEPT),
  "qsgd ring": gradcomp.qsgd(exchange="ring", **KEPT),
  "policy auto": gradcomp.policy([("w", QSGD())], exchange="auto", **KEPT),
  "local steps": local(exchange="two_shot", feedback="error", min_leaf_size=0),
  # One message, or each of its codecs on a way of its own.
  "mixed": gradcomp.policy(MIXED, **KEPT),
}
OWNING = ("qsgd two_shot", "local steps")
# Three leaves of many rows, and two that travel as they are.
LIKE = {"b": (7,), "one": (), "u": (64, 1024), "v": (3, 5, 4096), "w": (130, 1000)}
LIKE = {name: jax.ShapeDtypeStruct(x, np.float32) for name, x in LIKE.items()}


def first_shapes(tx, platform):
  """Returns the shapes of ``init`` under a mesh of devices that are not here."""
  device = AbstractDevice(platform, 1, platform)
  mesh = AbstractMesh((4,), ("data",), abstract_device=device)
  with use_abstract_mesh(mesh):
    return jax.eval_shape(tx.init, LIKE)


@pytest.mark.parametrize("name", PLANNED)
def test_states_of_two_platforms_differ_in_what_their_records_say(name, monkeypatch):
  """In the arrays of owners, and only there; and records without any are equal."""
  monkeypatch.setattr(plans, "automatic_bytes", lambda payload, workers: 1)
  tx, platforms = PLANNED[name], ("cpu", "tpu")
  states = [first_shapes(tx, x) for x in platforms]
  both = [recorded(tx, LIKE, platform=x) for x in platforms]
  saved, here = copy.deepcopy(both)
  for platform, state, record in zip(platforms, states, both, strict=True):
    expected = cases.shapes(tx, 4, LIKE, platform=platform)
    chex.assert_trees_all_equal_shapes_and_dtypes(expected, state)
    assert record.pop("platform") == platform
  keystr = jax.tree_util.keystr
  one, other = ({keystr(p): x.shape for p, x in cases.leaves(y)} for y in states)
  differ = {x for x in {**one, **other} if one.get(x) != other.get(x)}
  assert all("server_residual" in path for path in differ)
  assert bool(differ) == (name in OWNING)
  words = ["`saved`", "the platform that cut the messages was cpu and is tpu"]
  words += ["what the owners", "gradcomp.reshard_state with it as old_platform="]
  refused = pytest.raises(ValueError, match=says(*words))
  with refused if differ else contextlib.nullcontext():
    check(saved, here)
  parts = [x.pop("transformations") for x in both]
  owned = [[part[OWNED] for part in x] for x in parts]
  rest = lambda part: {x: part[x] for x in part if "message" not in x}
  assert both[0] == both[1] and [*map(rest, parts[0])] == [*map(rest, parts[1])]
  assert (owned[0] != owned[1]) == bool(differ)
