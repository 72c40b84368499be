"""Frozen parameters are not exchanged, and stay as they are to the bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits, says

WORKERS = 4
LABELS = {"body": "frozen", "head": "train"}
TRAINED = {"body": False, "head": True}
FROZEN = {"body": True, "head": False}
exchange = gradcomp.qsgd(
  bits=4, bucket_size=64, rounding="nearest", min_leaf_size=0, axis_name="data"
)


def partitioned():
  parts = {"train": optax.chain(exchange, optax.adam(0.1))}
  return optax.partition({**parts, "frozen": optax.set_to_zero()}, LABELS)


def masked():
  """One transformation over all leaves is behind the zeros: it sees both."""
  return optax.chain(
    optax.masked(exchange, TRAINED),
    optax.masked(optax.set_to_zero(), FROZEN),
    optax.clip_by_global_norm(100.0),
    optax.adam(0.1),
  )


def loss_fn(params, x):
  return jnp.mean((jnp.tanh(x @ params["body"]) @ params["head"] - x) ** 2)


def problem():
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  return {"body": normal(64, 64), "head": normal(64, 64)}, normal(8 * WORKERS, 64)


def step(optimizer, params, state, x):
  loss, grads = gradcomp.value_and_grad(loss_fn, axis_name="data")(params, x)
  updates, state = optimizer.update(grads, state, params)
  return optax.apply_updates(params, updates), state, loss


def placed(mesh, params, x, optimizer):
  params = jax.device_put(params, NamedSharding(mesh, P()))
  with jax.set_mesh(mesh):
    state = optimizer.init(params)
  return params, state, jax.device_put(x, NamedSharding(mesh, P("data")))


def compiled(mode, optimizer, params, x):
  """A compiled step of a mode with one program, and its arguments."""
  explicit = mode.endswith("explicit")
  mesh = modes.mesh(WORKERS, AxisType.Explicit if explicit else AxisType.Auto)
  args = placed(mesh, params, x, optimizer)
  if mode.startswith("train_step"):
    run = gradcomp.make_train_step(
      loss_fn, optimizer, axis_name="data", mesh=mesh, donate=False
    )
  elif mode in (modes.AUTO, modes.EXPLICIT):
    run = jax.jit(functools.partial(step, optimizer))
  else:
    specs = gradcomp.state_specs(args[1], axis_name="data")
    mapped = jax.shard_map(
      functools.partial(step, optimizer),
      mesh=mesh,
      in_specs=(P(), specs, P("data")),
      out_specs=(P(), specs, P()),
      check_vma=mode == "shard_map",
    )
    run = jax.jit(mapped)
  return run.lower(*args).compile(), args


@pytest.mark.parametrize(
  "mode, make",
  [
    (modes.EXPLICIT, partitioned),
    (modes.AUTO, partitioned),
    ("shard_map", partitioned),
    ("train_step", partitioned),
    ("train_step_explicit", masked),
    *slow(
      (modes.AUTO, masked),
      (modes.EXPLICIT, masked),
      ("shard_map", masked),
      ("shard_map_unchecked", partitioned),
      ("train_step_explicit", partitioned),
    ),
  ],
)
def test_a_frozen_leaf_stays_and_is_not_sent(mode, make):
  params, x = problem()
  optimizer = make()
  if mode in (modes.AUTO, modes.EXPLICIT, "shard_map"):
    optimizer = gradcomp.wrappers.allow_frozen(optimizer)
  run, (before, state, rows) = compiled(mode, optimizer, params, x)
  after, state, _ = run(before, state, rows)
  after, *_ = run(after, state, rows)
  assert_same_bits(after["body"], params["body"])
  assert np.abs(after["head"] - params["head"]).mean() > 0.1  # two steps of Adam
  explained = gradcomp.explain(optimizer, params, workers=WORKERS)
  assert [leaf.path for leaf in explained.leaves] == ["['head']"]
  # Beside it there is the mean of the loss: an all-reduce of 4 bytes sends 6.
  assert gradcomp.wire_report(run).bytes_sent == explained.bytes_sent + 6


@pytest.mark.parametrize("transform", [jax.vmap, *slow(jax.pmap)])
def test_where_no_type_tells_optax_freezes_alone(transform):
  params, x = problem()
  optimizer = partitioned()
  everywhere = jax.tree.map(lambda leaf: np.stack([leaf] * WORKERS), params)
  state = transform(optimizer.init, axis_name="data")(everywhere)
  run = transform(functools.partial(step, optimizer), axis_name="data")
  after, *_ = run(everywhere, state, x.reshape(WORKERS, -1, 64))
  assert_same_bits(after["body"], everywhere["body"])
  assert np.abs(after["head"] - everywhere["head"]).mean() > 0.05  # one step of Adam


def test_weights_of_a_frozen_leaf_decay_as_optax_says():
  """Its gradient is not read, but its update is not zero."""
  params, x = problem()
  decayed = optax.chain(partitioned(), optax.add_decayed_weights(-0.5))
  run, args = compiled(
    modes.EXPLICIT, gradcomp.wrappers.allow_frozen(decayed), params, x
  )
  after, *_ = run(*args)
  np.testing.assert_array_equal(after["body"], 0.5 * params["body"])


@pytest.mark.parametrize(
  "optimizer",
  [
    optax.chain(optax.masked(exchange, TRAINED), optax.sgd(0.1)),
    optax.chain(optax.clip_by_global_norm(1.0), partitioned(), optax.scale(0.5)),
  ],
  ids=["left_as_it_is", "read_by_another"],
)
def test_a_train_step_refuses_a_leaf_that_nobody_has_averaged(optimizer):
  """In the second, the norm in front reads the gradient of the frozen leaf."""
  params, x = problem()
  with pytest.raises(ValueError, match=says("`optimizer`", "['body']", "set_to_zero")):
    compiled("train_step", optimizer, params, x)


def test_a_frozen_leaf_that_another_axis_cuts():
  """And stays sharded over it."""
  kinds = (AxisType.Explicit,) * 2
  mesh = jax.make_mesh((2, 2), ("data", "model"), kinds, devices=jax.devices()[:4])
  put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
  params, x = problem()
  params = {"head": put(params["head"], None, "model"), "body": put(x[0], "model")}
  x = put(x, "data")
  loss = lambda params, x: jnp.mean((x @ params["head"]) * params["body"])
  optimizer = gradcomp.wrappers.allow_frozen(partitioned())
  with jax.set_mesh(mesh):
    state = optimizer.init(params)

  @jax.jit
  def updated(params, state, x):
    _, grads = gradcomp.value_and_grad(loss, axis_name="data")(params, x)
    return optax.apply_updates(params, optimizer.update(grads, state, params)[0])

  after = updated(params, state, x)
  assert_same_bits(after["body"], params["body"])
  for name, leaf in params.items():
    assert after[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim)


def test_a_part_of_the_arguments_is_trained():
  """By ``argnums``: the other part has no gradient, and what is None has none."""
  params, x = problem()
  adapters = {"body": None, "head": np.zeros((64, 64), np.float32)}

  def adapted(adapters, base, x):
    return loss_fn({**base, "head": base["head"] + adapters["head"]}, x)

  optimizer = optax.chain(exchange, optax.adam(0.1))
  mesh = modes.mesh(WORKERS, AxisType.Explicit)
  adapters, state, x = placed(mesh, adapters, x, optimizer)
  base = jax.device_put(params, NamedSharding(mesh, P()))

  @jax.jit
  def adapt(adapters, state, base, x):
    grad_fn = gradcomp.value_and_grad(adapted, axis_name="data")
    loss, grads = grad_fn(adapters, base, x)
    updates, state = optimizer.update(grads, state, adapters)
    return optax.apply_updates(adapters, updates), state, loss

  after, state, before = adapt(adapters, state, base, x)
  assert after["body"] is None
  assert adapt(after, state, base, x)[2] < before


def test_a_leaf_that_no_exchange_sees_is_named_in_the_errors_of_jax():
  """Under Explicit axes JAX refuses to multiply its addends by a rate."""
  parts = {"train": exchange, "frozen": optax.inject_hyperparams(optax.sgd)(0.1)}
  optimizer = gradcomp.wrappers.allow_frozen(optax.partition(parts, LABELS))
  mesh = modes.mesh(WORKERS, AxisType.Explicit)
  params, state, x = placed(mesh, *problem(), optimizer)
  with pytest.raises(Exception, match="reduced") as error:
    jax.eval_shape(functools.partial(step, optimizer), params, state, x)
  assert "optax.partition" in "".join(error.value.__notes__)
