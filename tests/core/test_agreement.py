"""Processes that would misread each other's messages are told so when they trace."""

import collections
import dataclasses
import threading

import jax
import jax.numpy as jnp
import pytest
from jax._src.lib import _jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.checks import see
from gradcomp._src.kernels.gpu import table
from gradcomp._src.mesh import agreement
from tests.support.assertions import vanish
from tests.support.cases import agreement as cases
from tests.support.cases.agreement import A, assert_told, compressed, trace, usual


@pytest.fixture
def together(monkeypatch):
  return cases.processes(monkeypatch)


@pytest.mark.parametrize(
  "first, second, match",
  [
    ({"a": A, "b": A}, {"b": A, "a": A}, r"`leaves\[0\]` .*'a'.* and \['b'\]"),
    ({"a": A}, {"a": cases.B}, r"`leaves\[0\]` .*\['a'\] float32.* and .*bfloat16"),
    ({"a": A}, {"c": A}, r"`leaves\[0\]` .*'a'.* and \['c'\]"),
    ({"a": A}, {"a": cases.GRADS["w"]}, r"`leaves\[0\]` .*\[64\] in .*\[256, 64\] in"),
    ({"a": A}, {"a": A, "b": A}, r"`leaves\[1\]` .*nothing .* and \['b'\]"),
  ],
  ids=["order", "dtype", "name", "shape", "number"],
)
def test_other_leaves_are_an_error_that_names_the_first(first, second, match, together):
  both = [collections.OrderedDict(leaves) for leaves in (first, second)]
  told = together(*(lambda x=x: trace(compressed(), x) for x in both))
  assert_told(told[0], f"{match}.* in gradcomp.compress")
  assert told[1] is not None


def test_other_codecs_are_an_error_under_auto_axes(together):
  told = together(*(lambda b=b: cases.trace_rows(compressed(b)) for b in (4, 8)))
  assert_told(told[0], r"`codec` must be the same .*bits=4.* and .*bits=8.*")
  assert together(*[lambda: cases.trace_rows(compressed())] * 2) == [None, None]


@pytest.mark.parametrize(
  "name, attribute", [("gradcomp", "__version__"), ("WIRE", "WIRE")]
)
def test_another_version_is_an_error(name, attribute, together, monkeypatch):
  def other():
    monkeypatch.setattr(agreement, attribute, "9")
    trace(compressed())

  monkeypatch.setenv("GRADCOMP_PATIENCE_SECONDS", "0")
  together(lambda: trace(compressed()), lambda: None)
  told = together(lambda: None, other)
  assert_told(told[1], f"`{name}` must be the same .*got 9 in process 1 and ")


def test_another_table_of_kernels_is_an_error(together, monkeypatch):
  monkeypatch.setattr(table, "kernel_verdicts", lambda: [jax.process_index()])
  told = together(*[lambda: trace(compressed())] * 2)
  assert_told(told[0], r"`kernels` must be the same .*got \[0\] in process 0 and \[1\]")


def test_equal_programs_pass_however_far_ahead_one_is(together):
  """Several transformations of the same leaves, of others, and traced repeatedly."""
  program = [(compressed(bits), cases.GRADS) for bits in (4, 8, 4)]
  program.append((compressed(), {"v": A}))

  def run(seconds):
    for tx, grads in program:
      trace(tx, grads)
      threading.Event().wait(seconds)

  assert together(lambda: run(0), lambda: run(0.02)) == [None, None]


def test_who_differs_is_named_among_many(together):
  programs = [compressed(bits) for bits in (4, 8, 4, 8)]
  told = together(*(lambda tx=tx: trace(tx) for tx in programs))
  for error, own, other in zip(told, (4, 8, 4, 8), (8, 4, 8, 4), strict=True):
    assert_told(error, rf"QSGD\(bits={own}, .* in process.* QSGD\(bits={other}, ")
  assert_told(told[2], r" in process(es 0,)? 2 and .* in process(es)? [13]")


def test_who_does_not_answer_is_named_after_a_limit(together, monkeypatch):
  monkeypatch.setenv("GRADCOMP_PATIENCE_SECONDS", "0.1")
  told = together(lambda: trace(compressed()), lambda: None, lambda: None)
  assert_told(
    told[0], "`gradcomp.compress` .* got nothing from processes 1, 2 in 0.1 s"
  )
  # Whoever comes later finds what waited for it, which goes on then.
  again = [lambda: trace(compressed())] * 3
  assert together(*again) == [None] * 3


@pytest.mark.parametrize("seconds", ["ten", "-1", "nan", ""])
def test_a_limit_that_is_none(seconds, together, monkeypatch):
  monkeypatch.setenv("GRADCOMP_PATIENCE_SECONDS", seconds)
  told = together(lambda: trace(compressed()), lambda: None)
  assert_told(told[0], f"`GRADCOMP_PATIENCE_SECONDS` must be .*got '{seconds}'; unset")


