"""Computes the moments of 1-bit Adam and 0/1 Adam in float64, from the papers."""

import numpy as np

from tests.specs.one_bit import ideal


def moments(given, dense, *, b1, b2, bucket):
  """Yields the moments after each step, both corrected for their start at zero.

  Args:
    given: gradients ``[N, n]``, a step each; n a multiple of ``bucket``.
    dense: the steps that average gradients; others send momenta in one bit, and so do
      owners their means, and both keep what is lost.
    b1, b2: the decays.
    bucket: the elements with two means.
  """
  m, v, updates = 0.0, 0.0, 0
  own, owned = np.zeros(np.shape(given[0])), np.zeros(np.shape(given[0])[1])
  coded = lambda x: np.concatenate([*map(ideal, x.reshape(-1, bucket))])
  for step, gradient in enumerate(np.float64(given)):
    if step in dense:
      mean = gradient.mean(axis=0)
      m, v = b1 * m + (1 - b1) * mean, b2 * v + (1 - b2) * mean**2
      updates += 1
    else:
      own = own + b1 * m + (1 - b1) * gradient
      sent = np.stack([*map(coded, own)])
      owned = owned + sent.mean(axis=0)
      m = coded(owned)
      own, owned = own - sent, owned - m
    yield m / (1 - b1 ** (step + 1)), v / (1 - b2**updates)


def adam(start, moments, *, rate, dense, floor=0.0):
  """The parameters after each step, ``[steps, n]``, without epsilon.

  Behind the first step that is not in ``dense``, roots of variances are lifted to a
  floor, relative to their mean.
  """
  steps = []
  for number, (m, v) in enumerate(moments):
    root = np.sqrt(v)
    if not set(range(number + 1)) <= set(dense):
      root = np.maximum(root, floor * root.mean())
    steps.append(rate * m / root)
  return np.float64(start) - np.cumsum(steps, axis=0)


def zero_one(start, gradient, rates, dense, sent, *, b1, b2, decay, bucket=None):
  """Algorithm 1 of 0/1 Adam, without epsilon: yields what all share, and each has.

  Args:
    start: the parameters.
    gradient: of the workers, ``[N, n]``, by the step and what each has, ``[N, n]``.
    rates: the learning rate of each step.
    dense: the steps that average gradients, and so move both moments of all.
    sent: the steps behind which momenta are exchanged.
    b1, b2: the decays of the moments.
    decay: of the weights, decoupled.
    bucket: the elements with two means in one bit; None for exact means.
  """
  coded = lambda x: np.concatenate([*map(ideal, x.reshape(-1, bucket))])
  coded = (lambda x: x) if bucket is None else coded
  x, own = np.float64(start), np.stack([np.float64(start)] * 4)
  m, v, u = np.zeros_like(own), 0.0, np.zeros_like(own)
  total, updates, synced = 0.0, 0, 0
  error, owned = np.zeros_like(own), np.zeros_like(x)
  for step, rate in enumerate(rates):
    g = np.float64(gradient(step, own))
    m, u, total = (
      b1 * m + (1 - b1) * g,
      u + rate * (b1 * m + (1 - b1) * g),
      total + rate,
    )
    if step in dense:
      v, updates = b2 * v + (1 - b2) * g.mean(axis=0) ** 2, updates + 1
      mean = m.mean(axis=0)
    elif step in sent:
      error = error + u / total
      payload = np.stack([*map(coded, error)])
      owned = owned + payload.mean(axis=0)
      mean = coded(owned)
      error, owned = error - payload, owned - mean
    scale = np.sqrt(v / (1 - b2**updates)) * (1 - b1 ** (synced + 1))
    if step in dense or step in sent:
      x = x - total * (mean / scale + decay * x)
      m, u, total, synced = np.stack([mean] * 4), np.zeros_like(own), 0.0, step + 1
    own = x - u / scale
    yield x, own
