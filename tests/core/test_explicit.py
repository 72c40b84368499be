"""Training in plain jit, under Explicit axes, agrees with maps and with one device."""

import contextlib
import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import QSGD
from gradcomp.exchange import TwoShot
from tests.plugins.slow_cases import slow
from tests.support.assertions import assert_same_bits
from tests.support.modes import train, user_step

WORKERS = 4
BOTH = ("host", "chip")
WHOLE = P()
CODEC = QSGD(bits=8, bucket_size=64)


def explicit_mesh(shape=(WORKERS,), names=("data",)):
  count = int(np.prod(shape))
  kinds = (AxisType.Explicit,) * len(names)
  return jax.make_mesh(shape, names, kinds, devices=jax.devices()[:count])


def place(tree, mesh, spec=WHOLE):
  """Copies, for no step may see what another has donated."""
  return jax.device_put(jax.tree.map(np.array, tree), NamedSharding(mesh, spec))


def start(optimizer, params, batch, mesh, axis_name="data"):
  """Parameters, state and batch on the mesh."""
  params = place(params, mesh)
  with jax.set_mesh(mesh):
    state = optimizer.init(params)
  return params, state, place(batch, mesh, P(axis_name))


def plain_jit(loss_fn, optimizer, axis_name="data"):
  """The step of a user in plain jit; with no axis, the same on one device."""
  return jax.jit(user_step(loss_fn, optimizer, axis_name))


def is_placed(x, mesh, spec):
  return x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


def typed_unreduced(tree):
  """The axes that every leaf is unreduced over; they must be the same."""
  (axes,) = {
    frozenset(jax.typeof(x).sharding.spec.unreduced) for x in tree_leaves(tree)
  }
  return axes


tree_leaves = jax.tree.leaves


def mlp_loss(params, batch):
  hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
  return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


def mlp():
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  params = {"w": normal(16, 256) / 4, "b": normal(256), "v": normal(256, 32) / 16}
  return mlp_loss, params, {"x": normal(32, 16), "y": normal(32, 32)}


class ConvNet(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.GroupNorm(num_groups=2)(nn.Conv(8, (3, 3))(x)))
    return nn.Dense(10)(nn.LayerNorm()(x.mean((1, 2))))


