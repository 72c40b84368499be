"""Compositions of optax train in a typed step as they do by vmap, bit for bit.

Losses are linear and numbers powers of two, so that no compiler rounds differently.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import QSGD
from tests.plugins.slow_cases import one_in
from tests.support import modes
from tests.support.assertions import assert_same_bits
from tests.support.cases.citizen import error4, gradients, pick

SGD = optax.sgd(0.5, momentum=0.5)  # powers of two: no compiler rounds it differently
CHOSEN, OTHERS = {"b": False, "m": True}, {"b": True, "m": False}
sent, dense = error4(axis_name="data"), gradcomp.dense(axis_name="data")
injected = optax.inject_hyperparams(gradcomp.compress)(
  codec=QSGD(bits=4, bucket_size=32), axis_name="data", feedback="error"
)
multi_steps = lambda tx: optax.MultiSteps(tx, 2).gradient_transformation()
COMPOSITIONS = {
  "chain": optax.chain(sent, SGD),
  "masked": optax.chain(optax.masked(sent, CHOSEN), optax.masked(dense, OTHERS), SGD),
  "partition": optax.chain(optax.partition({True: sent, False: dense}, CHOSEN), SGD),
  "inject_hyperparams": optax.chain(injected, SGD),
  "flatten": optax.chain(optax.flatten(sent), SGD),
  "apply_if_finite": optax.chain(sent, optax.apply_if_finite(SGD, 3)),
  "MultiSteps_after": optax.chain(sent, multi_steps(SGD)),
}
AROUND = multi_steps(optax.chain(sent, SGD))


def problem():
  """A loss that is linear: its gradient is the batch. Two workers, three batches."""
  trees = [pick(gradients(seed), *CHOSEN) for seed in range(6)]
  stack = functools.partial(jax.tree.map, lambda *xs: jnp.stack(xs))
  pairs = [stack(*trees[i : i + 2]) for i in (0, 2, 4)]

  def loss_fn(params, batch):
    return optax.tree.vdot(params, jax.tree.map(lambda leaf: leaf[0], batch))

  return loss_fn, trees[0], pairs


def emulated(optimizer):
  """The parameters after each step, by vmap, where nothing is typed."""
  _, params, batches = problem()
  update = jax.jit(jax.vmap(optimizer.update, axis_name="data"))
  whole = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), params)
  state = jax.vmap(optimizer.init, axis_name="data")(whole)
  results = []
  for grads in batches:
    updates, state = update(grads, state)
    first, second = (jax.tree.map(lambda u, i=i: u[i], updates) for i in range(2))
    assert_same_bits(first, second)
    params = optax.apply_updates(params, first)
    results.append(params)
  return results


def assert_trains_as_emulated(optimizer, params, state):
  """In a typed shard_map: what comes out is proved to be equal on all workers."""
  loss_fn, _, batches = problem()
  step = gradcomp.make_train_step(
    loss_fn, optimizer, axis_name="data", mesh=modes.mesh(2), donate=False
  )
  for batch, expected in zip(batches, emulated(optimizer), strict=True):
    params, state, _ = step(params, state, batch)
    assert_same_bits(params, expected)
  assert step._cache_size() == 1  # traces alone would not show other shardings


@pytest.mark.parametrize(
  "name",
  one_in(3, COMPOSITIONS),
)
def test_composes_in_a_typed_train_step(name):
  optimizer, mesh = COMPOSITIONS[name], modes.mesh(2)
  params = jax.device_put(problem()[1], NamedSharding(mesh, P()))
  with jax.set_mesh(mesh):
    state = optimizer.init(params)
  assert_trains_as_emulated(optimizer, params, state)


def init_around(params):
  """MultiSteps adds up what is not sent yet: it differs, and must be typed so."""
  state = AROUND.init(params)
  return state._replace(
    acc_grads=gradcomp.defer_reduction(state.acc_grads, axis_name="data")
  )


def test_multi_steps_around_it_inside_one_typed_map():
  _, params, batches = problem()

  def train(params, *batches):
    state = init_around(params)
    for grads in batches:
      grads = jax.tree.map(lambda leaf: leaf[0], grads)
      updates, state = AROUND.update(grads, state)
      params = optax.apply_updates(params, updates)
    return params

  specs = (P(), P("data"), P("data"))
  mapped = jax.shard_map(train, mesh=modes.mesh(2), in_specs=specs, out_specs=P())
  trained = jax.jit(mapped)(params, *batches[:2])
  assert_same_bits(trained, emulated(AROUND)[1])


def test_multi_steps_around_it_in_a_typed_train_step():
  params = jax.device_put(problem()[1], NamedSharding(modes.mesh(2), P()))
  with jax.set_mesh(modes.mesh(2)):
    specs = gradcomp.state_specs(jax.eval_shape(AROUND.init, params), axis_name="data")
  mapped = jax.shard_map(init_around, mesh=modes.mesh(2), in_specs=P(), out_specs=specs)
  assert_trains_as_emulated(AROUND, params, jax.jit(mapped)(params))


@pytest.mark.parametrize("name", [*COMPOSITIONS, "MultiSteps_around"])
def test_state_specs(name):
  """Residuals differ between workers, and gradients that are yet to be sent."""
  optimizer, params = COMPOSITIONS.get(name, AROUND), problem()[1]
  fields = (".residual",) if name in COMPOSITIONS else (".residual", ".acc_grads")
  with jax.set_mesh(modes.mesh(2)):
    states = optimizer.init(params), jax.eval_shape(optimizer.init, params)
  for state in states:
    specs = gradcomp.state_specs(state, axis_name="data")
    chex.assert_trees_all_equal_structs(specs, state)
    found = jax.tree_util.tree_leaves_with_path(specs)
    for path, spec in found:
      differs = any(field in jax.tree_util.keystr(path) for field in fields)
      assert spec == (P("data") if differs else P()), path
    assert {spec for _, spec in found} == {P(), P("data")}
