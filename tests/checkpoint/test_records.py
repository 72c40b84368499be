"""A record says what a state belongs to, and anything else is refused by its name."""

import functools
import json

import jax
import jax.numpy as jnp
import optax
import pytest

import gradcomp
from gradcomp._src.checkpoint import records
from gradcomp.codecs import QSGD, Dense, TopK
from gradcomp.exchange import Hierarchical, TwoShot
from gradcomp.local import LocalOptions, local_steps
from gradcomp.parallel import zero
from tests.plugins.slow_cases import slow
from tests.support.assertions import says

PARAMS = {"w": jnp.zeros((64, 64)), "v": jnp.zeros(4096), "b": jnp.zeros(8)}


def recorded(tx, params=PARAMS, workers=4):
  """As a file gives it back."""
  return json.loads(json.dumps(gradcomp.checkpoint.record(tx, params, workers=workers)))


def qsgd(bits=4, **options):
  options = {"bucket_size": 64, "exchange": "two_shot", "feedback": "error"} | options
  return gradcomp.qsgd(bits=bits, axis_name="data", **options)


def adam_zero(bits, **options):
  codecs = {"grads": QSGD(bits=4), "params": QSGD(bits=bits)}
  return zero(optax.adam(0.1), **codecs, axis_name="data", **options)


def local(**options):
  given = {"axis_name": "data", "every": 2, "codec": QSGD(bits=4)}
  options = LocalOptions(**options)
  return local_steps(optax.adam(0.1), optax.sgd(0.5), **given, options=options)


OTHERS = {
  "codec": (qsgd(), qsgd(8), {}, ["the codec of ['v'] was", "bits=4", "bits=8"]),
  "kind": (qsgd(), gradcomp.onebit_sgd(axis_name="data"), {}, ["QSGD", "OneBit"]),
  "small": (qsgd(), qsgd(min_leaf_size=4097), {}, ["codec of ['v'] was QSGD", "Dense"]),
  "feedback": (
    qsgd(),
    qsgd(feedback="momentum"),
    {},
    ["the feedback was ErrorFeedback and is MomentumFeedback. Make the"],
  ),
  "decay": (
    qsgd(feedback=gradcomp.MomentumFeedback(decay=0.9)),
    qsgd(feedback=gradcomp.MomentumFeedback(decay=0.5)),
    {},
    ["decay=0.9", "decay=0.5"],
  ),
  "storage": (
    qsgd(),
    qsgd(feedback=gradcomp.ErrorFeedback(residual_dtype="int8", residual_decay=0.5)),
    {},
    ["residual_dtype='float32', residual_decay=1.0", "residual_dtype='int8'", "Make"],
  ),
  "workers": (
    qsgd(),
    qsgd(),
    {"workers": 8},
    ["the number of workers was 4 and is 8", "Restore", "gradcomp.reshard_state"],
  ),
  "axis": (
    qsgd(),
    gradcomp.qsgd(
      bits=4, bucket_size=64, axis_name="x", exchange="two_shot", feedback="error"
    ),
    {},
    ["the axis of workers was ['data'] and is ['x']"],
  ),
  "exchange": (
    qsgd(exchange=Hierarchical(group_size=2)),
    qsgd(exchange=Hierarchical(group_size=4)),
    {},
    ["the exchange of", "group_size=2", "group_size=4"],
  ),
  "owners": (
    qsgd(),
    qsgd(exchange=TwoShot(feedback=False)),
    {},
    ["owners", "was ['v'], ['w'] and is nothing"],
  ),
  "messages": (qsgd(), qsgd(message_bytes=3000), {}, ["owners", "; ['w']"]),
  "shape": (
    qsgd(),
    qsgd(),
    {"params": PARAMS | {"w": jnp.zeros((32, 128))}},
    ["the shape of ['w'] was [64, 64] and is [32, 128]"],
  ),
  "leaves": (
    qsgd(),
    qsgd(),
    {"params": {"w": PARAMS["w"], "u": PARAMS["v"], "b": PARAMS["b"]}},
    ["the list of leaves was one with ['v'] and is one with ['u']"],
  ),
  "number": (
    gradcomp.wrappers.switch([3], [qsgd(), qsgd()]),
    qsgd(),
    {},
    ["the number of gradcomp transformations was 2 and is 1"],
  ),
  "branch": (
    gradcomp.wrappers.switch([3], [qsgd(), qsgd()]),
    gradcomp.wrappers.switch([3], [qsgd(rounding="nearest"), qsgd()]),
    {},
    ["rounding='stochastic'", "rounding='nearest'", "of transformation 0"],
  ),
  "rows": (
    adam_zero(4),
    adam_zero(4, message_bytes=3000),
    {},
    ["owners of messages", "['b'], ['v'], ['w'] and is"],
  ),
  "zero": (
    adam_zero(4),
    adam_zero(8),
    {},
    ["the codec of parameters was QSGD(bits=4) and is QSGD(bits=8)"],
  ),
}
QUICK = ("codec", "storage", "workers", "messages", "leaves", "branch", "zero")


