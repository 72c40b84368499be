"""Sums of floats of few bits: the page's FloatCast, and Han et al. 2021, section 5."""

import functools

import numpy as np

from tests.specs.floats import quantize


def odd_sum(a, b):
  """a + b in float64, with the last bit set where that is not exact.

  Rounding this to 51 bits and less is rounding the exact sum (Boldo, Melquiond 2008).
  """
  a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
  with np.errstate(invalid="ignore", over="ignore"):
    total = a + b
    other = total - a
    lost = (a - (total - other)) + (b - other)
  even = total.view(np.int64) % 2 == 0
  inexact = np.isfinite(total) & (lost != 0) & even
  return np.where(inexact, np.nextafter(total, np.copysign(np.inf, lost)), total)


def add(a, b, fmt, **options):
  """The correctly rounded sum of numbers of the format."""
  return quantize(odd_sum(a, b), fmt, **options)


def multiply(a, b, fmt):
  """The correctly rounded product; its 48 bits are exact in float64."""
  with np.errstate(invalid="ignore"):
    return quantize(np.asarray(a, np.float64) * np.asarray(b, np.float64), fmt)


def total(parts, fmt, method="sequential", **options):
  """The sum of numbers of the format along the first axis; options of `quantize`."""
  plus = lambda a, b: add(a, b, fmt, **options)
  parts = np.asarray(parts, np.float32)
  if method == "pairwise":
    while len(parts) > 1:
      paired = plus(parts[: len(parts) // 2 * 2 : 2], parts[1::2])
      parts = np.concatenate([paired, parts[len(parts) // 2 * 2 :]])
    return parts[0]
  if method == "sequential":
    return functools.reduce(plus, parts)
  s, q = parts[0], np.zeros_like(parts[0])
  for v in parts[1:]:
    y = plus(v, -q)
    t = plus(s, y)
    q = np.where(np.isfinite(t), plus(plus(t, -s), -y), np.float32(0))
    s = t
  return s


def matmul(a, b, fmt, accumulator=None, method="sequential"):
  """Each product is rounded to `fmt`, then to the accumulator, and added up there."""
  accumulator = accumulator or fmt
  a, b = quantize(a, fmt), quantize(b, fmt)
  products = multiply(np.moveaxis(a, -1, 0)[..., None], b[:, None, :], fmt)
  return total(quantize(products, accumulator), accumulator, method)


def all_reduce(x, fmt, order="gathered", group_size=None, method="sequential"):
  """The sum of x[N, ...] in the order of an exchange, elements cut into N shares."""
  x = quantize(x, fmt)
  workers, size = len(x), x[0].size
  flat = np.pad(x.reshape(workers, -1), ((0, 0), (0, -size % workers)))
  shares = flat.reshape(workers, workers, -1)
  result = ordered(shares, fmt, order, group_size, method)
  return result.ravel()[:size].reshape(x.shape[1:])


def ordered(shares, fmt, order, group_size=None, accumulate="format", saturate=False):
  """The sums of the shares [N, share, ...] of N workers, in an exchange's order."""
  workers, wide = len(shares), accumulate == "float32"
  sent = lambda x: quantize(x, fmt, saturate=saturate) if wide else x

  def added(parts):
    if wide:
      return functools.reduce(np.add, parts)  # binary32
    method = "kahan" if accumulate == "kahan" else "sequential"
    return total(parts, fmt, method, saturate=saturate)

  if order in ("gathered", "all_gather"):
    return added(shares)
  if order == "two_shot":
    return sent(added(shares))
  if order == "hierarchical":
    first = range(0, workers, group_size)
    return sent(added([sent(added(shares[i : i + group_size])) for i in first]))
  result = np.zeros_like(shares[0])
  for d in range(workers):
    visits = [shares[(d + 1 + hop) % workers, d] for hop in range(workers)]
    hop = lambda s, own: sent(s + own)
    result[d] = functools.reduce(hop, visits) if wide else added(visits)
  return result
