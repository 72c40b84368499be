"""Oracles of local steps in float64, from papers, of workers' parameters ``[N, n]``."""

import jax
import numpy as np
import optax

import gradcomp
from tests.support.cases.zero import gradients

N = 4
LEAVES = {"w": (6, 50), "v": (300,), "one": ()}
ADAM = optax.adamw(0.05, weight_decay=0.1)
NESTEROV = optax.sgd(0.7, 0.9, nesterov=True)


def local(inner, outer, codec, every=3, **options):
  given = {"axis_name": "data", "every": every, "codec": codec}
  return gradcomp.local.local_steps(inner, outer, **given, **options)


def decaying(residual_decay):
  """Error feedback that forgets a part, as SparseLoCo's."""
  return gradcomp.ErrorFeedback(residual_decay=residual_decay)


def flat(params):
  """The parameters of each worker in one vector, ``[N, n]``, in the order of leaves."""
  leaves = jax.tree.leaves(params)
  return np.concatenate([np.reshape(x, (N, -1)) for x in leaves], axis=1)


def dyadic(steps):
  """Gradients whose sums are exact in any order: multiples of 2**-10 below 8."""
  cut = lambda x: np.round(np.asarray(x) * 1024) / 1024
  return [jax.tree.map(cut, given) for given in gradients(steps, LEAVES)]


class Nesterov:
  """SGD with Nesterov's momentum, as Sutskever et al. write it, and as PyTorch has."""

  def __init__(self, rate, momentum):
    self.rate, self.momentum, self.buffer = rate, momentum, 0.0

  def step(self, gradient):
    self.buffer = self.momentum * self.buffer + gradient
    return -self.rate * (gradient + self.momentum * self.buffer)


def largest(x, count):
  """x where its magnitude is among the largest, and zeros elsewhere."""
  keep = np.argsort(-np.abs(x), axis=-1, kind="stable")[..., :count]
  mask = np.zeros(x.shape, bool)
  np.put_along_axis(mask, keep, True, axis=-1)
  return np.where(mask, x, 0.0), mask


def sparseloco(start, gradients, *, rate, every, count, decay, senders=False):
  """Algorithm 1 of SparseLoCo without quantisation, and an outer rate of 1."""
  shared = np.float64(start)
  own = np.stack([shared] * N)
  error = np.zeros_like(own)
  result = []
  for t, gradient in enumerate(gradients, 1):
    own = own - rate * np.float64(gradient)
    if t % every == 0:
      error = decay * error + (shared - own)
      sent, mask = largest(error, count)
      error = error - sent
      number = np.maximum(mask.sum(axis=0), 1) if senders else N
      shared = shared - sent.sum(axis=0) / number
      own = np.stack([shared] * N)
    result.append(shared)
  return result


def streaming(start, gradients, *, rate, every, parts, delay, mixing, outers):
  """Algorithm 2 of Streaming DiLoCo; ``mixing`` is what the shared parameters weigh.

  With one part, no delay and a weight of 1 it is algorithm 1 of DiLoCo.
  """
  shared = np.float64(start)
  own = np.stack([shared] * N)
  waiting = [None] * len(parts)
  result = []
  for t, gradient in enumerate(gradients, 1):
    own = own - rate * np.float64(gradient)
    for k, part in enumerate(parts):
      offset = every * (k + 1) // len(parts)
      if t % every == offset % every:
        waiting[k] = t, np.mean(shared[part] - own[:, part], axis=0)
      if waiting[k] is not None and t == waiting[k][0] + delay:
        shared = shared.copy()
        shared[part] += outers[k].step(waiting[k][1])
        own[:, part] = (1 - mixing) * own[:, part] + mixing * shared[part]
    result.append(shared)
  return result
