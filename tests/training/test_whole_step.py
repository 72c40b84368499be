"""A trainer's own step, in one map: the bits of the way with gradients of all workers.

Sums of the loss and rates are exact in float32, or JAX contracts products differently
in the two programs.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.wrappers import whole_step
from tests.errors import table
from tests.support.assertions import assert_same_bits
from tests.support.cases.steps import OVER, explicit_mesh, put

AUTO = AxisType.Auto
MESHES = {
  "workers": jax.make_mesh((4,), ("data",), (AUTO,)),
  "model": jax.make_mesh((2, 2), ("data", "model"), (AUTO, AUTO)),
}
EXCHANGES = {
  "dense": gradcomp.dense(**OVER),
  "qsgd": gradcomp.qsgd(bits=4, min_leaf_size=0, **OVER),
  "onebit": gradcomp.compress(gradcomp.codecs.OneBit(), min_leaf_size=0, **OVER),
  "two_shot": gradcomp.qsgd(bits=4, exchange="two_shot", feedback="error", **OVER),
}
KEY = jax.random.key(0)
PARAMS = {"b": jnp.zeros(32), "o": jax.random.normal(KEY, (64, 32)) / 8}
PARAMS["w"] = jax.random.normal(KEY, (128, 64)) / 8
X = jax.random.normal(KEY, (16, 128))


def specs_on(mesh):
  model = "model" if "model" in mesh.shape else None
  return {"b": P(), "o": P(model, None), "w": P(None, model)}


def loss_on(mesh, constrained=True):
  """The mean loss, with a constraint over all axes of the mesh."""
  spec = P(*mesh.axis_names) if constrained else P()

  def loss_fn(params, x):
    h = jnp.tanh(x @ params["w"])
    h = with_sharding_constraint(h, spec) if constrained else h
    return jnp.mean((h @ params["o"] + params["b"] - x[:, :32]) ** 2)

  return loss_fn


def trainer(value_and_grad, norm, clip=None):
  def step(state, batch):
    loss, grads = value_and_grad(state.params, batch)
    metrics = {"loss": loss, "norm": norm(grads)}
    if clip:
      grads, _ = clip.update(grads, clip.init(state.params))
    return state.apply_gradients(grads=grads), metrics

  return step


def state_on(mesh, exchange, rate=0.125):
  places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs_on(mesh))
  params = jax.device_put(PARAMS, places)
  tx = optax.chain(exchange, optax.sgd(rate))
  state = TrainState.create(apply_fn=None, params=params, tx=tx)
  own = gradcomp.init_state(tx, params, param_specs=specs_on(mesh), **OVER)
  return state.replace(opt_state=own)


def taken(step, state, mesh, count=3):
  batch, step = put(X, mesh, "data"), jax.jit(step)
  for _ in range(count):
    state, metrics = step(state, batch)
  return state, metrics


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("axes", MESHES)
def test_it_takes_the_steps_of_gradients_of_all_workers(axes, exchange):
  mesh, exchange = MESHES[axes], EXCHANGES[exchange]
  loss_fn, specs = loss_on(mesh), specs_on(mesh)
  with jax.set_mesh(mesh):
    grads = gradcomp.value_and_grad(loss_fn, param_specs=specs, **OVER)
    outside = trainer(grads, gradcomp.global_norm)
    inside = trainer(jax.value_and_grad(loss_fn), optax.tree.norm)
    inside = whole_step(inside, param_specs=specs, **OVER)
    steps = (taken(x, state_on(mesh, exchange), mesh) for x in (outside, inside))
    (expected, old), (state, new) = steps
  state, expected = map(jax.tree.leaves, (state, expected))
  assert_same_bits(state, expected)
  assert [x.sharding.spec for x in state] == [x.sharding.spec for x in expected]
  assert_same_bits(new["loss"], old["loss"])
  # The two programs add squares in another order.
  assert jnp.allclose(new["norm"], old["norm"].mean(), rtol=1e-6)


def test_a_clip_before_the_exchange_is_each_workers_own():
  mesh, loss_fn = MESHES["workers"], loss_on(MESHES["workers"], constrained=False)
  limit = 0.05
  clip = optax.clip_by_global_norm(limit)
  with jax.set_mesh(mesh):
    step = trainer(jax.value_and_grad(loss_fn), optax.tree.norm, clip)
    state = state_on(mesh, EXCHANGES["dense"], rate=1.0)
    state, _ = taken(whole_step(step, **OVER), state, mesh, count=1)
  each = [jax.grad(loss_fn)(PARAMS, x) for x in jnp.split(X, 4)]
  assert min(map(optax.tree.norm, each)) > limit
  each = [clip.update(g, optax.EmptyState())[0] for g in each]
  mean = jax.tree.map(lambda *x: sum(x) / 4, *each)
  moved = jax.tree.map(lambda a, b: a - b, PARAMS, state.params)
  for name, x in moved.items():  # a difference of numbers around 1
    assert jnp.allclose(x, mean[name], atol=1e-6), name


def test_words_travel_between_workers_alone():
  mesh = MESHES["model"]
  step = trainer(jax.value_and_grad(loss_on(mesh)), optax.tree.norm)
  with jax.set_mesh(mesh):
    made = whole_step(step, param_specs=specs_on(mesh), **OVER)
    compiled = jax.jit(made).lower(state_on(mesh, EXCHANGES["qsgd"]), X).compile()
  sent = gradcomp.wire_report(compiled).collectives
  assert {x.axis for x in sent if x.dtype == "u32"} == {"data"}


def test_the_compiler_obeys_the_rest_of_a_spec():
  """Half the products a device, where ``model`` has two."""

  def flops(spec):
    def step(state, x):
      loss = lambda w: jnp.mean(with_sharding_constraint(x @ w, spec) ** 2)
      updates, opt_state = tx.update(jax.grad(loss)(state[0]), state[1])
      return (state[0] + updates, opt_state), {}

    made = whole_step(step, param_specs=P(), **OVER)
    return jax.jit(made).lower(state, X).compile().cost_analysis()["flops"]

  tx = EXCHANGES["dense"]
  with jax.set_mesh(MESHES["model"]):
    state = PARAMS["w"], tx.init(PARAMS["w"])
    assert flops(P("data", "model")) < 0.6 * flops(P("data"))


def test_keys_of_a_batch_differ_and_counts_stay():
  mesh = MESHES["workers"]

  def step(state, batch, key):
    draw = jax.random.uniform(key, (4,))
    return state, {"draw": draw, "count": jnp.uint32(3), "own": batch.sum()}

  state = gradcomp.qsgd(**OVER).init(jnp.ones(8)), jnp.ones(8)
  with jax.set_mesh(mesh):
    made = whole_step(step, **OVER)
    _, metrics = jax.jit(made)(state, jnp.arange(8.0), KEY)
  draws = [jax.random.uniform(jax.random.fold_in(KEY, i), (4,)) for i in range(4)]
  assert jnp.allclose(metrics["draw"], sum(draws) / 4, atol=1e-6)  # of numbers below 1
  assert (metrics["count"], metrics["own"]) == (3, 7.0)


ONE = gradcomp.qsgd(**OVER).init(jnp.ones(8)), {"w": jnp.ones((8, 2))}
ROWS = """
traced(x=jnp.ones(7)) -> `batch` ... 4 workers ... (7,)
traced(state=ONE[1]) -> `state` must hold
traced("model") -> `param_specs` must give
traced("model", param_specs=v) for v in {"v": P("model")}, P("model") -> `param_specs`
  must be like
traced(x=jnp.ones(16)) -> `step` must not map
traced("explicit") -> `axis_name` must be an Auto axis
"""


def traced(axes="workers", state=ONE, x=X[:8, 0], **options):
  def step(state, x):
    return state, jax.shard_map(jnp.tanh, in_specs=P("data"), out_specs=P("data"))(x)

  with jax.set_mesh(explicit_mesh() if axes == "explicit" else MESHES[axes]):
    return jax.eval_shape(whole_step(step, **OVER, **options), state, x)


test_bad_calls = table.refused(ROWS, globals())
