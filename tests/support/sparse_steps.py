"""Runs steps of sparse exchanges, and checks that none of them loses anything."""

import functools

import chex
import jax
import numpy as np

import gradcomp
from gradcomp import MomentumFeedback
from tests.specs.methods import sparse as sparse_spec
from tests.support import laws

N, DENSITY, SIZE = 4, 0.05, 630

redsync = functools.partial(
  gradcomp.redsync, axis_name="data", exchange="all_gather", min_leaf_size=64
)


def transformation(codec, exchange, momentum=None, nesterov=False, **options):
  moving = MomentumFeedback(decay=momentum or 0.0, nesterov=nesterov)
  feedback = "error" if momentum is None else moving
  return laws.compressed(codec, exchange, feedback, **{"min_leaf_size": 64} | options)


def gradients(steps, workers=N):
  """A leaf that stays dense and two of one size, which share a matrix."""
  normal = np.random.default_rng(workers).standard_normal
  shapes = {"b": (3,), "v": (SIZE,), "w": (9, 70)}
  draw = lambda: {x: np.float32(normal((workers, *y))) for x, y in shapes.items()}
  return [draw() for _ in range(steps)]


def trail(tx, steps):
  """Returns the updates of each step, under vmap and by one program: [N, ...]."""
  state, result = jax.vmap(tx.init, axis_name="data")(jax.device_put(steps[0])), []
  chex.clear_trace_counter()
  once = chex.assert_max_traces(lambda g, s: tx.update(g, s), n=1)
  update = jax.jit(jax.vmap(once, axis_name="data"))
  for gradient in steps:
    output, state = update(gradient, state)
    result.append((output, state))
  return result


def owned_of(state, leaf):
  """Returns what owners keep of one of the leaves: the first ranges are those of v."""
  if not state.server_residual:
    return np.zeros(SIZE)
  rows = np.float64(*state.server_residual[("data",)])
  rows = rows.reshape(-1, rows.shape[-1])
  first = N * (leaf == "w")
  return rows[first : first + N].ravel()[:SIZE]


def check_conservation(passed, steps, momentum, nesterov, sparse=lambda step: True):
  """Asserts that what was sent and what waits is all that was to be sent, at each step.

  Momentum is computed here from gradients alone, but for where something was sent.
  """
  for leaf in ("b", "v", "w"):
    shape = steps[0][leaf].shape[1:]
    workers = [sparse_spec.Worker(shape, momentum, nesterov) for _ in range(N)]
    total, largest, pairs = 0.0, 0.0, zip(passed, steps, strict=True)
    for number, ((output, state), gradient) in enumerate(pairs):
      for i, worker in enumerate(workers):
        x = worker.correct(gradient[leaf][i])
        rest = np.asarray(state.residual[leaf][i])
        worker.keep(x, rest, sparse=leaf != "b" and sparse(number))
        largest = max(largest, np.abs(x).max(), np.abs(rest).max())
        if momentum is not None:
          np.testing.assert_array_equal(state.velocity[leaf][i], worker.u)
      out = np.asarray(output[leaf])
      np.testing.assert_array_equal(out, np.broadcast_to(out[:1], out.shape))
      total = total + N * np.float64(out[0])
      waiting = sum(np.float64(worker.residual) for worker in workers)
      if leaf != "b":
        waiting = waiting + N * owned_of(state, leaf).reshape(shape)
      given = sum(worker.given for worker in workers)
      # Each step rounds 4 N + 8 numbers at most that enter; none is above N largest.
      bound = (number + 1) * (4 * N + 8) * 2.0**-24 * N * largest
      np.testing.assert_allclose(total + waiting, given, rtol=0, atol=bound)
