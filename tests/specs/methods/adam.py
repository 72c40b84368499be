"""1-bit Adam and 0/1 Adam in float64, from the papers; workers' arrays are [N, n]."""

import numpy as np

from tests.specs.one_bit import ideal


def coder(bucket):
  """One bit an element of buckets; as it is for None."""
  if bucket is None:
    return lambda x: x
  return lambda x: np.concatenate([*map(ideal, x.reshape(-1, bucket))])


def moments(given, dense, *, b1, b2, bucket):
  """Yields the moments after each step, corrected for their start at zero."""
  m, v, updates, coded = 0.0, 0.0, 0, coder(bucket)
  own, owned = np.zeros(np.shape(given[0])), np.zeros(np.shape(given[0])[1])
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
  """The parameters after each step, ``[steps, n]``, without epsilon."""
  steps = []
  for number, (m, v) in enumerate(moments):
    root = np.sqrt(v)
    # Behind the first step that is not dense they have a floor, relative to their mean.
    if not set(range(number + 1)) <= set(dense):
      root = np.maximum(root, floor * root.mean())
    steps.append(rate * m / root)
  return np.float64(start) - np.cumsum(steps, axis=0)


def zero_one(start, gradient, rates, dense, sent, *, b1, b2, decay, bucket=None):
  """Algorithm 1 of 0/1 Adam, without epsilon: yields what all share, and each has.

  ``gradient`` is of the workers by the step and what each has. Behind the steps that
  are ``sent`` momenta are exchanged, as exact means without a bucket.
  """
  coded = coder(bucket)
  x, own = np.float64(start), np.stack([np.float64(start)] * 4)
  m, v, u = np.zeros_like(own), 0.0, np.zeros_like(own)
  total, updates, synced = 0.0, 0, 0
  error, owned = np.zeros_like(own), np.zeros_like(x)
  for step, rate in enumerate(rates):
    g = np.float64(gradient(step, own))
    m = b1 * m + (1 - b1) * g
    u, total = u + rate * m, total + rate
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
