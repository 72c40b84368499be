"""A gradient of all workers is a leaf: what looks at several elements is an error."""

import functools
import operator
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.mesh.trees import IN_JIT
from tests.support import modes
from tests.support.assertions import assert_same_bits
from tests.support.cases import steps

N, OVER = steps.N, steps.OVER
BOTH = ("data", "model")
PARAMS = {"w": np.ones((3, 2), np.float32), "b": np.full(2, 2, np.float32)}
CURE = r"of a gradcomp\.PerWorker is not defined.* ask gradcomp\.global_norm"
# Means of four small integers, and halves of them, are exact.
ROWS = {
  "w": np.arange(N * 6, dtype=np.float32).reshape(N, 3, 2) - 2,
  "b": np.arange(N * 2, dtype=np.float32).reshape(N, 2) - 3,
}
MEAN = jax.tree.map(lambda x: x.mean(0), ROWS)


def marked(rows):
  return jax.tree.map(lambda x: gradcomp.PerWorker(x, "data"), rows)


def test_what_takes_one_element_at_a_time_is_right_in_front_of_the_exchange():
  labels = {"w": "a", "b": "z"}
  two = {"a": optax.scale(0.5), "z": optax.set_to_zero()}
  fronts = [
    optax.chain(optax.scale(2.0), optax.scale_by_schedule(lambda count: count + 0.5)),
    optax.masked(optax.scale(0.5), {"w": True, "b": False}),
    optax.partition({**two, "z": optax.scale(2.0)}, labels),
    optax.inject_hyperparams(optax.scale)(step_size=0.5),
    optax.add_decayed_weights(0.5),
    optax.trace(0.5),
  ]
  sent = gradcomp.dense(**OVER)

  @jax.jit
  def updates(rows):
    grads = marked(rows)
    chains = [optax.chain(tx, sent) for tx in fronts]
    found = [tx.update(grads, tx.init(PARAMS), PARAMS) for tx in chains]
    # Parts that are frozen need no gradient, and so none of another kind.
    frozen = optax.partition({"a": sent, "z": two["z"]}, labels)
    last, _ = frozen.update(grads, frozen.init(PARAMS), PARAMS)
    behind = [tx.update(MEAN, tx.init(PARAMS), PARAMS) for tx in fronts]
    return [update for update, _ in found], [update for update, _ in behind], last

  with jax.set_mesh(modes.mesh(N)):
    found, expected, last = updates(ROWS)
  assert_same_bits(found, expected)
  assert_same_bits(last, {"w": MEAN["w"], "b": np.zeros_like(MEAN["b"])})


SEVERAL = {
  "clip_by_global_norm": optax.clip_by_global_norm(1.0),
  "clip": optax.clip(1.0),
  "centralize": optax.centralize(),
  "adam": optax.scale_by_adam(),
  "clip_by_block_rms": optax.clip_by_block_rms(1.0),
  "zero_nans": optax.zero_nans(),
  "MultiSteps": optax.MultiSteps(optax.identity(), 2).gradient_transformation(),
  "flatten": optax.flatten(optax.scale(1.0)),
  "apply_if_finite": optax.apply_if_finite(optax.identity(), 2),
}
# Around an exchange; the last has none, and adds gradients to the parameters.
AROUND = {
  "MultiSteps": steps.multi_steps(optax.chain(steps.qsgd4, steps.SGD)),
  "flatten": optax.flatten(optax.chain(steps.qsgd4, steps.SGD)),
  "masked": optax.masked(steps.qsgd4, {"w": True, "b": False}),
  "apply_if_finite": optax.apply_if_finite(optax.chain(steps.qsgd4, steps.SGD), 2),
  "no exchange": optax.adam(0.1),
}
ACCUMULATE = r"Around an exchange, use accumulate= of gradcomp\.value_and_grad in place"


@pytest.mark.parametrize("name", [*SEVERAL, *(f"{name} around" for name in AROUND)])
def test_what_sees_several_elements_is_an_error_with_the_cures(name):
  """The words are those of docs/operate/troubleshooting.md."""
  around = AROUND.get(name.removesuffix(" around")) if "around" in name else None
  tx = around or SEVERAL[name]

  def step(rows):
    updates, _ = tx.update(marked(rows), tx.init(PARAMS), PARAMS)
    return optax.apply_updates(PARAMS, updates) if around else updates

  message = ACCUMULATE if around else CURE
  with jax.set_mesh(modes.mesh(N)):
    with pytest.raises((TypeError, ValueError), match=message):
      jax.eval_shape(step, ROWS)


