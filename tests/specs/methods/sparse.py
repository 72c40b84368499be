"""Steps of sparse methods (Lin et al. 2018, section 3), and of exact selections."""

import math

import numpy as np

from tests.specs.top_k import exact


class Worker:
  """What one worker keeps of one leaf, float32; without momentum plain residuals."""

  def __init__(self, shape, momentum=None, nesterov=False):
    self.m = None if momentum is None else np.float32(momentum)
    self.nesterov = nesterov
    self.u, self.residual = (np.zeros(shape, np.float32) for _ in range(2))
    self.given = np.zeros(shape)  # all that was ever to be sent

  def correct(self, gradient):
    """What is selected from: the gradient with momentum, and what was left."""
    gradient = new = np.asarray(gradient, np.float32)
    if self.m is not None:
      self.u = new = self.m * self.u + gradient
      if self.nesterov:
        new = self.m * self.u + gradient
    self.given += new
    return self.residual + new

  def keep(self, corrected, unsent, sparse=True):
    """Momentum is cleared where something was sent; the rest waits."""
    if sparse:
      self.u = np.where(unsent != corrected, np.float32(0), self.u)
    self.residual = unsent


def clip(tree, limit):
  """Leaves whose norm together is ``limit`` at most: a list of float64."""
  leaves = [np.asarray(leaf, np.float64) for leaf in tree]
  norm = math.sqrt(sum((leaf**2).sum() for leaf in leaves))
  return [leaf * min(1.0, limit / norm) if norm else leaf for leaf in leaves]


def clipped_sum(shares, threshold):
  """The sum of what N workers send by section 3.2 of Lin et al.: a list of float64."""
  limit = len(shares) ** -0.5 * threshold
  return [sum(leaves) for leaves in zip(*(clip(x, limit) for x in shares), strict=True)]


def sparse_sum(parts, scale):
  """Float32 arrays that are mostly zeros, each times a factor, added in order."""
  total = np.zeros_like(parts[0])
  for part in parts:
    total = np.where(part != 0, total + part * np.float32(scale), total)
  return total


def all_gather(corrected, density):
  """The mean of exact selections of [N, n], and what each did not send."""
  sent = np.stack([exact(x, density) for x in corrected])
  return sparse_sum(sent, 1 / len(sent)), corrected - sent


def two_shot(corrected, density, owned):
  """Of N ranges with an owner each, who selects again, and replaces what it kept."""
  workers, size = corrected.shape
  padded = np.pad(corrected, ((0, 0), (0, owned.size - size)))
  ranges = padded.reshape(workers, workers, -1)
  sent = np.stack([[exact(part, density) for part in own] for own in ranges])
  result = np.zeros_like(owned)
  for owner in range(workers):
    mean = sparse_sum(sent[:, owner], 1 / workers) + owned[owner]
    result[owner] = exact(mean, density)
    owned[owner] = mean - result[owner]
  unsent = (ranges - sent).reshape(workers, -1)[:, :size]
  return result.ravel()[:size], unsent
