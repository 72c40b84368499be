"""PowerSGD among workers: the paper's steps, its bytes, start and neighbors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from gradcomp._src.transforms.low_rank import PowerSGD
from gradcomp.testing import laws
from tests.plugins.slow_cases import slow
from tests.specs import power_sgd
from tests.support import laws as suite
from tests.support import modes

SHAPES = {"a": (40, 30), "b": (3,), "c": (3, 3, 8, 12), "d": (40, 30)}
PARAMS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


def gradients(workers, seed=0):
  return suite.tree(SHAPES, workers, seed=seed)


def transformation(exchange="auto", rank=2, **options):
  exchange = modes.grouped(exchange)
  return gradcomp.powersgd(rank, axis_name="data", exchange=exchange, **options)


def mapped(tx):
  """``update(gradients, state or None)`` of 4 workers, whose results are NumPy's."""
  update = modes.started("vmap", tx, 4).update
  return lambda given, state: jax.device_get(update(given, state, PARAMS))


def papers(name):
  """The paper's model of a leaf, and the memory that the library starts from."""
  bound = PowerSGD(rank=2).bind(gradcomp.codecs.Leaf(SHAPES[name]))
  (memory,) = gradcomp.powersgd(2).init(PARAMS).memory.shared.values()
  start = np.float64(memory[sorted(SHAPES).index(name)])
  return power_sgd.ErrorFeedbackSGD(np.zeros(bound.matrix), start.T, 4, 0.1, 0.9)


@pytest.mark.parametrize("exchange", ["psum", "two_shot", *slow("hierarchical")])
def test_every_exchange_takes_the_papers_steps(exchange):
  """Means and residuals against the paper's."""
  update, state = mapped(transformation(exchange)), None
  models = {name: papers(name) for name in "acd"}
  for seed in range(5):
    given = gradients(4, seed)
    mean, state = update(given, state)
    for name, paper in models.items():
      shape = paper.x.shape
      expected = paper.step(given[name].reshape(4, *shape))
      # Sums of 90 roundings of 2^-24, which the next steps' factors pass on.
      np.testing.assert_allclose(mean[name][0].reshape(shape), expected, atol=1e-5)
  for name, paper in models.items():
    kept = np.reshape(state.residual[name], paper.errors.shape)
    np.testing.assert_allclose(kept, paper.errors, atol=1e-5)
  assert not state.residual["b"].any()


def test_bytes_are_those_of_the_factors_and_of_their_rows():
  """Both factors of all matrices, and the dense leaf, by all-reduces alone.

  Quantized: two stages an average, of 4 rows of 2048 codes with 4 scales.
  """
  explained = gradcomp.explain(transformation("psum"), PARAMS, workers=4)
  kinds = {(c.kind, c.dtype) for c in explained.collectives}
  assert kinds == {("all-reduce", "f32")}
  numbers = 2 * ((40 + 30) + (72 + 12) + (40 + 30)) + 3
  assert explained.bytes_sent == 4 * numbers * 2 * 3 // 4
  large = {"w": jax.ShapeDtypeStruct((2048, 2048), jnp.float32)}
  tx = transformation("two_shot", bits=8, rank=4)
  found = gradcomp.explain(tx, large, workers=4).collectives
  stages = [("all-to-all", "u32"), ("all-gather", "u32")] * 2
  assert [(c.kind, c.dtype) for c in found] == stages
  assert [c.bytes_sent for c in found] == [4 * 516 * 4 * 3 // 4] * 4


def test_residuals_hold_what_quantized_means_lack():
  """The sum of N means and all residuals is that of gradients and old residuals."""
  tx = transformation("two_shot", bits=8, min_rate=1)
  steps = [gradients(4, seed) for seed in range(3)]
  laws.nothing_is_lost(gradcomp.testing.modes.run("vmap", tx, steps))


def test_the_start_is_dense():
  """Means and zero residuals first; then the steps of one that starts there."""
  update, late = mapped(transformation(start=2)), mapped(transformation())
  state = other = None
  for seed in range(4):
    given = gradients(4, seed)
    mean, state = update(given, state)
    if seed < 2:
      for name, leaf in given.items():
        np.testing.assert_allclose(mean[name][0], leaf.mean(axis=0), atol=1e-6)
      assert not any(x.any() for x in jax.tree.leaves(state.inner.residual))
      continue
    expected, other = late(given, other)
    for name in SHAPES:
      np.testing.assert_allclose(mean[name], expected[name], atol=1e-5)


def test_one_device_needs_no_axis():
  """Where nothing is exchanged, a worker's mean is its own of low rank."""
  tx = gradcomp.powersgd(2)
  given = jax.tree.map(lambda x: jnp.asarray(x[0]), gradients(1))
  mean, state = jax.device_get(jax.jit(tx.update)(given, tx.init(given)))
  singular = np.linalg.svd(mean["a"], compute_uv=False)
  assert singular[2] <= 1e-6 * singular[0] < singular[1]
  for name, leaf in given.items():
    np.testing.assert_allclose(mean[name] + state.residual[name], leaf, atol=1e-6)


def test_a_partition_has_leaves_of_its_own():
  """Beside another transformation, matrices are what they are alone."""
  other = gradcomp.qsgd(8, rounding="nearest", axis_name="data", feedback="error")
  labels = {name: "low" if name in "ad" else "rest" for name in SHAPES}
  mixed = mapped(optax.partition({"low": transformation(), "rest": other}, labels))
  alone = mapped(transformation())
  state = last = None
  for seed in range(2):
    given = gradients(4, seed)
    mean, state = mixed(given, state)
    expected, last = alone(given, last)
    for name in ("a", "d"):
      np.testing.assert_allclose(mean[name], expected[name], atol=1e-5)
    error = mean["c"][0] - given["c"].mean(axis=0)
    assert 0 < np.abs(error).max() < 0.1  # 127 levels up to 5, and a residual
