"""Arms of the study: those that end in -paper are the papers' algorithms."""

import jax
import numpy as np
import optax

import gradcomp
from benchmarks.study import methods
from gradcomp.codecs import EightBit, Ternary
from tests.benchmarks.study.records import SETTING

LIKE = {"kernel": np.zeros((64, 32)), "head": {"kernel": np.zeros((32, 20))}}
WORKERS = 8


def made(codec, **options):
  setting = SETTING._replace(codec=codec, steps=100, momentum=None, **options)
  return methods.make(setting)


def exchanged(tx, gradients):
  """Returns the mean that each worker gets from one update, stacked, on the host."""
  update = lambda grads: tx.update(grads, tx.init(grads), grads)[0]
  return jax.device_get(jax.jit(jax.vmap(update, axis_name="data"))(gradients))


def drawn(count):
  rng = np.random.default_rng(0)
  normal = lambda x: rng.normal(size=(count, *x.shape)).astype(np.float32)
  return jax.tree.map(normal, LIKE)


def test_the_papers_arms_send_once_and_all_of_it():
  """(N - 1) payloads of 8 bits an element, without residuals; no leaf in float32."""
  for arm, codec in (("terngrad-paper", Ternary), ("dynamic-tree-paper", EightBit)):
    tx, *_ = made(arm)
    plan = gradcomp.explain(tx, LIKE, workers=WORKERS)
    assert {type(leaf.codec) for leaf in plan.leaves} == {codec}
    assert jax.eval_shape(tx.init, LIKE).residual is None
  assert {leaf.exchange for leaf in plan.leaves} == {"all_gather"}


def test_wens_workers_draw_bits_of_their_own_for_all_leaves():
  """Equal gradients come out different.

  A worker's error has the variance (s - |g|) |g| an element; the mean's is an Nth of
  it. The mean square of 500 independent rounds is within 5 standard errors of it.
  """
  one = drawn(1)
  gradient = jax.tree.map(lambda x: np.repeat(x, WORKERS, axis=0), one)
  tx, *_ = made("terngrad-noclip-paper")

  def round_of(key, gradient):
    state = optax.tree.set(tx.init(LIKE), key=key)
    update = lambda grads: tx.update(grads, state, LIKE)[0]
    return jax.vmap(update, axis_name="data", out_axes=None)(gradient)

  keys = np.random.default_rng(1).integers(2**32, size=(500, 2), dtype=np.uint32)
  rounds = lambda keys, x: jax.lax.map(lambda key: round_of(key, x), keys)
  g = np.asarray(one["kernel"][0], np.float64)
  errors = np.float64(jax.jit(rounds)(keys, gradient)["kernel"]) - g
  expected = ((np.abs(g).max() - np.abs(g)) * np.abs(g) / WORKERS).mean()
  squares = np.square(errors).mean(axis=(1, 2))
  bound = 5 * squares.std(ddof=1) / np.sqrt(len(squares))
  assert abs(squares.mean() - expected) < bound


def test_fangs_arms_are_sparse_from_the_first_step_on():
  """ASQ has one value a leaf, but in the output layer, which comes first."""
  one = np.linspace(1, 2, 2**16, dtype=np.float32).reshape(1, 256, 256)
  codec = "redsync-0.1-asq-paper"
  assert methods.first_steps(codec, 10_000) == 0
  tx, *_ = made(codec)
  leaves = jax.tree.leaves(exchanged(tx, {"kernel": one, "head": {"kernel": one}}))
  assert all(0 < np.count_nonzero(x) < 0.003 * x.size for x in leaves)
  values = [len(np.unique(x[x != 0])) for x in leaves]
  assert values[0] > 1 and values[1] == 1


def test_shares_are_clipped_at_the_root_of_n():
  """In DGC's units: shares g / N of a sum at c / sqrt(N), by NumPy."""
  gradients = drawn(WORKERS)
  tx, *_ = made("f32", max_norm=1.0, clipping="share")
  found = exchanged(tx, gradients)
  rows = [x.reshape(WORKERS, -1) for x in jax.tree.leaves(gradients)]
  shares = np.concatenate(rows, axis=1).astype(np.float64) / WORKERS
  norms = np.linalg.norm(shares, axis=1, keepdims=True)
  clipped = shares * np.minimum(1, 1.0 / np.sqrt(WORKERS) / norms)
  assert (norms > 1 / np.sqrt(WORKERS)).all()  # so that all are clipped
  ours = np.concatenate([np.ravel(x[0]) for x in jax.tree.leaves(found)])
  # Float32 adds eight addends, each within some units in the last place.
  np.testing.assert_allclose(ours, clipped.sum(axis=0), atol=1e-6)


def test_a_part_has_the_leaves_that_the_whole_compresses():
  """The first convolution and the biases are small, in all parts of a network."""
  shapes = {"conv1": (5, 5, 1, 32), "conv2": (5, 5, 32, 64), "dense": (576, 1024)}
  shapes["head"] = (1024, 10)
  params = {k: {"kernel": jax.ShapeDtypeStruct(x, float)} for k, x in shapes.items()}
  params["conv1"]["bias"] = jax.ShapeDtypeStruct((32,), float)
  low = lambda *given: [
    name for name, x in methods.labels(*given, params).items() if "low" in x.values()
  ]
  assert low("conv", None) == ["conv2"]
  assert low("dense", None) == ["dense", "head"]
  assert low("body", None) == ["conv2", "dense"]
  assert low("body", 0) == ["conv1", "conv2", "dense"]  # APS has all leaves