def test_nothing_is_compared_where_no_other_process_takes_part(together):
  """Neither waits for the other, which traces nothing."""

  def run():
    trace(compressed(exchange="local"))
    trace(compressed(), over=cases.mesh(1))  # of some devices; nobody knows whose
    gradcomp.explain(compressed(), cases.GRADS, workers=jax.device_count())
    rows = jax.ShapeDtypeStruct((jax.device_count(), 64), jnp.float32)
    step = lambda g: compressed().update(g, compressed().init(g))[0]
    jax.eval_shape(jax.vmap(step, axis_name="data"), rows)

  assert together(run, lambda: None) == [None, None]
  assert not agreement.run_store().values


def test_nothing_is_compared_where_jax_has_moved_its_store(together, monkeypatch):
  """Which it says, once a process."""
  assert agreement.run_store() is not None  # JAX's name is still there
  for name in ("key_value_set", "key_value_dir_get", "blocking_key_value_get"):
    assert hasattr(_jax.DistributedRuntimeClient, name)
  vanish(monkeypatch, "jax._src.distributed")
  with pytest.warns(RuntimeWarning, match="has moved its key-value store"):
    assert agreement.run_store() is None


def test_addresses_do_not_differ():
  class Codec:
    pass

  parts = [agreement._part("x", {"codec": Codec()}) for _ in range(2)]
  assert parts[0] == parts[1] and "Codec object>" in parts[0]["codec"]


STEPS = {
  "chain": (
    usual,
    lambda: cases.train(
      compressed(), gradcomp.wrappers.switch([2], [cases.SGD, cases.MOMENTUM])
    ),
    "`transformation` .*make_train_step in process 0 and gradcomp.wrappers.switch in "
    "process 1, in number 2 of the step",
  ),
  "optimizer": (
    usual,
    lambda: cases.train(compressed(), cases.MOMENTUM),
    r"`opt_state\[\d\]` .* in number 2 of the step, gradcomp.make_train_step",
  ),
  "aux": (
    lambda: usual(has_aux=True, aux={"accuracy": 0.5}),
    lambda: usual(has_aux=True, aux={"perplexity": 90.0}),
    r"`metrics\[0\]` .* \['aux'\]\['accuracy'\] float32.* and .*\['perplexity'\]",
  ),
  "failed": (lambda: usual(loss=lambda params, batch: 1 / 0), usual, None),
}


@pytest.mark.parametrize("first, second, match", STEPS.values(), ids=STEPS)
def test_steps_are_compared_whole(first, second, match, together):
  told = together(first, second)
  if match is None:
    assert isinstance(told[0], ZeroDivisionError)
    assert_told(told[1], "must be traced .* process 0 failed: ZeroDivisionError: ")
  else:
    assert_told(told[0], match)
    assert_told(told[1], "must be the same in all processes")
    assert str(told[1]).endswith(see("must-be-the-same-in-all-processes"))
  # Nobody has agreed, and all go on to the next.
  assert together(usual, usual) == [None, None]


# But for the number of micro-batches, which decides nothing that is sent.
STEP = dict(
  has_aux=True, has_weight=True, model_state="mean", report=True, compare_every=5
)


@pytest.mark.parametrize("name", sorted(STEP))
def test_another_option_of_a_step_is_an_error(name, together):
  fields = {x.name for x in dataclasses.fields(gradcomp.TrainOptions)}
  assert fields == {*STEP, "accumulate"}
  for error in together(usual, lambda: usual(**{name: STEP[name]})):
    assert_told(error, "must be the same in all processes")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_other_values_of_a_loss_are_an_error_in_plain_jit(kind, together):
  """Which averages them by itself."""
  own = cases.mesh().update(axis_types=(kind,))
  sharding = NamedSharding(own, P("data"))
  batch = jax.ShapeDtypeStruct((own.size, 64), jnp.float32, sharding=sharding)

  def gradients(**aux):
    loss_fn = cases.loss_of(has_aux=True, aux=aux)
    grad_fn = gradcomp.value_and_grad(loss_fn, axis_name="data", has_aux=True)
    with jax.sharding.use_abstract_mesh(own):
      jax.eval_shape(grad_fn, {"v": A}, batch)

  told = together(lambda: gradients(accuracy=0.5), lambda: gradients(perplexity=90.0))
  match = r"`leaves\[1\]` .*'accuracy'\] .*'perplexity'\] .* gradcomp.value_and_grad"
  assert_told(told[0], match)
  assert_told(told[1], "must be the same in all processes")
