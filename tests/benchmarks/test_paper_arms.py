"""Arms of the study that end in -paper are the papers' algorithms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gradcomp
from benchmarks.study import methods, tasks
from examples.lib.data.images import ImageSet, Split
from gradcomp.codecs import EightBit, Ternary
from tests.benchmarks.study_records import SETTING

LIKE = {"kernel": np.zeros((64, 32)), "head": {"kernel": np.zeros((32, 20))}}
WORKERS = 8


def made(codec, **options):
  """The exchange of a codec, with what is left behind it."""
  setting = SETTING._replace(codec=codec, steps=100, momentum=None)
  return methods.make(setting._replace(**options))


def exchanged(tx, gradients):
  """Returns the mean that each worker gets from one update, stacked, on the host."""

  def update(grads):
    return tx.update(grads, tx.init(grads), grads)[0]

  return jax.device_get(jax.jit(jax.vmap(update, axis_name="data"))(gradients))


def drawn(alike=False):
  """Gradients of all workers, or one that all of them have."""
  rng = np.random.default_rng(0)

  def leaf(x):
    shape = x.shape if alike else (WORKERS, *x.shape)
    normal = rng.normal(size=shape).astype(np.float32)
    return np.broadcast_to(normal, (WORKERS, *x.shape))

  return jax.tree.map(leaf, LIKE)


def test_wens_workers_draw_bits_of_their_own_for_all_leaves():
  """Equal gradients come out different, and no leaf is in float32.

  A worker's error has the variance (s - |g|) |g| an element; the mean's is an Nth of
  it. The mean square of 2,000 independent rounds is within 5 standard errors of it.
  """
  tx, *_ = made("terngrad-paper")
  plan = gradcomp.explain(tx, LIKE, workers=WORKERS)
  assert {type(leaf.codec) for leaf in plan.leaves} == {Ternary}
  gradient = jax.tree.map(jnp.asarray, drawn(alike=True))
  one = jax.tree.map(lambda x: x[0], gradient)

  def round_of(key):
    tx, *_ = made("terngrad-noclip-paper")
    state = jax.tree_util.tree_map_with_path(
      lambda path, x: key if getattr(path[-1], "name", "") == "key" else x,
      tx.init(LIKE),
    )
    update = lambda grads: tx.update(grads, state, LIKE)[0]
    return jax.vmap(update, axis_name="data", out_axes=None)(gradient)

  keys = jax.random.bits(jax.random.key(1), (2000, 2), jnp.uint32)
  means = jax.jit(lambda keys: jax.lax.map(round_of, keys))(keys)["kernel"]
  g = np.asarray(one["kernel"], np.float64)
  errors = np.asarray(means, np.float64) - g
  expected = ((np.abs(g).max() - np.abs(g)) * np.abs(g) / WORKERS).mean()
  squares = np.square(errors).mean(axis=(1, 2))
  bound = 5 * squares.std(ddof=1) / np.sqrt(len(squares))
  assert abs(squares.mean() - expected) < bound


def test_one_scale_of_all_layers_is_the_largest_element():
  tx, *_ = made("terngrad-global-paper")
  gradients = jax.tree.map(lambda x: np.ones((1, *x.shape), np.float32), LIKE)
  gradients["head"]["kernel"] *= 100
  found = exchanged(tx, gradients)
  top = found["head"]["kernel"].max()
  assert {x for leaf in jax.tree.leaves(found) for x in np.unique(leaf)} == {0.0, top}


def test_dettmers_sends_once_and_all_of_it():
  """(N - 1) payloads of 8 bits an element, without residuals."""
  tx, *_ = made("dynamic-tree-paper")
  plan = gradcomp.explain(tx, LIKE, workers=WORKERS)
  assert {leaf.exchange for leaf in plan.leaves} == {"all_gather"}
  assert {type(leaf.codec) for leaf in plan.leaves} == {EightBit}
  assert tx.init(LIKE).residual is None


@pytest.mark.parametrize("codec", ["redsync-0.1-paper", "redsync-0.1-asq-paper"])
def test_fangs_arms_are_sparse_from_the_first_step_on(codec):
  tx, *_ = made(codec, momentum=None)
  assert methods.first_steps(codec, 10_000) == 0
  leaves = {"kernel": jnp.zeros((256, 256)), "head": {"kernel": jnp.zeros((256, 256))}}
  gradient = jax.tree.map(
    lambda x: jnp.linspace(1.0, 2.0, x.size).reshape(x.shape), leaves
  )
  update = lambda grads: tx.update(grads, tx.init(leaves), leaves)[0]
  found = jax.vmap(update, axis_name="data")(jax.tree.map(lambda x: x[None], gradient))
  for leaf in jax.tree.leaves(found):
    assert 0 < np.count_nonzero(leaf) < 0.003 * leaf.size
  values = [len(np.unique(x[x != 0])) for x in map(np.asarray, jax.tree.leaves(found))]
  assert values[0] > 1  # of the output layer, which comes first
  assert (values[1] == 1) == ("asq" in codec)


@pytest.mark.parametrize("codec", ["f32", "qsgd-4-paper", "redsync-1-paper"])
def test_all_codecs_have_the_same_clipping(codec):
  """Each worker's gradient by its rule, in front of the exchange; nothing behind it."""
  options = dict(momentum=0.9, max_norm=1.0)
  *_, left = made(codec, clipping="share", **options)
  assert left is None
  *_, left = made(codec, **options)
  assert left == (None if "redsync" in codec else 1.0)


def test_shares_are_clipped_at_the_root_of_n():
  """In DGC's units: shares g / N of a sum at c / sqrt(N), by NumPy."""
  gradients = drawn()
  tx, *_ = made("f32", max_norm=1.0, clipping="share")
  found = exchanged(tx, gradients)
  flat = np.concatenate(
    [
      np.asarray(x, np.float64).reshape(WORKERS, -1) for x in jax.tree.leaves(gradients)
    ],
    axis=1,
  )
  shares = flat / WORKERS
  norms = np.linalg.norm(shares, axis=1, keepdims=True)
  clipped = shares * np.minimum(1, 1.0 / np.sqrt(WORKERS) / norms)
  assert (norms > 1 / np.sqrt(WORKERS)).all()  # so that all are clipped
  ours = np.concatenate([np.ravel(x[0]) for x in jax.tree.leaves(found)])
  # Float32 adds eight addends, each within some units in the last place.
  np.testing.assert_allclose(ours, clipped.sum(axis=0), atol=1e-6)


def test_widened_nets_are_lenet_with_wider_dense_layers(monkeypatch):
  """Their name says how many times as wide; convolutions stay."""
  split = Split(np.zeros((4, 8, 8, 1), np.uint8), np.zeros(4, np.int32))
  read = lambda *given: ("images/8", ImageSet(split, split, 10))
  monkeypatch.setattr(tasks, "images", read)
  for name, times in (("lenet", 1), ("lenet-x1", 1), ("lenet-x4", 4)):
    made = tasks.source.__wrapped__(name).model
    net = nnx.eval_shape(lambda made=made: made(rngs=nnx.Rngs(0)))
    assert net.dense1.kernel.shape == (4 * 64, 1024 * times)
    assert net.dense2.kernel.shape == (1024 * times, 512 * times)
    assert net.conv2.kernel.shape == (5, 5, 32, 64)
