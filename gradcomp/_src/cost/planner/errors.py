"""The errors of codecs and of means of workers, and the budgets that bound them."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.codecs.sums.sum import SumFacts
from gradcomp._src.core.transform import compress
from gradcomp._src.cost.planner.candidates import Candidate
from gradcomp._src.cost.rules import above_0
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.exchange.two_shot import TwoShot

BudgetName = Literal["none", "tight", "paper", "aggressive"]

_TIGHT = 0.01  # of omega; of a mean's error over N, where errors of workers cancel
_LOST = 0.5  # points of accuracy
# The study's trainings, but for few. An odd number of workers errs a sixth more.
_TRAINED: tuple[Exchange, tuple[int, ...]] = (TwoShot(), (8,))
_SLACK = 1.25
_LEAVES = 8  # of a gradient that are encoded, the largest
_WAITS = 10  # times what an element waits for, a run must be long
_SHORT_WAIT = 100  # steps that an element may wait in a run of unknown length
_GROWN = 0.85  # the share by which a ring's errors grow at most, as measured


def omega(codec: LeafCodec, leaves: Sequence[Any] | None = None) -> float:
  r"""Returns the share of a gradient's energy that one encoding of it loses.

  It is :math:`\omega = E \lVert Q(g) - g \rVert^2 / \lVert g \rVert^2` of the arrays of
  g; by default of 2**18 normal numbers.
  """
  if leaves is None:
    leaves = [np.random.default_rng(0).standard_normal((512, 512))]
  given = [jnp.asarray(leaf, jnp.float32) for leaf in leaves]
  energy = _energy(given)
  if not 0 < energy < np.inf:
    raise ValueError(
      "`gradients` must have a norm that is finite and not 0, got the square "
      f"{energy!r}."
    )
  tx = compress(codec, feedback=None, min_leaf_size=0)
  sent, _ = jax.jit(tx.update)(given, tx.init(given))
  return _energy(map(jnp.subtract, sent, given)) / energy


def _energy(leaves: Iterable[jax.Array]) -> float:
  """Returns the sum of all squares, in the range of float64."""
  return sum(float(np.sum(np.asarray(leaf, np.float64) ** 2)) for leaf in leaves)


def checked_budget(budget: Any) -> BudgetName | float:
  """Returns a valid budget: a name, or a number above 0; else raises ValueError."""
  if isinstance(budget, str):
    if budget not in get_args(BudgetName):
      raise ValueError(
        f"`budget` must be one of {get_args(BudgetName)}, or a bound on the error over "
        f"the workers, got {budget!r}."
      )
    return budget  # type: ignore[return-value]
  return above_0("budget", budget)


class Errors(NamedTuple):
  """The errors of candidates, and the budget that they must keep."""

  budget: BudgetName | float  # see gradcomp.cost.plan
  sizes: tuple[int, ...]  # of the axes, in workers
  steps: int | None = None  # of the training; None if unknown
  gradients: Sequence[np.ndarray] | None = None  # None for normal numbers

  @property
  def workers(self) -> int:
    """The number of workers, N."""
    return math.prod(self.sizes)

  def omega(self, candidate: Candidate) -> float:
    """Returns a candidate's loss, see :func:`omega`; the largest leaves count."""
    # The rules of a policy are for the leaves of a tree, which were measured for it.
    by_path = bool(candidate.codec.facts.parts) and candidate.omega is not None
    if self.gradients is not None and not by_path:
      return omega(candidate.codec, sorted(self.gradients, key=np.size)[-_LEAVES:])
    return omega(candidate.codec) if candidate.omega is None else candidate.omega

  def of_mean(self, candidate: Candidate, omega: float, exchange: Exchange) -> float:
    """Returns the error of the mean of an exchange, see :func:`mean_error`."""
    biased = candidate.biased
    return mean_error(omega, candidate.codec, exchange, self.sizes, biased=biased)

  def refusal(self, candidate: Candidate, omega: float) -> str:
    """Returns the reason to refuse a candidate in all exchanges; "" for none."""
    if candidate.biased and not candidate.feedback:
      return f"it is biased, loses {omega:.3g} of the energy, and keeps no residual"
    if candidate.feedback and omega >= 1:
      return f"it loses {omega:.3g} of the energy, so that a residual would grow"
    if candidate.density is not None:
      wait = round(1 / candidate.density)
      if self.steps is None and wait > _SHORT_WAIT:
        return (
          f"an element waits for about {wait:,} steps; it needs steps={_WAITS * wait} "
          "or more"
        )
      if self.steps is not None and _WAITS * wait > self.steps:
        return (
          f"an element waits for about {wait:,} steps, more than a tenth of "
          f"{self.steps:,}"
        )
    if self.budget == "none":
      return f'budget "none" allows no error, and omega is {omega:.3g}'
    if self.budget == "paper":
      if candidate.points is None:
        return "no training of the study with it went to its end"
      if candidate.points < -_LOST:
        return (
          f"it ended {-candidate.points:.2g} points below float32 in the study; budget "
          f'"paper" allows {_LOST}'
        )
    return ""

  def excess(self, candidate: Candidate, omega: float, error: float) -> str:
    """Returns the reason why a mean's error exceeds the budget; "" if it does not."""
    share = error / self.workers
    if self.budget == "tight":
      kept = candidate.feedback and omega <= _TIGHT
      if not kept and (candidate.biased or share > _TIGHT):
        number = f"the mean's error is {error:.3g}, and {share:.3g} over the workers"
        return f'{number}; budget "tight" allows {_TIGHT}'
    elif self.budget == "paper":
      trained = self._replace(sizes=_TRAINED[1]).of_mean(candidate, omega, _TRAINED[0])
      if error > max(_TIGHT, _SLACK * trained):
        return (
          f"the mean's error is {error:.3g}, and {trained:.3g} where it was trained"
        )
    elif not isinstance(self.budget, str) and share > self.budget:
      return (
        f"the mean's error is {error:.3g}, and {share:.3g} over the workers, above the "
        f"budget of {self.budget:.3g}"
      )
    return ""


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
    errors in it, too, and with few levels its own loss grows with the root of that:
    :math:`a + \frac{\omega}{2} \sqrt{1 + a}`.
  - A ring encodes the sums of 1, 2, ... N gradients, and so errs :math:`a \frac{N +
    1}{2} (1 + s)`. Errors are encoded again, which s stands for: :math:`c \, (1 - e^{-a
    N / 3 c})`, with the c = 0.85 of measurements.
  - A biased codec shortens its argument: of its energy :math:`1 - \omega` is left.
  - Where sums are exact, the leaves' errors are all. Where a codec adds in its own
    format, each addition rounds the sum so far.
  """
  coded = [facts for facts in codec.facts.each if not facts.plain]
  errors = (_of_sum(omega, facts, exchange, sizes, biased) for facts in coded)
  return max(errors, default=0.0)


def _of_sum(
  omega: float, facts: SumFacts, exchange: Exchange, sizes: Sequence[int], biased: bool
) -> float:
  """Returns the error of the mean of one codec's sums."""
  workers = math.prod(sizes)
  inside = sizes[-1] if exchange.way == "grouped" else 1
  groups = workers // inside
  if facts.rounds:
    return omega * (1 + _added(inside) + _added(groups))
  leaves = omega if biased else omega * (groups // 2 + groups % 2) / groups
  exact = facts.exact and not facts.in_format
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
  """Returns the sum of the errors of rounding sums of 2, 3, ... numbers, over one."""
  return ((count + 1) * count / 2 - 1) / count
