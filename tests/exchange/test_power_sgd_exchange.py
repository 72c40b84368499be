"""PowerSGD is the paper's in every exchange and place, and sends what it says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import QSGD, PowerSGD
from tests.plugins.slow_cases import slow
from tests.specs import power_sgd
from tests.support import modes
from tests.support.assertions import assert_same_bits, says

SHAPES = {"a": (40, 30), "b": (3,), "c": (3, 3, 8, 12), "d": (40, 30)}


def gradients(workers, seed=0):
  rng = np.random.default_rng(seed)
  return {
    name: rng.standard_normal((workers, *shape)).astype(np.float32)
    for name, shape in SHAPES.items()
  }


@functools.cache  # for modes, which compiles once a transformation
def transformation(workers, exchange="auto", rank=2, **options):
  exchange = modes.grouped(exchange, 2 if workers % 2 == 0 else 1)
  return gradcomp.powersgd(rank, axis_name="data", exchange=exchange, **options)


def papers(workers, name):
  """The paper's model of a leaf, and the memory that the library starts from."""
  codec = PowerSGD(rank=2)
  bound = codec.bind(gradcomp.codecs.Leaf(SHAPES[name]))
  params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
  state = gradcomp.powersgd(2).init(params)
  (memory,) = state.memory.shared.values()
  start = np.float64(memory[sorted(SHAPES).index(name)])
  zeros = np.zeros(bound.matrix)
  return power_sgd.ErrorFeedbackSGD(zeros, start.T, workers, 0.1, 0.9)


def check_steps(mode, exchange, workers, count):
  """Means and residuals against the paper's; all workers' bits."""
  steps = [gradients(workers, seed) for seed in range(count)]
  tx = transformation(workers, exchange)
  outputs, residual = modes.run(mode, tx, steps)
  for output in jax.device_get(outputs):
    for leaf in output.values():
      assert_same_bits(leaf, np.broadcast_to(leaf[:1], leaf.shape))
  for name in ("a", "c", "d"):
    paper = papers(workers, name)
    shape = paper.x.shape
    for step, output in zip(steps, outputs, strict=True):
      expected = paper.step(step[name].reshape(workers, *shape))
      # Sums of 90 roundings of 2^-24, which the next steps' factors pass on.
      got = np.asarray(output[name][0]).reshape(shape)
      np.testing.assert_allclose(got, expected, atol=1e-5)
    kept = np.asarray(residual[name]).reshape(workers, *shape)
    np.testing.assert_allclose(kept, paper.errors, atol=1e-5)
  assert not np.asarray(residual["b"]).any()


@pytest.mark.parametrize(
  "exchange", ["psum", "two_shot", *slow("all_gather", "ring", "hierarchical")]
)
def test_every_exchange_takes_the_papers_steps(exchange):
  check_steps("vmap", exchange, 4, 5)


@pytest.mark.parametrize("workers", [1, *slow(3)])
def test_any_number_of_workers(workers):
  check_steps("vmap", "auto", workers, 5)


@pytest.mark.parametrize(
  "mode",
  [
    pytest.param(mode, marks=() if mode == modes.EXPLICIT else pytest.mark.slow)
    for mode in modes.modes_for(4)
  ],
)
def test_every_place_takes_them(mode):
  check_steps(mode, "auto", 4, 2)


def sent(tx, shapes, workers):
  """The collectives of one update inside a typed shard_map, from the optimized HLO."""
  params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
  mesh = modes.mesh(workers)
  with jax.set_mesh(mesh):
    state = tx.init(params)
  specs = gradcomp.state_specs(state, axis_name="data")
  local = lambda grads, state: tx.update(jax.tree.map(lambda x: x[0], grads), state)
  update = jax.shard_map(
    local, mesh=mesh, in_specs=(P("data"), specs), out_specs=(P(), specs)
  )
  like = {
    name: jax.ShapeDtypeStruct((workers, *shape), jnp.float32)
    for name, shape in shapes.items()
  }
  lowered = jax.jit(update).lower(like, state)
  program = lowered.compile({"xla_backend_optimization_level": 0})
  return gradcomp.wire_report(program).collectives


def test_bytes_of_plain_sums_are_those_of_the_factors():
  """Both factors of all matrices, and the dense leaf, by all-reduces alone."""
  tx = transformation(4, "psum")
  found = sent(tx, SHAPES, 4)
  assert {(c.kind, c.dtype) for c in found} == {("all-reduce", "f32")}
  numbers = 2 * ((40 + 30) + (72 + 12) + (40 + 30)) + 3
  assert sum(c.bytes_sent for c in found) == 4 * numbers * 2 * 3 // 4
  like = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
  explained = gradcomp.explain(tx, like, workers=4)
  assert explained.bytes_sent == 4 * numbers * 2 * 3 // 4


