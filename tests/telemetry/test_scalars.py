"""Metrics become floats by names that every logger takes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from gradcomp._src.telemetry.inspect import Metrics
from gradcomp._src.telemetry.replicas import Replicas
from gradcomp.telemetry import scalars
from tests.support import modes
from tests.support.assertions import says

WORKERS = 2
NUMBERS = Metrics._fields


def inspection(grads, **options):
  tx = gradcomp.qsgd(bits=4, min_leaf_size=0, **options)
  look = lambda grads: gradcomp.telemetry.inspect_update(tx, grads, tx.init(grads))[2]
  return jax.jit(look)(grads)


def test_an_inspection_is_named_by_its_leaves():
  """Not by the brackets and quotes of their paths."""
  x = jnp.linspace(-1.0, 1.0, 600)
  found = inspection({"conv.1": [x, -x], "it's": x})
  leaves = ("conv.1/0", "conv.1/1", "_it_s_")
  record = scalars(found)
  shown = {f"leaves/{leaf}/{name}" for leaf in leaves for name in NUMBERS}
  assert record.keys() == shown | {f"total/{name}" for name in NUMBERS}
  assert all(re.fullmatch(r"[-/.\w]+", name) for name in record)
  first = found.leaves["['conv.1'][0]"]
  assert record["leaves/conv.1/0/cosine"] == float(first.cosine)
  assert scalars(first)["cosine"] == float(first.cosine) > 0
  fields = inspection(optax.ScaleByScheduleState(count=x))
  assert "leaves/count/cosine" in scalars(fields)


def step_of(workers, **options):
  mesh = modes.mesh(workers)
  optimizer = optax.chain(gradcomp.qsgd(axis_name="data"), optax.sgd(0.1))
  loss_fn = lambda w, x: (jnp.mean((x @ w) ** 2), {"largest": {"x": jnp.max(x)}})
  given = dict(mesh=mesh, options=gradcomp.TrainOptions(has_aux=True, **options))
  step = gradcomp.make_train_step(loss_fn, optimizer, axis_name="data", **given)
  with jax.set_mesh(mesh):
    state = optimizer.init(jnp.ones(512))
  return step(jnp.ones(512), state, jnp.eye(workers, 512), inspect=True)[2]


def test_all_metrics_of_a_step_come_at_once(monkeypatch):
  metrics = step_of(WORKERS, report=True, compare_every=1)
  fetched, get = [], jax.device_get
  monkeypatch.setattr(jax, "device_get", lambda tree: fetched.append(tree) or get(tree))
  record = scalars(metrics)
  assert len(fetched) == 1
  assert all(type(x) is float for x in record.values())
  inspected = {name for name in record if name.startswith("inspection/")}
  assert inspected == {f"inspection/{x}" for x in scalars(metrics["inspection"])}
  assert record.keys() - inspected == {
    *("loss", "aux/largest/x", "replicas/equal"),
    *("bytes_sent", "gradient_norm", "update_norm"),
  }
  assert record["replicas/equal"] == record["aux/largest/x"] == 1.0
  assert record["bytes_sent"] == record["inspection/total/bytes_sent"]


def test_every_real_number_becomes_a_float_and_a_flag_one_or_zero():
  for dtype in ("bfloat16", "float32", "int4", "int8", "uint32"):
    x = jnp.asarray(2, dtype)
    values = scalars([x, np.asarray(x), None, 2, 2.0]).values()
    assert all(type(value) is float for value in values)
    assert [*values] == [2.0] * 4
  words = np.zeros((3, 1, 2), np.uint32)
  words[1] = 7
  flags = {"a": True, "b": jnp.bool_(False), "c": Replicas(words, ("w",))}
  assert scalars(flags) == {"a": 1.0, "b": 0.0, "c/equal": 0.0}


def test_an_inspection_of_several_workers_has_no_floats():
  every = jax.vmap(lambda x: inspection({"w": x}, axis_name="data"), axis_name="data")
  found = every(jnp.eye(WORKERS, 300))
  with pytest.raises(ValueError, match=says(".total.bytes_sent", "(2,)", "x[0]")):
    scalars(found)
  assert "total/cosine" in scalars(jax.tree.map(lambda x: x[0], found))
