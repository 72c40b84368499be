"""A study is traced once, is seen by no program and no other thread, and goes again."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import optax

import gradcomp
from gradcomp._src.checkpoint.shapes import first_state_of
from gradcomp._src.mesh.study import STUDY, Study, is_study
from gradcomp._src.report import tracing

PARAMS = {"b": jnp.zeros(64), "w": jnp.zeros((64, 64))}


def counted():
  """An optimizer, and a list that grows with each trace of its update to the end."""
  tx, traces = gradcomp.qsgd(bits=4, axis_name="data"), []

  def update(updates, state, params=None, **extra_args):
    result = tx.update(updates, state, params, **extra_args)
    traces.append(1)
    return result

  return optax.GradientTransformationExtraArgs(tx.init, update), traces


def test_an_update_is_traced_once_for_all_readers():
  optimizer, traces = counted()
  first = gradcomp.explain(optimizer, PARAMS, workers=4)
  gradcomp.checkpoint.make_record(optimizer, PARAMS, workers=4)
  assert gradcomp.explain(optimizer, PARAMS, workers=4) == first
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
  assert gradcomp.explain(optimizer, like, workers=4) == first
  assert len(traces) == 1


def test_other_shapes_dtypes_and_workers_are_other_studies():
  optimizer, traces = counted()
  sent = {
    gradcomp.explain(optimizer, params, workers=workers).bytes_sent
    for params in (PARAMS, {"w": jnp.zeros((64, 64))}, {"w": jnp.zeros((64, 65))})
    for workers in (2, 4)
  }
  assert len(sent) == len(traces) == 6
  halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
  gradcomp.explain(optimizer, halves, workers=4)
  gradcomp.explain(optimizer, PARAMS, workers={"data": 4})  # as without the name
  assert len(traces) == 7
  for size in (*range(20), 19, 0):  # the last ones are kept
    gradcomp.explain(optimizer, {"w": jnp.zeros(size)}, workers=4)
  kept = tracing._kept[optimizer.update][optimizer.init]
  assert len(traces) == 7 + 21 and len(kept) == tracing._MOST


def test_a_step_with_a_report_is_traced_twice():
  """Once for itself, and once for all readers; a later, inspected program, once."""
  optimizer, traces = counted()
  mesh = jax.make_mesh((2,), ("data",))
  loss_fn = lambda params, batch: jnp.mean(params["w"]) * jnp.mean(batch)
  given = dict(mesh=mesh, options=gradcomp.TrainOptions(report=True))
  for inspect in (False, True):
    step = gradcomp.make_train_step(loss_fn, optimizer, axis_name="data", **given)
    with jax.set_mesh(mesh):
      state = optimizer.init(PARAMS)
    look = lambda *args, step=step, inspect=inspect: step(*args, inspect=inspect)
    jax.eval_shape(look, PARAMS, state, jnp.ones((4, 2)))
  gradcomp.explain(optimizer, PARAMS, workers=2)
  assert len(traces) == 3


def test_what_is_found_goes_with_the_optimizer():
  optimizer, _ = counted()
  gradcomp.explain(optimizer, PARAMS, workers=4)
  alive, before = weakref.ref(optimizer.update), len(tracing._kept)
  del optimizer
  gc.collect()
  assert alive() is None and len(tracing._kept) < before


def test_optimizers_that_cannot_be_keys_are_explained():
  tx = gradcomp.qsgd(bits=4, axis_name="data")
  methods = {"__hash__": None, "__call__": staticmethod(tx.update)}
  unhashable = type("Unhashable", (), methods)()
  optimizer = optax.GradientTransformationExtraArgs(tx.init, unhashable)
  found = gradcomp.explain(optimizer, PARAMS, workers=4)
  assert found == gradcomp.explain(tx, PARAMS, workers=4)


def test_studies_share_the_caches_of_inner_functions_and_programs_do_not():
  seen = []
  double = jax.jit(lambda x: seen.append(is_study()) or 2 * x)
  for _ in range(2):
    doubled = optax.stateless(lambda updates, _: jax.tree.map(double, updates))
    tx = optax.chain(doubled, gradcomp.dense(axis_name="data"))
    gradcomp.explain(tx, {"w": jnp.zeros(64)}, workers=4)
  assert seen == [True]
  jax.eval_shape(double, jnp.zeros(64))
  assert seen == [True, False]


def test_other_threads_see_no_study():
  seen = []
  with STUDY(Study()):
    assert is_study()
    thread = threading.Thread(target=lambda: seen.append(is_study()))
    thread.start()
    thread.join()
  assert seen == [False] and not is_study()


def test_plans_of_first_states_are_found_in_transformed_functions():
  tx = gradcomp.qsgd(bits=4, axis_name="data")
  for init in (tx.init, jax.jit(tx.init)):
    optimizer = optax.chain(optax.GradientTransformation(init, tx.update))
    given = dict(workers=4, axis_name="data", param_specs=None, mesh=None)
    _, _, (plan,), _ = first_state_of(optimizer, PARAMS, **given)
    assert plan.names == ("['b']", "['w']") and plan.workers == 4
