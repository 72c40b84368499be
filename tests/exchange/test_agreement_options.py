"""Each option of each transformation is in what processes compare."""

import dataclasses
import inspect

import optax
import pytest

import gradcomp
from gradcomp.codecs import QSGD, TopK
from tests.support.cases.agreement import assert_told, processes, trace
from tests.support.cases.local import decaying
from tests.support.option_fields import with_options

SGD, MOMENTUM = optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)
NEAREST = QSGD(bits=4, rounding="nearest")


def compressed(**options):
  return gradcomp.compress(**{"codec": QSGD(bits=4), "axis_name": "data"} | options)


def local(inner=SGD, outer=SGD, **options):
  options = {"every": 4, "codec": QSGD(bits=8), "axis_name": "data"} | options
  options = with_options(gradcomp.local.LocalOptions, options)
  return gradcomp.local.local_steps(inner, outer, **options)


def sparse(**options):
  return local(codec=TopK(), exchange="all_gather", **options)


def zero(inner=SGD, **options):
  codecs = {"grads": QSGD(bits=4), "params": QSGD(bits=8, rounding="nearest")}
  return gradcomp.parallel.zero(inner, axis_name="data", **codecs | options)


def switch(boundaries=(2,), bits=4):
  later = compressed(codec=QSGD(bits=bits))
  return gradcomp.wrappers.switch(boundaries, [optax.identity(), later])


def skip(max_consecutive_errors=5, inner=SGD):
  inner = optax.chain(compressed(), inner)
  return gradcomp.skip_nonfinite(inner, max_consecutive_errors, axis_name="data")


def clip(max_norm=1.0, rule="own"):
  return gradcomp.wrappers.clip_by_local_norm(max_norm, axis_name="data", rule=rule)


# Each option of each transformation, with another value than in the default: what the
# error names, and how it shows the value.
EXCHANGE = [
  (compressed, dict(codec=QSGD(bits=8)), "codec", "bits=8"),
  (compressed, dict(exchange="two_shot"), "exchange", "TwoShot"),
  (compressed, dict(feedback="error"), "feedback", "ErrorFeedback"),
  (compressed, dict(min_leaf_size=1), "min_leaf_size", "1"),
  (compressed, dict(message_bytes=1000), "message_bytes", "1000"),
  (compressed, dict(key=7), "key", "7"),
  (compressed, dict(dither="independent"), "dither", "'independent'"),
]
LOCAL = [
  (local, dict(inner=MOMENTUM), r"inner_state\[\d\]", r".*\.trace\['v'\] float32.*"),
  (local, dict(outer=MOMENTUM), r"outer_state\[\d\]", r".*\.trace\['v'\] float32.*"),
  (local, dict(every=5), "every", "5"),
  (local, dict(codec=QSGD(bits=4)), "codec", "bits=4"),
  (local, dict(exchange="two_shot"), "exchange", "TwoShot"),
  (local, dict(feedback=None), "feedback", "NoFeedback"),
  (local, dict(feedback=decaying(0.9)), "feedback", "residual_decay=0.9"),
  (local, dict(fragments=2), "fragments", "2"),
  (local, dict(delay=1), "delay", "1"),
  (local, dict(mixing=0.5), "mixing", "0.5"),
  (local, dict(start=2), "start", "2"),
  (sparse, dict(merge="senders"), "exchange", "senders"),
  (local, dict(min_leaf_size=1), "min_leaf_size", "1"),
  (local, dict(message_bytes=1000), "message_bytes", "1000"),
  (local, dict(key=7), "key", "7"),
  (local, dict(dither="independent"), "dither", "'independent'"),
]
ZERO = [
  (zero, dict(inner=MOMENTUM), r"inner_state\[0\]", r".*\.trace.*"),
  (zero, dict(grads=QSGD(bits=8)), "codec", "bits=8"),
  (zero, dict(params=NEAREST), "params", "bits=4"),
  (zero, dict(feedback="error"), "feedback", "ErrorFeedback"),
  (zero, dict(min_leaf_size=1), "min_leaf_size", "1"),
  (zero, dict(message_bytes=1000), "message_bytes", "1000"),
  (zero, dict(key=7), "key", "7"),
  (zero, dict(dither="independent"), "dither", "'independent'"),
]
OTHERS = [
  (switch, dict(boundaries=(3,)), "boundaries", r"\[3\]"),
  (switch, dict(bits=2), "codec", "bits=2"),
  (skip, dict(inner=MOMENTUM), r"inner_state\[\d\]", r".*\.trace\['v'\] .*"),
  (skip, dict(max_consecutive_errors=4), "max_consecutive_errors", "4"),
  (clip, dict(max_norm=2.0), "max_norm", "2.0"),
  (clip, dict(rule="share"), "rule", "'share'"),
]


@pytest.fixture
def together(monkeypatch):
  return processes(monkeypatch)


ALL = EXCHANGE + LOCAL + ZERO + OTHERS


@pytest.mark.parametrize(
  "make, options, name, value",
  ALL,
  ids=[f"{make.__name__}-{'-'.join(x)}-{value}" for make, x, _, value in ALL],
)
def test_other_options_are_an_error_that_names_them(
  make, options, name, value, together
):
  told = together(lambda: trace(make()), lambda: trace(make(**options)))
  assert_told(told[0], f"`{name}` must be the same .*process 0 and .*{value}.* proc")
  assert_told(told[1], f"`{name}` must be the same .*{value}.* process 1 and ")


@pytest.mark.parametrize(
  "function, cases, given",
  [
    (gradcomp.compress, EXCHANGE, {"axis_name"}),
    (gradcomp.local.local_steps, LOCAL, {"axis_name", "options"}),
    (gradcomp.parallel.zero, ZERO, {"axis_name"}),
    (gradcomp.wrappers.switch, OTHERS[:1], {"transformations"}),
    (gradcomp.skip_nonfinite, OTHERS[2:4], {"axis_name"}),
    (gradcomp.wrappers.clip_by_local_norm, OTHERS[4:], {"axis_name"}),
  ],
)
def test_no_option_is_forgotten_above(function, cases, given):
  """What is added to a transformation is compared, or says here why it is not."""
  names = {name for _, options, *_ in cases for name in options}
  options = set(inspect.signature(function).parameters)
  if function is gradcomp.local.local_steps:
    options |= {field.name for field in dataclasses.fields(gradcomp.local.LocalOptions)}
  assert options == names | given