def conv_net():
  rng = np.random.default_rng(1)
  batch = {
    "x": rng.standard_normal((8, 6, 6, 3)).astype(np.float32),
    "y": rng.integers(10, size=8),
  }

  def loss_fn(params, batch):
    logits = ConvNet().apply(params, batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean()

  return loss_fn, ConvNet().init(jax.random.key(0), batch["x"][:1]), batch


class Block(nnx.Module):
  def __init__(self, rngs):
    self.norms = nnx.List([nnx.LayerNorm(16, rngs=rngs) for _ in range(2)])
    self.attention = nnx.MultiHeadAttention(
      num_heads=2, in_features=16, decode=False, rngs=rngs
    )
    self.up = nnx.Linear(16, 32, rngs=rngs)
    self.down = nnx.Linear(32, 16, rngs=rngs)

  def __call__(self, x):
    x = x + self.attention(self.norms[0](x))
    return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


def transformer_block():
  graph, params = nnx.split(Block(nnx.Rngs(0)))
  batch = np.random.default_rng(2).standard_normal((2, 8, 6, 16)).astype(np.float32)

  def loss_fn(params, batch):
    return jnp.mean((nnx.merge(graph, params)(batch["x"]) - batch["y"]) ** 2)

  return loss_fn, params, dict(zip("xy", batch, strict=True))


@pytest.mark.parametrize(
  "model, plain",
  [
    # An epsilon far above a gradient's rounding error: Adam divides what is zero but
    # for rounding by its own size, and would make whole steps of it.
    (conv_net, optax.adam(1e-2, eps=1e-3)),
    *slow((transformer_block, optax.sgd(0.1, momentum=0.9))),
  ],
  ids=["conv_net-adam", "transformer_block-sgd"],
)
def test_dense_training_is_ordinary_training(model, plain):
  """The trajectory of plain jit on the whole batch, without a mesh."""
  loss_fn, params, batch = model()
  optimizer = optax.chain(gradcomp.dense(axis_name="data"), plain)
  mesh = explicit_mesh()
  args = start(optimizer, params, batch, mesh)
  ours, _, losses = train(plain_jit(loss_fn, optimizer), *args)
  step = plain_jit(loss_fn, plain, axis_name=None)
  alone, _, expected = train(step, params, plain.init(params), batch)
  # The mean of 4 means against one mean: a few ulp, which 5 steps carry on.
  np.testing.assert_allclose(losses, expected, rtol=1e-5)
  # Gradients agree to some 1e-6; Adam divides by no less than its epsilon 1e-3, and 5
  # steps of 1e-2 make at most 5e-5 of that. SGD's are smaller.
  chex.assert_trees_all_close(ours, alone, rtol=0, atol=5e-5)
  assert all(is_placed(leaf, mesh, P()) for leaf in jax.tree.leaves(ours))


def test_aux_and_static_arguments():
  """``aux`` is averaged; what is no array passes through."""

  def loss_fn(params, batch, *, norm, scale):
    assert norm in ("l1", "l2")
    error = batch["x"] @ params["w"] - batch["y"][:, :1]
    value = jnp.mean(jnp.abs(error) if norm == "l1" else error**2)
    return scale * value, {"mean": batch["x"].mean()}

  _, params, batch = mlp()
  mesh = explicit_mesh()
  grad_fn = gradcomp.value_and_grad(loss_fn, axis_name="data", has_aux=True)
  tx = gradcomp.dense(axis_name="data")

  @functools.partial(jax.jit, static_argnames="norm")
  def mean_gradient(params, state, batch, scale, norm):
    (loss, aux), grads = grad_fn(params, batch, norm=norm, scale=scale)
    assert typed_unreduced(grads) == {"data"}
    return (loss, aux), tx.update(grads, state)[0]

  args = start(tx, params, batch, mesh)
  got = mean_gradient(*args, jnp.float32(2), norm="l1")
  expected = jax.value_and_grad(loss_fn, has_aux=True)(
    params, batch, norm="l1", scale=2.0
  )
  # A mean of 4 means and a mean of all: a few ulp of values about 1.
  chex.assert_trees_all_close(got, expected, rtol=1e-6, atol=2e-6)


def test_compressed_step_learns_and_sends_words():
  loss_fn, params, batch = mlp()
  mesh = explicit_mesh()
  tx = gradcomp.compress(CODEC, axis_name="data", exchange="two_shot", feedback="error")
  optimizer = optax.chain(tx, optax.adam(1e-2))
  args = start(optimizer, params, batch, mesh)
  step = plain_jit(loss_fn, optimizer).lower(*args).compile()
  report = gradcomp.wire_report(step)
  # The mean of the loss is one float, of which a worker sends 2 * 3/4.
  words = [c for c in report.collectives if c.dtype == "u32"]
  (mean,) = [c for c in report.collectives if c.dtype != "u32"]
  assert (mean.kind, mean.dtype, mean.bytes_sent) == ("all-reduce", "f32", 6)
  assert sorted(c.kind for c in words) == ["all-gather", "all-to-all"]
  params, state, losses = train(step, *args, steps=30)
  assert losses[-1] < 0.5 * losses[0]
  assert all(is_placed(leaf, mesh, P()) for leaf in params.values())
  for name, leaf in state[0].residual.items():
    assert is_placed(leaf, mesh, P("data"))
    rows, *others = params[name].shape
    chex.assert_shape(leaf, (WORKERS * rows, *others))
    assert np.any(leaf)


def linear_loss(params, batch):
  """With one row a worker, its gradient is the row, exactly."""
  return sum(jnp.vdot(params[k], batch[k].mean(0)) for k in params)


def linear(workers=WORKERS):
  rng = np.random.default_rng(3)
  shapes = {"w": (40, 30), "b": (77,), "s": ()}
  params = {k: np.ones(shape, np.float32) for k, shape in shapes.items()}
  rows = {
    k: rng.standard_normal((workers, *shape)).astype(np.float32)
    for k, shape in shapes.items()
  }
  return params, rows


def mean_in_jit(tx, params, rows, mesh, axis_name, expected_axes):
  """``update`` in plain jit, once, and its state."""
  params, state, rows = start(tx, params, rows, mesh, axis_name)

  @jax.jit
  def once(params, state, rows):
    _, grads = gradcomp.value_and_grad(linear_loss, axis_name=axis_name)(params, rows)
    assert typed_unreduced(grads) == set(expected_axes)
    return tx.update(grads, state)

  return once(params, state, rows)


@pytest.mark.parametrize("exchange", ["all_gather", TwoShot(feedback=False)])
def test_axes_are_taken_from_the_type(exchange):
  """Nothing is kept here: ``init`` does not know the axes that only types tell."""
  params, rows = linear()
  make = functools.partial(
    gradcomp.qsgd, bits=4, bucket_size=64, exchange=exchange, feedback=None
  )
  named, typed = (
    mean_in_jit(tx, params, rows, explicit_mesh(), "data", {"data"})[0]
    for tx in (make(axis_name="data"), make())
  )
  assert_same_bits(typed, named)


@pytest.mark.parametrize("exchange", ["two_shot", *slow("hierarchical")])
def test_two_axes_agree_with_shard_map(exchange):
  """Sums of addends, g / 8, and means of samples have the same bits."""
  workers = 8
  params, rows = linear(workers)
  mesh = explicit_mesh((2, 4), BOTH)
  tx = gradcomp.qsgd(
    bits=4, bucket_size=64, axis_name=BOTH, exchange=exchange, feedback="error"
  )
  total, state = mean_in_jit(tx, params, rows, mesh, BOTH, BOTH)

  def local(params, state, rows):
    _, grads = gradcomp.value_and_grad(linear_loss, axis_name=BOTH)(params, rows)
    return tx.update(grads, state)

  in_map = start(tx, params, rows, mesh, BOTH)
  specs = gradcomp.state_specs(in_map[1], axis_name=BOTH)
  mean, map_state = jax.jit(
    jax.shard_map(
      local, mesh=mesh, in_specs=(P(), specs, P(BOTH)), out_specs=(P(), specs)
    )
  )(*in_map)
  assert_same_bits(total, mean)
  # A residual is kept in the units of what is sent: here addends, there samples.
  samples = jax.tree.map(lambda x: x * workers, state.residual)
  assert_same_bits(samples, map_state.residual)
  # What an owner keeps is what the sum, which is the mean, has lost.
  assert_same_bits(state.server_residual, map_state.server_residual)


@pytest.mark.parametrize("in_context", [True, False], ids=["set_mesh", "no_context"])
def test_defer_reduction_in_plain_jit(in_context):
  """For a model of matrix products, which JAX can differentiate to addends itself."""

  def loss_fn(params, batch):
    hidden = jax.nn.relu(jnp.einsum("bi,ih->bh", batch["x"], params["w"]))
    logits = hidden @ params["v"]
    return optax.softmax_cross_entropy(logits, batch["y"]).mean()

  _, params, batch = mlp()
  del params["b"]
  batch["y"] = np.asarray(jax.nn.softmax(batch["y"]))
  tx = gradcomp.dense(axis_name="data")

  def update(deferred, params, state, batch):
    if deferred:
      grads = jax.grad(loss_fn)(
        gradcomp.defer_reduction(params, axis_name="data"), batch
      )
    else:
      _, grads = gradcomp.value_and_grad(loss_fn, axis_name="data")(params, batch)
    assert typed_unreduced(grads) == {"data"}
    return tx.update(grads, state)[0]

  mesh = explicit_mesh()
  args = start(tx, params, batch, mesh)
  with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
    got = jax.jit(functools.partial(update, True))(*args)
    expected = jax.jit(functools.partial(update, False))(*args)
  # Divided by N before or after the backward pass: a few ulp of values below 0.1.
  chex.assert_trees_all_close(got, expected, rtol=0, atol=1e-7)
  assert all(is_placed(leaf, mesh, P()) for leaf in got.values())


def test_train_step_agrees_with_plain_jit():
  loss_fn, params, batch = mlp()
  optimizer = optax.chain(gradcomp.dense(axis_name="data"), optax.sgd(0.1))
  mesh = explicit_mesh()
  made = gradcomp.make_train_step(
    loss_fn, optimizer, axis_name="data", mesh=mesh, donate=False
  )
  args = start(optimizer, params, batch, mesh)
  ours, theirs = (train(x, *args)[0] for x in (made, plain_jit(loss_fn, optimizer)))
  # One divides by N before the sum, the other behind it, which is exact for 4; but XLA
  # fuses the two programs differently: a few ulp of parameters of up to 4.
  chex.assert_trees_all_close(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
  "shape, names", [((1, 2), ("data", "model")), *slow(((1,), ("data",)))]
)
def test_an_axis_of_one_device(shape, names):
  loss_fn, params, batch = mlp()
  tx = gradcomp.compress(CODEC, axis_name="data", feedback="error")
  optimizer = optax.chain(tx, optax.sgd(0.1))
  mesh = explicit_mesh(shape, names)
  args = start(optimizer, params, batch, mesh)
  after, _, losses = train(plain_jit(loss_fn, optimizer), *args)
  assert losses[-1] < losses[0]
  assert all(is_placed(leaf, mesh, P()) for leaf in after.values())


def test_reduced_gradients_are_refused():
  loss_fn, params, batch = mlp()
  tx = gradcomp.qsgd(bits=4, axis_name="data")
  params, state, batch = start(tx, params, batch, explicit_mesh())

  @jax.jit
  def update(params, state, batch):
    return tx.update(jax.grad(loss_fn)(params, batch), state)

  with pytest.raises(ValueError, match=r"gradcomp\.value_and_grad.*defer_reduction"):
    update(params, state, batch)


@pytest.mark.parametrize(
  "cut_batch, cut_leaf, message",
  [
    (P(), P(), r"sharded over 'data'.*jax\.device_put\(batch"),
    (P("data"), P("data"), r"`argnums`.*sharded over \['data'\]"),
  ],
  ids=["whole_batch", "cut_parameters"],
)
def test_arguments_that_are_cut_wrongly_are_refused(cut_batch, cut_leaf, message):
  loss_fn, params, batch = mlp()
  mesh = explicit_mesh()
  params = place(params, mesh) | {"b": place(params["b"], mesh, cut_leaf)}
  grad_fn = jax.jit(gradcomp.value_and_grad(loss_fn, axis_name="data"))
  with pytest.raises(ValueError, match=message):
    grad_fn(params, place(batch, mesh, cut_batch))


@pytest.mark.parametrize("asked, found", [("host", "chip"), (BOTH, "host")])
def test_another_axis_than_the_types_is_refused(asked, found):
  params, rows = linear(2)
  tx = gradcomp.qsgd(bits=4, axis_name=asked)
  with pytest.raises(ValueError, match=rf"must be unreduced over .*says \('{found}',"):
    mean_in_jit(tx, params, rows, explicit_mesh((2, 2), BOTH), found, {found})
