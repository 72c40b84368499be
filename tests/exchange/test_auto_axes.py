"""Under an Auto axis beside the data axis each device sends its part, and no more."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import (
  QSGD,
  Dense,
  FloatCast,
  TopK,
)
from tests.plugins.slow_cases import slow
from tests.support import laws, modes
from tests.support.assertions import assert_same_bits

WORKERS, CHIPS = 4, 2
SPECS = {"w": P("chip", None), "v": P(None, "chip"), "b": P(), "s": P()}


def gradients():
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal((WORKERS, *shape)).astype(np.float32)
  return {"w": normal(128, 256), "v": normal(64, 256), "b": normal(77), "s": normal()}


def compiled_update(tx, mesh, specs, scales=None):
  """One update over the data axis alone, and its arguments.

  With ``scales``, so many are there for a row of v: of a residual in int8.
  """
  grads = {
    name: jax.device_put(leaf, NamedSharding(mesh, P("data", *specs[name])))
    for name, leaf in gradients().items()
  }
  with jax.set_mesh(mesh):
    state = tx.init(
      {
        name: jax.device_put(leaf[0], NamedSharding(mesh, specs[name]))
        for name, leaf in gradients().items()
      }
    )
  state_specs = gradcomp.state_specs(state, axis_name="data")
  if scales and state.residual["v"].scales.shape[1] != scales:
    residual = state.residual["v"]
    zeros = jnp.zeros((WORKERS * 64, scales), device=residual.scales.sharding)
    state.residual["v"] = residual._replace(scales=zeros)

  def local(grads, state):
    return tx.update(jax.tree.map(lambda x: x[0], grads), state)

  update = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(P("data"), state_specs),
    out_specs=(P(), state_specs),
    axis_names={"data"},
  )
  return jax.jit(update).lower(grads, state).compile(), (grads, state)


def transformation(codec, exchange):
  feedback = None if codec == Dense() else "error"
  return gradcomp.compress(
    laws.kept(codec),
    axis_name="data",
    exchange=modes.grouped(exchange),
    feedback=feedback,
    min_leaf_size=100,
  )


@pytest.mark.parametrize(
  "codec, exchange",
  [
    (QSGD(bits=4, bucket_size=64), "two_shot"),
    (FloatCast(), "ring"),
    *slow((TopK(density=0.05), "two_shot"), (Dense(), "two_shot")),
  ],
  ids=lambda x: x if isinstance(x, str) else repr(x),
)
def test_each_device_sends_its_part(codec, exchange):
  """The bits of one device a worker, and half of the bytes from each of two."""
  mesh = jax.make_mesh((WORKERS, CHIPS), ("data", "chip"), (AxisType.Auto,) * 2)
  tx = transformation(codec, exchange)
  compiled, args = compiled_update(tx, mesh, SPECS)
  flat = modes.mesh(WORKERS)
  alone, its_args = compiled_update(tx, flat, dict.fromkeys(SPECS, P()))
  assert_same_bits(compiled(*args), alone(*its_args))
  report = gradcomp.wire_report(alone)
  parts = gradcomp.wire_report(compiled).by_axis
  assert set(parts) <= {"data", "chip"}
  # Single numbers cannot be cut, and lengths are filled up to a multiple.
  few, half = 16 * len(parts["data"].collectives), report.bytes_sent / 2
  assert half <= parts["data"].bytes_sent <= half + few
  assert parts["data"].ratio == pytest.approx(report.ratio, rel=1e-2)


def test_an_int8_residual_may_be_cut_inside_of_its_blocks():
  """Of v, each half of a row has a scale and a device: the bits and half the bytes."""
  tx = gradcomp.qsgd(
    bits=4,
    bucket_size=64,
    axis_name="data",
    exchange="two_shot",
    feedback=gradcomp.ErrorFeedback(residual_dtype="int8"),
    min_leaf_size=1024,
  )

  def two_steps(shape, axes, specs):
    count = WORKERS * shape[-1] if shape[1:] else WORKERS
    kinds = (AxisType.Auto,) * len(shape)
    mesh = jax.make_mesh(shape, axes, kinds, devices=jax.devices()[:count])
    compiled, (grads, state) = compiled_update(tx, mesh, specs, scales=2)
    first = compiled(grads, state)
    like = lambda x, old: jax.device_put(x, old.sharding)
    second = compiled(grads, jax.tree.map(like, first[1], state))
    return compiled, first, second

  compiled, *got = two_steps((WORKERS, CHIPS), ("data", "chip"), SPECS)
  whole, *expected = two_steps((WORKERS,), ("data",), dict.fromkeys(SPECS, P()))
  assert np.any(got[0][1].residual["v"].codes)
  assert_same_bits(got, expected)
  sent = gradcomp.wire_report(compiled).by_axis["data"]
  half = gradcomp.wire_report(whole).bytes_sent / 2
  assert half <= sent.bytes_sent <= half + 16 * len(sent.collectives)


def linear_loss(params, rows):
  """With one row a worker, its gradient is the row, exactly."""
  return sum(jnp.vdot(params[name], rows[name].mean(0)) for name in params)


def update_in_jit(tx, mesh, specs):
  """``update`` in plain jit, of gradients that are unreduced over the data axis."""
  place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
  params = {name: place(leaf[0], specs[name]) for name, leaf in gradients().items()}
  rows = {name: place(leaf, P("data")) for name, leaf in gradients().items()}
  with jax.set_mesh(mesh):
    state = tx.init(params)

  @jax.jit
  def update(params, state, rows):
    _, grads = gradcomp.value_and_grad(linear_loss, axis_name="data")(params, rows)
    return tx.update(grads, state)

  return update.lower(params, state, rows).compile(), (params, state, rows)


def test_plain_jit_with_one_explicit_and_one_auto_axis():
  tx = transformation(QSGD(bits=4, bucket_size=64), "two_shot")
  kinds = (AxisType.Explicit, AxisType.Auto)
  mesh = jax.make_mesh((WORKERS, CHIPS), ("data", "chip"), kinds)
  compiled, args = update_in_jit(tx, mesh, SPECS)
  flat = jax.make_mesh(
    (WORKERS,), ("data",), kinds[:1], devices=jax.devices()[:WORKERS]
  )
  alone, its_args = update_in_jit(tx, flat, dict.fromkeys(SPECS, P()))
  result = compiled(*args)
  assert_same_bits(result, alone(*its_args))
  residual = result[1].residual["w"].sharding
  assert residual.is_equivalent_to(NamedSharding(mesh, P(("data", "chip"))), 2)
  whole = sum(c.bytes_sent for c in exchanged(alone))
  assert whole / 2 <= sum(c.bytes_sent for c in exchanged(compiled)) <= whole / 2 + 32


def exchanged(compiled):
  """What carries packed words between workers."""
  parts = gradcomp.wire_report(compiled).by_axis
  return [c for c in parts["data"].collectives if c.dtype == "u32"]


EXPLICIT = (AxisType.Explicit,) * 2


@pytest.mark.parametrize("kinds", [(AxisType.Auto,) * 2, EXPLICIT], ids=str)
def test_a_train_step_sends_an_eighth_between_hosts(kinds):
  """Of what ``dense`` sends there, whoever cut the parameters over the chips."""
  mesh = jax.make_mesh((2, 4), ("data", "chip"), kinds)
  place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
  params = {"w": place(jnp.ones((128, 128)), P("chip")), "c": place(jnp.ones(128), P())}

  def loss_fn(params, batch):
    cut = kinds == EXPLICIT
    w = jax.reshard(params["w"], P(None, None)) if cut else params["w"]
    return jnp.mean((jnp.tanh(batch @ w) + params["c"]) ** 2)

  def report(tx):
    optimizer = optax.chain(tx, optax.sgd(0.1))
    with jax.set_mesh(mesh):
      state = optimizer.init(params)
    step = gradcomp.make_train_step(
      loss_fn, optimizer, axis_name="data", mesh=mesh, donate=False
    )
    batch = place(jnp.ones((16, 128)), P(("data", "chip")))
    compiled = step.lower(params, state, batch).compile()
    after = compiled(params, state, batch)[0]
    for name, leaf in params.items():
      assert after[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
    return gradcomp.wire_report(compiled).by_axis["data"]

  plain = report(gradcomp.dense(axis_name="data"))
  # A quarter of w, all of c, and the loss.
  assert plain.bytes_sent == 4 * (128 * 128 // 4 + 128 + 1)
  packed = report(gradcomp.qsgd(bits=4, axis_name="data", bucket_size=64))
  # 4 bits and a scale to 64 elements are 4.5; c travels in float32 with it.
  assert packed.bytes_sent <= 4.5 / 32 * plain.bytes_sent + 4 * 128 + 8
