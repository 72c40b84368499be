"""Under an Auto axis beside the data axis each device sends its part, and no more."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.mesh.shard_maps import unreduce
from gradcomp.codecs import QSGD, Dense, FloatCast, TopK
from tests.plugins.slow_cases import slow
from tests.support import laws, modes
from tests.support.assertions import assert_same_bits

WORKERS, CHIPS = 4, 2
SPECS = {"w": P("chip", None), "v": P(None, "chip"), "b": P(), "s": P()}
WHOLE = dict.fromkeys(SPECS, P())


def grid(kind=AxisType.Auto):
  return jax.make_mesh((WORKERS, CHIPS), ("data", "chip"), (kind, AxisType.Auto))


def compiled_update(tx, mesh, specs, scales=None):
  """One update over the data axis alone, and its arguments.

  With ``scales``, so many are there for a row of v: of a residual in int8.
  """
  given = laws.tree({"w": (128, 256), "v": (64, 256), "b": (77,), "s": ()}, WORKERS)
  place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
  grads = {k: place(x, "data", *specs[k]) for k, x in given.items()}
  with jax.set_mesh(mesh):
    state = tx.init({k: place(x[0], *specs[k]) for k, x in given.items()})
  if scales and state.residual["v"].scales.shape[1] != scales:
    residual = state.residual["v"]
    zeros = jnp.zeros((WORKERS * 64, scales), device=residual.scales.sharding)
    state.residual["v"] = residual._replace(scales=zeros)
  update = modes.on_mesh(tx, mesh, state, axis_names={"data"})
  if AxisType.Explicit in mesh.axis_types:  # in plain jit
    addends = lambda grads: unreduce(jax.tree.map(lambda x: x / WORKERS, grads), "data")
    update = jax.jit(lambda grads, state: tx.update(addends(grads), state))
  return update.lower(grads, state).compile(), (grads, state)


def transformation(codec, exchange):
  feedback = None if codec == Dense() else "error"
  return laws.compressed(codec, exchange, feedback, min_leaf_size=100)


@pytest.mark.parametrize(
  "codec, exchange",
  [
    (QSGD(bits=4, bucket_size=64), "two_shot"),
    (FloatCast(), "ring"),
    *slow((TopK(density=0.05), "two_shot"), (Dense(), "two_shot")),
  ],
  ids=str,
)
def test_each_device_sends_its_part(codec, exchange):
  """The bits of one device a worker, and half of the bytes from each of two."""
  tx = transformation(codec, exchange)
  compiled, args = compiled_update(tx, grid(), SPECS)
  alone, its_args = compiled_update(tx, modes.mesh(WORKERS), WHOLE)
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
  int8 = gradcomp.ErrorFeedback(residual_dtype="int8")
  codec = QSGD(bits=4, bucket_size=64)
  tx = laws.compressed(codec, "two_shot", int8, min_leaf_size=1024)

  def two_steps(mesh, specs):
    compiled, (grads, state) = compiled_update(tx, mesh, specs, scales=2)
    first = compiled(grads, state)
    like = lambda x, old: jax.device_put(x, old.sharding)
    second = compiled(grads, jax.tree.map(like, first[1], state))
    return compiled, first, second

  compiled, *got = two_steps(grid(), SPECS)
  whole, *expected = two_steps(modes.mesh(WORKERS), WHOLE)
  assert np.any(got[0][1].residual["v"].codes)
  assert_same_bits(got, expected)
  sent = gradcomp.wire_report(compiled).by_axis["data"]
  half = gradcomp.wire_report(whole).bytes_sent / 2
  assert half <= sent.bytes_sent <= half + 16 * len(sent.collectives)


def test_plain_jit_with_one_explicit_and_one_auto_axis():
  tx = transformation(QSGD(bits=4, bucket_size=64), "two_shot")
  mesh = grid(AxisType.Explicit)
  compiled, args = compiled_update(tx, mesh, SPECS)
  alone, its_args = compiled_update(tx, modes.mesh(WORKERS, AxisType.Explicit), WHOLE)
  result = compiled(*args)
  assert_same_bits(result, alone(*its_args))
  residual = result[1].residual["w"].sharding
  assert residual.is_equivalent_to(NamedSharding(mesh, P(("data", "chip"))), 2)
  parts, whole = (
    gradcomp.wire_report(x).by_axis["data"].collectives for x in (compiled, alone)
  )
  words = lambda found: sum(c.bytes_sent for c in found if c.dtype == "u32")
  assert words(whole) / 2 <= words(parts) <= words(whole) / 2 + 32


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_train_step_sends_an_eighth_between_hosts(kind):
  """Of what ``dense`` sends there, whoever cut the parameters over the chips."""
  mesh = jax.make_mesh((2, 4), ("data", "chip"), (kind,) * 2)
  place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
  params = {"w": place(jnp.ones((128, 128)), P("chip")), "c": place(jnp.ones(128), P())}

  def loss_fn(params, batch):
    w = params["w"]
    w = jax.reshard(w, P(None, None)) if kind == AxisType.Explicit else w
    return jnp.mean((jnp.tanh(batch @ w) + params["c"]) ** 2)

  def report(tx):
    optimizer = optax.chain(tx, optax.sgd(0.1))
    with jax.set_mesh(mesh):
      state = optimizer.init(params)
    step = gradcomp.make_train_step(
      loss_fn, optimizer, axis_name="data", mesh=mesh, donate=False
    )
    batch = place(jnp.ones((16, 128)), P(("data", "chip")))
    return gradcomp.wire_report(step.lower(params, state, batch)).by_axis["data"]

  plain = report(gradcomp.dense(axis_name="data"))
  # A quarter of w, all of c, and the loss.
  assert plain.bytes_sent == 4 * (128 * 128 // 4 + 128 + 1)
  packed = report(gradcomp.qsgd(bits=4, axis_name="data", bucket_size=64))
  # 4 bits and a scale to 64 elements are 4.5; c travels in float32 with it.
  assert packed.bytes_sent <= 4.5 / 32 * plain.bytes_sent + 4 * 128 + 8