READERS = {
  "vdot": lambda grads: optax.tree.vdot(grads, grads),
  "numpy's norm": lambda grads: np.linalg.norm(grads["w"]),
  "jnp.asarray": lambda grads: jnp.asarray(grads["w"]),
  "add to parameters": lambda grads: optax.apply_updates(PARAMS, grads),
  "another shape": lambda grads: grads["w"] + np.ones((N, 3, 2)),
  "another leaf": lambda grads: grads["w"] + grads["b"],
  "==": lambda grads: grads["w"] == 0,
  "rows": lambda grads: grads["w"][0],
}


@pytest.mark.parametrize("name", READERS)
def test_no_reader_is_given_the_rows_of_all_workers(name):
  read = lambda rows: READERS[name](marked(rows))
  for run in (read, functools.partial(jax.eval_shape, read)):
    with pytest.raises((TypeError, ValueError), match=CURE):
      run(ROWS)


def test_gradients_that_wait_around_an_exchange_have_one_error_in_all_places():
  """Where types say whose gradients these are; elsewhere MultiSteps works."""
  sent = optax.MultiSteps(gradcomp.dense(**OVER), 2).gradient_transformation()
  first = lambda rows: jax.tree.map(lambda x: x[0], rows)
  local = lambda rows: sent.update(first(rows), sent.init(PARAMS))[0]
  places = dict(mesh=modes.mesh(N), in_specs=P("data"), out_specs=P())
  cure = "use accumulate= of gradcomp.value_and_grad in place of optax.MultiSteps"
  for run in (
    lambda: modes.run_with_state(modes.EXPLICIT, sent, [ROWS]),
    lambda: jax.eval_shape(jax.shard_map(local, **places), ROWS),
  ):
    with pytest.raises(ValueError, match=cure):
      run()


def test_jit_and_its_kin_take_the_leaf_apart():
  """As an argument, a result, a carry and what is donated, and jax.tree does not."""
  grads = marked(jax.tree.map(jnp.asarray, ROWS))
  assert jax.tree.structure(grads) == jax.tree.structure(PARAMS)
  double = lambda grads: jax.tree.map(lambda g: 2 * g, grads)

  def step(grads, doubles):
    grads = lax.cond(doubles, double, lambda grads: grads, grads)
    add = lambda total, _: (jax.tree.map(operator.add, total, grads), None)
    return jax.checkpoint(lambda x: lax.scan(add, x, None, length=3)[0])(grads)

  compiled = jax.jit(step, donate_argnums=0).lower(grads, True).compile()
  got = jax.device_get(jax.block_until_ready(compiled(grads, True)))
  assert all(x.is_deleted() for x in (grads["w"].rows, grads["b"].rows))
  assert_same_bits(
    {name: x.rows for name, x in got.items()}, double(double(double(ROWS)))
  )
  # What is no array of numbers, device_get alone takes.
  assert all(isinstance(x.rows, np.ndarray) for x in got.values())
  with pytest.raises(ValueError, match="not producing an array"):
    np.asarray(marked(ROWS)["w"])


def test_without_registries_it_is_a_node_and_exchanges_as_before():
  """If the first line fails, JAX has moved them: mesh/trees.py has their names."""
  assert len(IN_JIT) == 2
  code = """
import sys, types, jax, jax.numpy as jnp
name, fewer = "jax._src.tree_util", types.ModuleType("jax._src.tree_util")
real = sys.modules[name]
fewer.__dict__.update({x: y for x, y in vars(real).items() if x != "tracing_registry"})
sys.modules[name] = fewer
import gradcomp
sys.modules[name] = real
grads = {"w": gradcomp.PerWorker(jnp.array([[1.0, 3.0]]), "data")}
assert len(jax.tree.leaves(grads)) == 1 and jax.tree.leaves(grads)[0].shape == (1, 2)
tx = gradcomp.skip_nonfinite(gradcomp.dense(axis_name="data"), 2, axis_name="data")
with jax.set_mesh(jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))):
  state = tx.init({"w": jnp.zeros(2)})
  print(jax.jit(tx.update)(grads, state)[0]["w"])
"""
  command = [sys.executable, "-c", code]
  done = subprocess.run(command, capture_output=True, text=True, timeout=120)
  assert done.stdout == "[1. 3.]\n", done.stderr


