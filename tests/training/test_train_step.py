"""A step trains alike wherever it runs: by make_train_step, in maps, in plain jit."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.core.state import is_state
from gradcomp._src.testing.modes import _of_sums
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits
from tests.support.cases import steps
from tests.support.cases.steps import OPTIMIZERS, OVER, N, dense

# Where an optimizer runs beside vmap, and on how many workers.
ROWS = [
  ("feedback", modes.AUTO, 3),
  ("local", modes.AUTO, N),
  ("local", modes.EXPLICIT, N),
  ("injected codec", "step", N),
  ("behind", "step", N),
  ("around", "shard_map", N),
]
IN_MAPS = ("flatten", "masks", "partition", "around")
SLOW = [(name, place, N) for name in OPTIMIZERS for place in ("step", "shard_map")]
SLOW += [(x, modes.AUTO, N) for x in OPTIMIZERS if x not in IN_MAPS]
NOT_EXPLICIT = (*IN_MAPS, "frozen around", "scaled")  # JAX has no rule for the last
SLOW += [(x, modes.EXPLICIT, N) for x in OPTIMIZERS if x not in NOT_EXPLICIT]
SLOW += [("feedback", "pmap", N)]


@functools.cache
def by_vmap(name, workers):
  return list(steps.trained("vmap", OPTIMIZERS[name], workers))


@pytest.mark.parametrize(
  "name, place, workers", [*ROWS, *slow(*(x for x in SLOW if x not in ROWS))]
)
def test_a_training_has_the_bits_of_vmap(name, place, workers):
  """Parameters and states, where each worker's own are typed so, and all others equal.

  Under Explicit axes residuals are in the units of addends, which are gradients over N,
  but where an optimizer is in a map.
  """
  around = name.endswith("around")
  given = place, OPTIMIZERS[name], workers
  found = list(steps.trained(*given, around=around))
  for got, expected in zip(found, by_vmap(name, workers), strict=True):
    assert_same_bits(got.params, expected.params)
    state = got.state
    if place == modes.EXPLICIT and name not in ("local", "zero"):
      scaled = lambda x: _of_sums(x, workers) if is_state(x) else x
      state = jax.tree.map(scaled, state, is_leaf=is_state)
    assert_same_bits(state, expected.state)
  specs = gradcomp.state_specs(expected.state, **OVER)
  pairs = zip(*map(jax.tree.leaves, (expected.state, specs)), strict=True)
  differing = [spec for x, spec in pairs if np.any(x != x[:1])]
  assert set(differing) <= {P("data")}
  assert differing or name in ("terngrad", "switch", "behind")  # they keep nothing


@pytest.mark.parametrize("name", ["clip", *slow("centralize")])
def test_a_norm_or_a_mean_in_allow_frozen_is_that_of_each_worker(name):
  front = {"clip": optax.clip_by_global_norm(0.1), "centralize": optax.centralize()}
  chain = optax.chain(front[name], dense, optax.sgd(0.1))
  tx = gradcomp.wrappers.allow_frozen(chain)
  got, expected = (
    list(steps.trained(place, tx))[-1].params
    for place, tx in ((modes.AUTO, tx), ("vmap", chain))
  )
  for leaf, x in expected.items():
    # Sums of 8,192 squares in another order.
    np.testing.assert_allclose(got[leaf], x, rtol=0, atol=1e-6, err_msg=leaf)


def test_a_state_that_was_made_before_the_mesh_is_an_error():
  tx, mesh = steps.kept4, modes.mesh(N)
  params, _ = steps.begun(tx, mesh)
  early = tx.init(jax.device_get(params))
  with pytest.raises(ValueError, match=r"residual.* must stack the parts of 4 workers"):
    jax.eval_shape(steps.step_of(tx), params, early, steps.targets_of(mesh, 1))


def mlp():
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  params = {"w": normal(16, 256) / 4, "b": normal(256), "v": normal(256, 32) / 16}

  def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)

  return loss_fn, params, {"x": normal(32, 16), "y": normal(32, 32)}


class ConvNet(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.GroupNorm(num_groups=2)(nn.Conv(8, (3, 3))(x)))
    return nn.Dense(10)(nn.LayerNorm()(x.mean((1, 2))))


def conv_net():
  rng = np.random.default_rng(1)
  x = rng.standard_normal((8, 6, 6, 3)).astype(np.float32)

  def loss_fn(params, batch):
    logits = ConvNet().apply(params, batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean()

  params = jax.jit(ConvNet().init)(jax.random.key(0), x[:1])
  return loss_fn, params, {"x": x, "y": rng.integers(10, size=8)}


def start(tx, params, batch, mesh):
  """Parameters, state and batch on the mesh."""
  params = jax.device_put(jax.tree.map(np.array, params), NamedSharding(mesh, P()))
  batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
  with jax.set_mesh(mesh):
    return params, jax.jit(tx.init)(params), batch


# An epsilon far above a gradient's rounding error: Adam divides what is zero but for
# rounding by its own size, and would make whole steps of it.
ADAM = optax.adam(1e-2, eps=1e-3)


@pytest.mark.parametrize(
  "model, made, kind",
  [
    (mlp, True, AxisType.Auto),
    (conv_net, False, AxisType.Explicit),
    *slow((mlp, True, AxisType.Explicit)),
  ],
)
def test_dense_training_is_ordinary_training(model, made, kind):
  """The trajectory of plain jit on the whole batch, without a mesh."""
  loss_fn, params, batch = model()
  tx, mesh = optax.chain(dense, ADAM), modes.mesh(N, kind)
  if made:
    chex.clear_trace_counter()
    counted = chex.assert_max_traces(loss_fn, n=1)  # nothing is traced a second time
    step = gradcomp.make_train_step(counted, tx, mesh=mesh, **OVER)
  else:
    step = jax.jit(modes.user_step(loss_fn, tx))
  ours, _, losses = modes.train(step, *start(tx, params, batch, mesh))
  alone = jax.jit(modes.user_step(loss_fn, ADAM, None))
  theirs, _, expected = modes.train(alone, params, jax.jit(ADAM.init)(params), batch)
  # The mean of 4 means against one mean: a few ulp, which 5 steps carry on.
  np.testing.assert_allclose(losses, expected, rtol=1e-5)
  # Gradients agree to some 1e-6; Adam divides by no less than its epsilon 1e-3, and 5
  # steps of 1e-2 make at most 5e-5 of that.
  chex.assert_trees_all_close(ours, theirs, rtol=0, atol=5e-5)
  assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(ours))


def test_a_step_averages_aux_and_donates_what_it_has_taken():
  """An error leaves parameters and state as they were."""
  loss_fn, params, batch = mlp()
  with_aux = lambda params, batch: (loss_fn(params, batch), jnp.mean(batch["x"]))
  mesh, tx = modes.mesh(N), optax.chain(gradcomp.qsgd(bits=8, **OVER), optax.sgd(0.1))
  options = gradcomp.TrainOptions(has_aux=True)
  make = functools.partial(gradcomp.make_train_step, with_aux, tx, mesh=mesh, **OVER)
  params, state, batch = start(tx, params, batch, mesh)
  kept = make(donate=False, options=options)(params, state, batch)
  # A mean of 4 means and a mean of all are within a few ulp of about 1.
  np.testing.assert_allclose(kept[2]["aux"], np.mean(batch["x"]), atol=1e-6)
  step = make(options=options)
  with pytest.raises(ValueError, match="workers can share equally"):
    step(params, state, jax.tree.map(lambda x: np.asarray(x)[1:], batch))
  assert not params["w"].is_deleted()
  assert_same_bits(step(params, state, batch), kept)
  assert params["w"].is_deleted()


def test_init_inside_and_outside_of_a_map_agree():
  """Inside: the worker's own; outside, under the mesh: all of them, sharded."""
  mesh, tx = modes.mesh(N), steps.kept4
  params = {"w": np.ones((6, 5), np.float32), "s": np.float32(1)}
  specs = gradcomp.state_specs(jax.eval_shape(tx.init, params), **OVER)
  mapped = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)
  with jax.set_mesh(mesh):
    made = jax.jit(mapped)(params), tx.init(params), jax.jit(tx.init)(params)
  for state in made:
    assert jax.tree.map(jnp.shape, state.residual) == {"w": (N * 6, 5), "s": (N,)}
    for leaf in state.residual.values():
      assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), leaf.ndim)


def test_users_may_forbid_promotion():
  """JAX's strictest settings, which some projects train with."""
  loss_fn, params, batch = mlp()
  params |= {"b": np.zeros((1, 256), np.float32)}
  norms = gradcomp.qsgd(bits=6, levels="uniform", norm="l2", feedback="error", **OVER)
  nearest = gradcomp.qsgd(bits=8, bucket_size=None, rounding="nearest", **OVER)
  for tx in (norms, nearest):
    tx, mesh = optax.chain(tx, optax.sgd(0.1)), modes.mesh(N)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
      step = gradcomp.make_train_step(loss_fn, tx, mesh=mesh, **OVER)
      step.eval_shape(*start(tx, params, batch, mesh))