@pytest.mark.parametrize(
  "name", [*QUICK, *slow(*(name for name in OTHERS if name not in QUICK))]
)
def test_what_differs_is_named_with_both_values_and_a_cure(name):
  old, new, how, words = OTHERS[name]
  saved = recorded(old)
  gradcomp.checkpoint.check_record(saved, recorded(old))
  with pytest.raises(ValueError, match=says("`saved`", *words, "optimizer.init")):
    gradcomp.checkpoint.check_record(saved, recorded(new, **how))


SOUND = {
  "implementation": (qsgd(), qsgd(implementation="xla")),
  "dither": (qsgd(), qsgd(dither="independent", key=5)),
  "min_leaf_size": (qsgd(), qsgd(min_leaf_size=9)),
  "what auto picks": (qsgd(exchange="all_gather"), qsgd(exchange="auto")),
  "no owners": (qsgd(exchange="ring"), qsgd(exchange="all_gather")),
  "messages": (qsgd(exchange="ring"), qsgd(exchange="ring", message_bytes=3000)),
  "what is behind": (
    optax.chain(qsgd(), optax.sgd(0.1)),
    optax.chain(qsgd(), optax.adam(1.0)),
  ),
  "first steps": (local(), local(start=5)),
}


FIRST = ("implementation", "no owners", "first steps")


@pytest.mark.parametrize("name", [*FIRST, *slow(*(x for x in SOUND if x not in FIRST))])
def test_what_changes_no_state_may_differ(name):
  saved, record = map(recorded, SOUND[name])
  gradcomp.checkpoint.check_record(saved, record)
  gradcomp.checkpoint.check_record(record, saved)


def test_workers_that_keep_nothing_may_be_any_number():
  tx = qsgd(feedback=None, exchange="all_gather")
  saved = recorded(tx)
  assert not saved["stacked"]
  gradcomp.checkpoint.check_record(saved, recorded(tx, workers=8))
  around = optax.MultiSteps(tx, 2).gradient_transformation()
  assert recorded(around)["stacked"]  # gradients that are not exchanged yet


def test_bound_codecs_say_nothing_of_the_workers():
  """Ranges of a sparse leaf are theirs, and told by their number."""
  tx = gradcomp.compress(TopK(density=0.1), axis_name="data", exchange="two_shot")
  codecs = [recorded(tx, workers=n)["transformations"][0]["codecs"] for n in (2, 4)]
  assert codecs[0] == codecs[1]


def test_options_that_another_version_lacks_are_not_compared():
  saved = recorded(qsgd())
  del saved["transformations"][0]["codecs"][1]["norm"]
  saved["gradcomp"] = "0.0.1"
  gradcomp.checkpoint.check_record(saved, recorded(qsgd()))


def test_another_format_is_refused(monkeypatch):
  saved = recorded(qsgd())
  monkeypatch.setattr(records, "FORMAT", 1000)
  with pytest.raises(ValueError, match=says("of the format 1000", "got 1,", "go on")):
    gradcomp.checkpoint.check_record(saved, recorded(qsgd()))


def test_a_part_of_the_leaves_and_no_leaves():
  parts = {"x": gradcomp.dense(jnp.bfloat16, axis_name="data"), "y": optax.sgd(0.1)}
  labels = {"w": "x", "v": "y", "b": "y"}
  (found,) = recorded(optax.partition(parts, labels))["transformations"]
  assert list(found["leaves"]) == ["['w']"]
  assert found["codecs"] == [
    {"type": "Dense", "dtype": "bfloat16", "rounding": "nearest"}
  ]
  (found,) = recorded(qsgd(), params={})["transformations"]
  assert not found["leaves"] and not found["arrays"]


def test_without_a_name_owners_keep_nothing():
  """Under Explicit axes ``init`` does not know who will exchange."""
  tx = gradcomp.compress(QSGD(bits=4, bucket_size=64), exchange="two_shot")
  record = recorded(tx)
  assert not record["stacked"] and not record["transformations"][0]["arrays"]
  alone = recorded(gradcomp.compress(Dense()), workers=1)
  assert alone["workers"] == [1] and not alone["stacked"]


def test_shapes_are_enough():
  abstract = jax.eval_shape(lambda: PARAMS)
  make = functools.partial(recorded, qsgd())
  assert make(abstract) == make()


def test_sizes_may_have_names():
  assert recorded(qsgd(), workers={"data": 4}) == recorded(qsgd(), workers=4)
