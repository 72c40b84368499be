"""Predicts train steps: overlap, crossovers and scaling."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gradcomp._src.cost.cluster import Cluster
from gradcomp._src.cost.exchange import (
  Breakdown,
  Speeds,
  dense_seconds,
  exchange_seconds,
)
from gradcomp._src.cost.rules import at_least_0

if TYPE_CHECKING:  # at run time this would import JAX
  from gradcomp._src.report.explain import Explanation

Explanations = Sequence["Explanation"]


def step_seconds(
  forward: float,
  backward: float,
  messages: Sequence[tuple[float, Breakdown]],
  overlap: bool,
) -> float:
  r"""Predicts the seconds of a train step.

  Without overlap these are the sum of all. With it, message i may leave when a share
  :math:`s_i` of the backward pass is done. Its codec's seconds :math:`q_i` stall the
  passes, and its wire's :math:`w_i` do not. One message follows the other:

  .. math:: r_i = \text{forward} + s_i \, \text{backward} + \sum_{j \le i} q_j, \qquad
     t_i = \max(t_{i-1}, r_i) + w_i

  The step takes the longer of the last message and of all that the worker computes.

  Args:
    forward: the seconds of the forward pass.
    backward: the seconds of the backward pass.
    messages: the share and the cost of each message, in the order in which they leave.
    overlap: whether messages travel while the backward pass goes on.

  Returns:
    The seconds.

  Raises:
    ValueError: seconds are below 0, or a share is not between the last one and 1.

  Example:
    >>> cost = Breakdown(encode=1.0, wire=(("all_reduce", 8.0, 6.0),))
    >>> step_seconds(2.0, 4.0, [(0.5, cost), (1.0, cost)], overlap=False)
    20.0
    >>> step_seconds(2.0, 4.0, [(0.5, cost), (1.0, cost)], overlap=True)
    17.0
  """
  compute = at_least_0("forward", forward) + at_least_0("backward", backward)
  shares = [0.0, *(share for share, _ in messages), 1.0]
  if not all(a <= b for a, b in itertools.pairwise(shares)):
    raise ValueError(
      f"`messages` must have rising shares from 0 to 1, got {shares[1:-1]}."
    )
  if not overlap:
    return compute + sum(cost.total for _, cost in messages)
  codec = sent = 0.0
  for share, cost in messages:
    codec += cost.codec_seconds
    sent = max(sent, forward + share * backward + codec) + cost.wire_seconds
  return max(compute + codec, sent)


def crossover_rate(
  explanation: "Explanation", cluster: Cluster, speeds: Speeds
) -> float:
  """Returns the bytes per second of ``cluster.link`` above which a plain mean wins.

  The seconds of both are ``a + b / rate``. With no latencies, and no factors of the
  link, the rate is the bytes that the exchange saves, over the seconds of its codec.

  Args:
    explanation, cluster, speeds: as for :func:`exchange_seconds`. The rate of the link
      does not matter.

  Returns:
    The rate; infinity if the exchange wins at high rates, too, and 0 if it wins at no
    rate.

  Raises:
    ValueError: as for :func:`exchange_seconds`.
  """
  return rate_without_gain(lambda at: _gain(explanation, at, speeds), cluster)


def rate_without_gain(gain: Callable[[Cluster], float], cluster: Cluster) -> float:
  """Returns the rate of ``cluster.link`` at which a gain in seconds is 0."""
  link = cluster.link
  faster = dataclasses.replace(link, bytes_per_second=2 * link.bytes_per_second)
  gains = [gain(dataclasses.replace(cluster, link=each)) for each in (link, faster)]
  by_rate = 2 * (gains[0] - gains[1])  # what doubling the rate halves
  fixed = gains[0] - by_rate
  if fixed > 0 or fixed == 0 < by_rate:
    return math.inf
  return link.bytes_per_second * max(0.0, by_rate) / -fixed if fixed else 0.0


def crossover_workers(
  explanations: Explanations, cluster: Cluster, speeds: Speeds
) -> int | None:
  """Returns the least number of workers for which a plain mean is as fast, or faster.

  Args:
    explanations: the exchange with several numbers of workers, the least first.
    cluster: the links; its number of workers does not matter.
    speeds: as for :func:`exchange_seconds`.

  Returns:
    The number of workers; None if the exchange wins with all of them.
  """
  for explanation in explanations:
    if _gain(explanation, _sized(cluster, explanation), speeds) <= 0:
      return explanation.workers
  return None


def strong_scaling(
  compute: float, explanations: Explanations, cluster: Cluster, speeds: Speeds
) -> tuple[float, ...]:
  """Predicts steps with one batch, divided over several numbers of workers.

  A step takes ``compute / N``, and then the exchange.

  Args:
    compute: the seconds that one worker takes for the whole batch.
    explanations: the exchange with each number of workers N.
    cluster, speeds: as for :func:`crossover_workers`.

  Returns:
    The seconds of a step, for each explanation.

  Raises:
    ValueError: ``compute`` is below 0.
  """
  costs = _costs(compute, explanations, cluster, speeds)
  pairs = zip(explanations, costs, strict=True)
  return tuple(compute / x.workers + seconds for x, seconds in pairs)


def weak_scaling(
  compute: float, explanations: Explanations, cluster: Cluster, speeds: Speeds
) -> tuple[float, ...]:
  """Predicts steps with a batch a worker, for several numbers of workers.

  A step takes ``compute``, and then the exchange.

  Args:
    compute: the seconds that a worker takes for its part of the batch.
    explanations, cluster, speeds: as for :func:`strong_scaling`.

  Returns:
    The seconds of a step, for each explanation.

  Raises:
    ValueError: ``compute`` is below 0.
  """
  costs = _costs(compute, explanations, cluster, speeds)
  return tuple(compute + seconds for seconds in costs)


def _costs(
  compute: float, explanations: Explanations, cluster: Cluster, speeds: Speeds
) -> list[float]:
  at_least_0("compute", compute)
  return [exchange_seconds(x, _sized(cluster, x), speeds).total for x in explanations]


def _sized(cluster: Cluster, explanation: "Explanation") -> Cluster:
  return dataclasses.replace(cluster, workers=explanation.workers)


def _gain(explanation: "Explanation", cluster: Cluster, speeds: Speeds) -> float:
  """Returns the seconds that an exchange saves, compared with a plain mean."""
  elements = sum(leaf.elements for leaf in explanation.leaves)
  dense = dense_seconds(elements, cluster).total
  return dense - exchange_seconds(explanation, cluster, speeds).total
