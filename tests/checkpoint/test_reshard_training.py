"""A training that goes on with 4 and with 6 of 8 workers ends where others end."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from tests.support.cases import reshard as cases

BATCH = 48  # of all workers: 6, 12 and 8 examples each
STEPS = 60
PARAMS = {"w": jnp.zeros((64, 16)), "b": jnp.zeros(16)}
CODEC = gradcomp.codecs.QSGD(bits=2, bucket_size=32)

rng = np.random.default_rng(0)
X = rng.standard_normal((3000, 64)).astype(np.float32)
NOISE = rng.gumbel(size=(3000, 16))
Y = np.argmax(X @ rng.standard_normal((64, 16)) + NOISE, axis=1)


def loss_fn(params, x, y):
  logits = x @ params["w"] + params["b"]
  return optax.losses.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def optimizer(feedback):
  exchange = gradcomp.compress(
    CODEC, axis_name="data", exchange="two_shot", feedback=feedback, min_leaf_size=0
  )
  momentum = None if feedback == "momentum" else 0.9
  return optax.chain(exchange, optax.sgd(0.1, momentum=momentum))


@functools.cache
def stepper(feedback):
  tx = optimizer(feedback)

  def step(params, state, x, y):
    updates, state = tx.update(jax.grad(loss_fn)(params, x, y), state)
    return optax.apply_updates(params, updates), state

  return jax.jit(jax.vmap(step, axis_name="data"))


def train(feedback, counts, seed, keep="mean"):
  """The loss over all examples after some steps with each number of workers."""
  tx, step = optimizer(feedback), stepper(feedback)
  old = counts[0]
  like = gradcomp.checkpoint.state_shapes(tx, PARAMS, workers=old, axis_name="data")
  state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
  state = (state[0]._replace(key=np.uint32([0, seed])), *state[1:])
  params = jax.tree.map(np.asarray, PARAMS)
  draw = np.random.default_rng(1)  # every training has the same batches
  for workers in counts:
    state = cases.reshard(state, tx, old, workers, PARAMS, keep=keep)
    old = workers
    given = cases.stacked(tx, state, workers)
    copies = jax.tree.map(lambda x, n=workers: np.stack([x] * n), params)
    for _ in range(STEPS):
      picked = draw.integers(0, len(X), (workers, BATCH // workers))
      copies, given = step(copies, given, X[picked], Y[picked])
    params = jax.tree.map(lambda x: np.asarray(x)[0], copies)
    state = cases.unstacked(tx, given, workers)
  return float(loss_fn(params, X, Y))


@pytest.mark.slow
@pytest.mark.parametrize(
  "feedback, keep", [("error", "sum"), ("error", "mean"), ("momentum", "mean")]
)
def test_eight_four_and_six_workers(feedback, keep):
  """Trainings with 8 workers differ only by their random bits.

  Those that change the number of workers have no more reason to end elsewhere, but for
  rounding errors that fewer workers average: the mean of eight losses moves by less
  than two standard deviations of one.

  Momentum is about ten gradients of each worker. Its sum would count twice in the mean
  of half as many workers, and does: then the loss is ten standard deviations away.
  """
  seeds = range(8)
  alike = [train(feedback, (8, 8, 8), seed) for seed in seeds]
  changed = [train(feedback, (8, 4, 6), seed, keep) for seed in seeds]
  assert max(alike) < 0.6 < np.log(16)  # it has learned
  assert abs(np.mean(changed) - np.mean(alike)) < 2 * np.std(alike, ddof=1)