def test_bytes_of_quantized_factors_are_those_of_their_rows():
  """Two stages a round: 4 rows of 2048 codes with 4 scales, which are 2048 by 4."""
  tx = transformation(4, "two_shot", bits=8, rank=4)
  found = sent(tx, {"w": (2048, 2048)}, 4)
  assert [(c.kind, c.dtype) for c in found] == [
    ("all-to-all", "u32"),
    ("all-gather", "u32"),
  ] * 2
  assert [c.bytes_sent for c in found] == [4 * 516 * 4 * 3 // 4] * 4
  codec = PowerSGD(rank=4, bits=8)
  payload = jax.eval_shape(codec.encode, jax.ShapeDtypeStruct((2048, 2048), "float32"))
  assert payload.rows.shape == (2 * 4, 516)


@pytest.mark.parametrize("exchange, bits", [("psum", 32), *slow(("two_shot", 8))])
def test_what_one_worker_cannot_send_is_seen_by_all(exchange, bits):
  """Its leaf is NaN everywhere, and its residuals and memory stay; others go on."""
  tx = transformation(4, exchange, bits=bits, min_rate=1)
  update, first, second = mapped(tx), gradients(4), gradients(4, seed=1)
  _, state = update(first, None)
  dirty = {**second, "a": second["a"].copy()}
  dirty["a"][2, 5, 6] = np.nan
  expected, clean = update(second, state)
  got, after = update(dirty, state)
  assert np.isnan(got["a"]).all()
  for name in ("b", "c", "d"):
    assert_same_bits(got[name], expected[name])
    assert_same_bits(after.residual[name], clean.residual[name])
  assert_same_bits(after.residual["a"], state.residual["a"])
  (old,), (new,) = (x.memory.shared.values() for x in (state, after))
  assert_same_bits(new[0], old[0])


@pytest.mark.parametrize(
  "exchange", ["two_shot", *slow("all_gather", "ring", "hierarchical")]
)
def test_residuals_hold_what_quantized_means_lack(exchange):
  """The sum of N means and all residuals is that of gradients and old residuals."""
  update = mapped(transformation(4, exchange, bits=8, min_rate=1))
  state, old = None, dict.fromkeys(SHAPES, 0)
  for seed in range(3):
    given = gradients(4, seed)
    mean, state = update(given, state)
    for name in SHAPES:
      total = given[name].sum(axis=0) + old[name]
      old[name] = np.asarray(state.residual[name]).sum(axis=0).reshape(SHAPES[name])
      # Sums of eight numbers up to 5, each rounded by 2^-24 of itself.
      np.testing.assert_allclose(4 * mean[name][0] + old[name], total, atol=1e-5)


def mapped(tx):
  """``update(gradients, state or None)`` of 4 workers, whose results are NumPy's."""
  update = modes.mapped("vmap", tx, 4)
  params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
  return lambda given, state: jax.device_get(update(given, state, params))


def test_the_start_is_dense():
  """Means and zero residuals first; then the steps of one that starts there."""
  update, late = mapped(transformation(4, start=2)), mapped(transformation(4))
  state = None
  for seed in range(4):
    given = gradients(4, seed)
    mean, state = update(given, state)
    if seed < 2:
      for name, leaf in given.items():
        np.testing.assert_allclose(mean[name][0], leaf.mean(axis=0), atol=1e-6)
      assert not any(x.any() for x in jax.tree.leaves(state.inner.residual))
      other = None
      continue
    expected, other = late(given, other)
    for name in SHAPES:
      np.testing.assert_allclose(mean[name], expected[name], atol=1e-5)


def test_one_device_needs_no_axis():
  """Where nothing is exchanged, a worker's mean is its own of low rank."""
  tx = gradcomp.powersgd(2)
  given = jax.tree.map(lambda x: jnp.asarray(x[0]), gradients(1))
  mean, state = jax.jit(tx.update)(given, tx.init(given))
  singular = np.linalg.svd(mean["a"], compute_uv=False)
  assert singular[2] <= 1e-6 * singular[0] < singular[1]
  total = jax.tree.map(jnp.add, mean, state.residual)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), total, given)


def test_leaves_of_a_policy_are_its_own():
  """Beside another codec, in the same message, matrices are what they are alone."""
  rules = [("a|d", PowerSGD(rank=2)), (".", QSGD(bits=8, rounding="nearest"))]
  options = dict(axis_name="data", exchange="two_shot", feedback="error")
  mixed, alone = (
    mapped(tx) for tx in (gradcomp.policy(rules, **options), transformation(4))
  )
  state = other = None
  for seed in range(2):
    given = gradients(4, seed)
    mean, state = mixed(given, state)
    expected, other = alone(given, other)
    for name in ("a", "d"):
      np.testing.assert_allclose(mean[name], expected[name], atol=1e-5)
    error = mean["c"][0] - given["c"].mean(axis=0)
    assert 0 < np.abs(error).max() < 0.1  # 127 levels up to 5, and a residual


def test_mistakes():
  with pytest.raises(ValueError, match=says("`feedback`", "error", "None", "compress")):
    gradcomp.powersgd(feedback=None)
  with pytest.raises(ValueError, match=says("`start`", "0 or more", "-1")):
    gradcomp.powersgd(start=-1)
  with pytest.raises(ValueError, match=says("`start`", "1.5")):
    gradcomp.powersgd(start=1.5)
  with pytest.raises(ValueError, match=says("`exchange`", "psum", "QSGD")):
    gradcomp.powersgd(bits=8, exchange="psum")
