"""Trains by parallel.zero in every mode, and gives the cases of its tests."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradcomp
from gradcomp.codecs import QSGD
from gradcomp.parallel import zero
from tests.support import laws, modes

N = 4
FOUR_BITS = QSGD(bits=4, bucket_size=64)
TILE = 8 * 64  # elements of a row
LEAVES = {"w": (3, 700), "v": (2 * TILE,), "b": (7,), "one": (), "odd": (N + 1,)}


def tree(seed, shapes, *stack):
  return jax.tree.map(jnp.asarray, laws.tree(shapes, *stack, seed=seed))


def gradients(steps, shapes):
  return [tree(100 + i, shapes, N) for i in range(steps)]


def coded(inner, codec=FOUR_BITS, params=None, **options):
  return zero(inner, grads=codec, params=params or codec, axis_name="data", **options)


def _moved(inner):
  """Takes and gives the parameters in place of updates, as its state has them."""
  tx = modes.training(inner)

  def update(gradient, state, _=None):
    state = tx.update(gradient, state)[1]
    return state[0], state

  return optax.GradientTransformation(tx.init, update)


def train(mode, tx, params, given):
  """Yields what the workers hold after each step: parameters and state, ``[N, ...]``.

  Where types prove that parameters are equal, there is one copy of them.
  """
  update, state = modes.started(mode, _moved(tx), N).update, None
  for gradient in given:
    held, state = update(gradient, state, params)
    stacked = state if mode in ("pmap", "vmap") else modes.of_each(state, N)
    yield jax.tree.map(np.asarray, (held, stacked[1]))


def last(*args):
  return list(train(*args))[-1]


def masters(held, state):
  """What owners know of the leaf "w", which fills its rows, in one vector."""
  return held["w"][0] + state.unsent["w"].arrays["data",].reshape(-1)


def plain(inner, params, given):
  """Data-parallel training without this library: one optimizer for the mean."""

  @jax.jit
  def train(params, given):
    tx = modes.training(inner)
    state = tx.init(params)
    for gradient in given:
      state = tx.update(jax.tree.map(lambda x: x.mean(axis=0), gradient), state)[1]
    return state[0]

  return train(params, given)


def sharded(tx, params):
  mesh = modes.mesh(N)
  return *modes.placed(tx, params, mesh), mesh


def loss_fn(params, batch):
  return sum(jnp.mean((x * batch.mean()) ** 2) for x in jax.tree.leaves(params))


def wired(tx, params):
  """A train step of all workers, which is not yet compiled."""
  params, state, mesh = sharded(tx, params)
  step = gradcomp.make_train_step(loss_fn, tx, axis_name="data", mesh=mesh)
  return step.lower(params, state, np.ones(N, np.float32))