def test_leaves_are_inspected_by_their_own_names():
  """Traced alone: tests/telemetry compares the numbers in all places."""
  with jax.set_mesh(modes.mesh(N)):
    params, state = steps.begun(steps.kept4, modes.mesh(N))
    inspect = functools.partial(gradcomp.telemetry.inspect_update, steps.kept4)
    *_, found = jax.eval_shape(inspect, marked(steps.normal(1, N)), state, params)
  assert found.leaves.keys() == {f"['{name}']" for name in steps.SHAPES}


CLIP = optax.chain(
  optax.clip_by_global_norm(20.0), optax.scale_by_schedule(lambda count: 0.5 - count)
)


@pytest.mark.parametrize("place", modes.modes_for(N))
def test_a_transformation_runs_on_each_workers_own_gradient(place):
  over = {} if place == modes.EXPLICIT else OVER  # types say the axis there
  own = gradcomp.wrappers.on_each_worker(CLIP, **over)
  tx = optax.chain(own, gradcomp.dense(**OVER))
  (got,), _ = modes.run_with_state(place, tx, [ROWS])[:2]
  norms = np.sqrt(sum((x.reshape(N, -1) ** 2).sum(1) for x in ROWS.values()))
  assert norms.min() < 20 < norms.max()
  for name, x in got.items():
    share = np.minimum(1, 20 / norms).reshape(N, *[1] * (x.ndim - 1))
    # A norm of eight squares, a quotient, and a mean of four: elements are below 16.
    expected = 0.5 * np.mean(share * ROWS[name], axis=0)
    np.testing.assert_allclose(x[0], expected, rtol=0, atol=4e-6)


def test_a_state_that_gradients_decide_or_a_shard_is_an_error():
  make = functools.partial(gradcomp.wrappers.on_each_worker, **OVER)
  own, cut = make(optax.scale_by_adam()), make(optax.centralize())
  update = lambda rows: own.update(rows, own.init(PARAMS), PARAMS)
  with pytest.raises(ValueError, match=r"gradients decide its \.mu\['b'\]"):
    jax.eval_shape(jax.vmap(update, axis_name="data"), ROWS)
  mesh, spec = jax.make_mesh((2, 2), BOTH, (AxisType.Auto,) * 2), P(*BOTH)
  local = lambda w: cut.update({"w": w}, cut.init(w))[0]
  mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
  with pytest.raises(ValueError, match=r"\['w'\] must be the whole gradient"):
    jax.eval_shape(mapped, jnp.ones((4, 4)))


@pytest.mark.parametrize("place", [modes.AUTO, modes.EXPLICIT, "shard_map", "vmap"])
def test_the_norm_of_each_workers_own_gradient(place):
  # Of batches of one example the gradient is the example, 3-4-5 and so on. Squares of
  # 2**70 times these would overflow. Roots of exact squares are exact.
  batch = np.float32([[3, 4], [6, 8], [0, 0], [5, 12]]) * np.float32(2.0**70)
  loss = lambda params, batch: jnp.mean(batch @ params["w"])
  params = {"w": np.ones(2, np.float32)}
  grads = lambda batch: gradcomp.value_and_grad(loss, **OVER)(params, batch)[1]
  norms = lambda batch: gradcomp.global_norm(grads(batch))
  mesh = modes.mesh(N, AxisType.Explicit if place == modes.EXPLICIT else AxisType.Auto)
  if place == "vmap":
    got = jax.jit(jax.vmap(norms, **OVER))(batch[:, None])
  else:
    of_all, spec = norms, P("data")
    if place == "shard_map":
      each = lambda batch: norms(batch)[None]
      of_all = jax.shard_map(each, mesh=mesh, in_specs=spec, out_specs=spec)
    with jax.set_mesh(mesh):
      got = jax.jit(of_all)(jax.device_put(batch, NamedSharding(mesh, spec)))
  np.testing.assert_array_equal(got, np.float32([5, 10, 0, 13]) * np.float32(2.0**70))


def test_along_several_axes_the_norm_needs_their_names():
  mesh = jax.make_mesh((2, 2), BOTH, (AxisType.Auto,) * 2)
  whole = {"in_specs": P(*BOTH), "out_specs": P("data"), "mesh": mesh}
  rows = np.float32([[3, 4], [5, 12]])
  norm = lambda **options: jax.shard_map(
    lambda x: gradcomp.global_norm(x, **options)[None], **whole
  )
  with pytest.raises(ValueError, match=r"`axis_name` must name .*\['data', 'model'\]"):
    jax.eval_shape(norm(), rows)
  np.testing.assert_array_equal(jax.jit(norm(**OVER))(rows), np.float32([5, 13]))
