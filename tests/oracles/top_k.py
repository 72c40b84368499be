"""Computes RedSync in plain NumPy, and takes nothing from the library.

* :func:`trimmed` and :func:`threshold_ratio` are algorithms 2 and 3 of Fang et al.
  2018, on real numbers; :func:`largest` is what both must contain;
* :class:`Worker` is momentum correction and factor masking, :func:`clip` the local
  clipping of Lin et al. 2018, section 3;
* sizes, RandomK's positions and the exchanges follow docs/inside/wire-format.md.
"""

import math

import numpy as np

from tests.oracles import qsgd

NAN_ORDER = 0x7F800001


def entries_of(density, size):
  """k: how many elements of a range are sent."""
  return max(1, min(size, math.ceil(density * size * (1 - 2.0**-40))))


def slots_of(density, size, selection="auto", slack=2.0):
  """S: entries that a row has room for."""
  k = entries_of(density, size)
  if selection == "auto":
    selection = "exact" if size < 2**20 else "threshold"  # trimmed has k slots, too
  searched = selection in ("threshold", "sampled")
  return min(size, math.floor(slack * k)) if searched else k


def order(x):
  """Magnitudes as integers: of numbers, infinities above these, NaN above all."""
  bits = np.asarray(x, np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF)
  return np.minimum(bits, NAN_ORDER).astype(np.int64)


def largest(x, k):
  """The magnitudes of the k largest, in descending order, as of :func:`order`."""
  bits = order(x)
  return np.sort(np.partition(bits, bits.size - k)[bits.size - k :])[::-1]


def positions_of_largest(x, k):
  """Where these are, of equal elements the first ones."""
  return np.sort(np.argsort(-order(x), kind="stable")[:k])


def trimmed(x, k):
  """Algorithm 2: the positions of the top k of what a lowered threshold leaves."""
  v = np.abs(np.asarray(x, np.float64))
  mean, top = v.mean(), v.max()
  for ratio in (0.8, 0.6, 0.4, 0.2, 0.0, -0.2):
    survivors = np.flatnonzero(v > mean + ratio * (top - mean))
    if survivors.size >= k:
      break
  else:  # few are above the mean, and equal elements never are: none is trimmed
    survivors = np.arange(v.size)
  return survivors[positions_of_largest(np.asarray(x)[survivors], k)]


def threshold_ratio(x, k, most, eps=1e-3):
  """Algorithm 3: a threshold and how many elements exceed it, when the search ends."""
  v = np.abs(np.asarray(x, np.float64))
  mean, top = v.mean(), v.max()
  low, high = 0.0, 1.0
  while True:
    middle = (low + high) / 2
    threshold = mean + middle * (top - mean)
    count = int((v > threshold).sum())
    if k <= count <= most or high - low < eps:
      return threshold, count
    low, high = (middle, high) if count > most else (low, middle)


def alternating(x, k, sign):
  """Of one sign the positions of the k largest, at most; zeros are of no sign."""
  x = np.asarray(x, np.float32)
  own = np.flatnonzero((sign * x > 0) | ~np.isfinite(x))
  return own[positions_of_largest(x[own], min(k, own.size))]


class Worker:
  """What one worker keeps of one leaf, and what it would send: float32.

  Args:
    shape: of the leaf.
    momentum: m; None for plain residuals.
    nesterov: whether ``m u' + g`` is sent.
  """

  def __init__(self, shape, momentum=None, nesterov=False):
    self.m = None if momentum is None else np.float32(momentum)
    self.nesterov = nesterov
    self.u, self.residual = (np.zeros(shape, np.float32) for _ in range(2))
    self.given = np.zeros(shape)  # all that was ever to be sent

  def correct(self, gradient):
    """The gradient with momentum and what was left: what is selected from."""
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
  """The sum of what N workers send in Deep Gradient Compression: a list of float64.

  By its section 3.2 and equation 3: a worker's gradient is its share of the sum,
  ``1 / (N b)`` times what its b examples add up to. Each is clipped at ``N^(-1/2)`` of
  the threshold of the whole.

  Args:
    shares: of each worker, a list of leaves.
    threshold: the norm that is clipped at where one worker has all examples.
  """
  limit = len(shares) ** -0.5 * threshold
  return [sum(leaves) for leaves in zip(*(clip(x, limit) for x in shares), strict=True)]


def random_k_stride(density, size):
  """The elements of which RandomK sends one."""
  return -(-size // entries_of(density, size))


def random_k_positions(key, rows, size, density):
  """The elements of each row, int64[rows, S]; `size` and more stand for nothing.

  Args:
    key: the leaf's, two words.
    rows: of the leaf.
    size: elements of a row.
    density: the share to send.
  """
  stride = random_k_stride(density, size)
  entry = np.arange(-(-size // stride), dtype=np.uint32)
  result = []
  for row in range(rows):
    row_key = qsgd.threefry2x32(key, row, row)
    result.append(entry * stride + qsgd.threefry2x32(row_key, entry, 0)[0] % stride)
  return np.array(result, np.int64)


def sparse_sum(parts, scale):
  """Float32 arrays that are mostly zeros, each times a factor, added in order."""
  total = np.zeros_like(parts[0])
  for part in parts:
    total = np.where(part != 0, total + part * np.float32(scale), total)
  return total


def exact(x, density):
  """What the k largest elements decode to: float32 with zeros elsewhere."""
  x = np.asarray(x, np.float32)
  result = np.zeros_like(x)
  chosen = positions_of_largest(x, entries_of(density, x.size))
  result[chosen] = x[chosen]
  return result


def all_gather(corrected, density):
  """The mean after ``all_gather`` of exact selections, and what each did not send.

  Args:
    corrected: float32[N, n], gradients with residuals.
    density: the share to send.
  """
  sent = np.stack([exact(x, density) for x in corrected])
  return sparse_sum(sent, 1 / len(sent)), corrected - sent


def two_shot(corrected, density, owned):
  """Like :func:`all_gather`, of N ranges that each have an owner, who selects again.

  Args:
    corrected: float32[N, n].
    density: the share of each range to send.
    owned: float32[N, ceil(n / N)], what owners kept; replaced in place.
  """
  workers, size = corrected.shape
  padded = np.zeros((workers, owned.size), np.float32)
  padded[:, :size] = corrected
  ranges = padded.reshape(workers, workers, -1)
  sent = np.stack([[exact(part, density) for part in own] for own in ranges])
  result = np.zeros_like(owned)
  for owner in range(workers):
    mean = sparse_sum(sent[:, owner], 1 / workers) + owned[owner]
    result[owner] = exact(mean, density)
    owned[owner] = mean - result[owner]
  unsent = (ranges - sent).reshape(workers, -1)[:, :size]
  return result.ravel()[:size], unsent
