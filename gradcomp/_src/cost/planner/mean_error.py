"""Predicts how far the mean that workers receive is from that of their gradients."""

import math
from collections.abc import Sequence

from gradcomp._src.codecs import sums
from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.codecs.sums.sum import Sum
from gradcomp._src.exchange.protocol import Exchange

_GROWN = 0.85  # the share by which a ring's errors grow at most, as measured


def mean_error(
  omega: float,
  codec: LeafCodec,
  exchange: Exchange,
  sizes: Sequence[int],
  *,
  biased: bool,
) -> float:
  r"""Returns the squared error of the mean of all workers, over its squared norm.

  Their gradients are independent normal numbers, and no residual is there yet: it is
  the error of a first step.

  - Leaves. Unbiased codecs round in pairs of workers, whose errors cancel by half. That
    leaves :math:`a = \omega / 2`, and more with an odd worker.
  - Owners. They round means to nearest, with half of :math:`\omega`. A mean has its
    errors in it, too, and of few levels what it loses grows with the root of that:
    :math:`a + \frac{\omega}{2} \sqrt{1 + a}`.
  - A ring encodes the sums of 1, 2, ... N gradients, and so errs
    :math:`a \frac{N + 1}{2} (1 + s)`. Errors are encoded again, which s stands for:
    :math:`c \, (1 - e^{-a N / 3 c})`, with the c = 0.85 of measurements.
  - A biased codec shortens what it encodes: of its energy :math:`1 - \omega` is left.
  - Where sums are exact, the leaves' errors are all. Where a codec adds in its own
    format, each addition rounds the sum so far.

  Args:
    omega: E|Q(g) - g|^2 / |g|^2 of the codec.
    codec: Q; of a policy the worst counts.
    exchange: who adds what.
    sizes: the number of workers along each axis.
    biased: whether the mean of what Q sends is not the gradient.

  Example:
    >>> from gradcomp.exchange import Ring, TwoShot
    >>> codec = gradcomp.codecs.QSGD(bits=4)
    >>> [round(mean_error(0.036, codec, Ring(), [n], biased=False), 3) for n in (2, 8)]
    [0.027, 0.085]
    >>> round(mean_error(0.036, codec, TwoShot(), [8], biased=False), 3)
    0.036
  """
  coded = [total for total in sums.every(codec) if not total.plain]
  errors = (_of_sum(omega, total, exchange, sizes, biased) for total in coded)
  return max(errors, default=0.0)


def _of_sum(
  omega: float, total: Sum, exchange: Exchange, sizes: Sequence[int], biased: bool
) -> float:
  """Returns the error of the mean of one codec's sums."""
  workers = math.prod(sizes)
  inside = sizes[-1] if exchange.way == "grouped" else 1
  groups = workers // inside
  if total.rounds:
    return omega * (1 + _added(inside) + _added(groups))
  leaves = omega if biased else omega * (groups // 2 + groups % 2) / groups
  exact = total.exact and not total.in_format
  if exact or groups == 1 or exchange.way in ("gathered", "reduced"):
    return leaves
  if exchange.way == "passed":
    return _shortened(omega, workers) if biased else _passed(omega, workers)
  if biased:
    return 1 - (1 - omega) ** 2
  return leaves + omega / 2 * math.sqrt(1 + leaves)


def _passed(omega: float, workers: int) -> float:
  """Returns the error of an unbiased codec in a ring."""
  paired = omega / 2
  grown = _GROWN * (1 - math.exp(-paired * workers / (3 * _GROWN)))
  return paired * ((workers + 1) / 2 * (1 + grown) + workers % 2 / workers)


def _shortened(omega: float, workers: int) -> float:
  """Returns the error of a biased codec in a ring."""
  energy = 0.0
  for _ in range(workers):
    energy = (1 - omega) * (energy + 1)
  return 1 - energy / workers


def _added(count: int) -> float:
  """Returns what rounding the sums of 2, 3, ... numbers adds, in errors of one."""
  return ((count + 1) * count / 2 - 1) / count
