"""Measures how much of a gradient a codec loses, and says which loss is too much."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.core.transform import compress
from gradcomp._src.cost.planner.candidates import Candidate
from gradcomp._src.cost.planner.mean_error import mean_error
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


def omega(codec: LeafCodec, leaves: Sequence[Any] | None = None) -> float:
  r"""Returns the share of a gradient's energy that encoding it once loses.

  .. math:: \omega = \frac{E \lVert Q(g) - g \rVert^2}{\lVert g \rVert^2}

  Args:
    codec: Q.
    leaves: the arrays of g; by default 2**18 normal numbers.

  Raises:
    ValueError: the gradient is zero, or not finite.

  Example:
    >>> round(omega(gradcomp.codecs.QSGD(bits=4)), 3)
    0.036
  """
  if leaves is None:
    leaves = [np.random.default_rng(0).standard_normal((512, 512))]
  given = [jnp.asarray(leaf, jnp.float32) for leaf in leaves]
  energy = sum(float(jnp.sum(leaf**2)) for leaf in given)
  if not 0 < energy < np.inf:
    raise ValueError(
      "`gradients` must have a norm that is finite and not 0, got the square "
      f"{energy!r}."
    )
  tx = compress(codec, feedback=None, min_leaf_size=0)
  sent, _ = jax.jit(tx.update)(given, tx.init(given))
  lost = sum(float(jnp.sum((a - b) ** 2)) for a, b in zip(sent, given, strict=True))
  return lost / energy


def checked_budget(budget: Any) -> BudgetName | float:
  """Returns a budget; ValueError unless it is a name, or a number above 0."""
  if isinstance(budget, str):
    if budget not in get_args(BudgetName):
      raise ValueError(
        f"`budget` must be one of {get_args(BudgetName)}, or a bound on the error over "
        f"the workers, got {budget!r}."
      )
    return budget  # type: ignore[return-value]
  return above_0("budget", budget)


class Errors(NamedTuple):
  """Says which candidates lose too much.

  Attributes:
    budget: what may be lost, see :func:`gradcomp.cost.plan`.
    sizes: the number of workers along each axis.
    steps: the steps of the training, None if they are unknown.
    gradients: the leaves to measure errors on; None for normal numbers.
  """

  budget: BudgetName | float
  sizes: tuple[int, ...]
  steps: int | None = None
  gradients: Sequence[np.ndarray] | None = None

  @property
  def workers(self) -> int:
    """N."""
    return math.prod(self.sizes)

  def omega(self, candidate: Candidate) -> float:
    """Returns what a candidate loses, see :func:`omega`.

    Of gradients, the largest leaves count.
    """
    if self.gradients is not None:
      return omega(candidate.codec, sorted(self.gradients, key=np.size)[-_LEAVES:])
    return omega(candidate.codec) if candidate.omega is None else candidate.omega

  def of_mean(self, candidate: Candidate, omega: float, exchange: Exchange) -> float:
    """Returns the error of the mean that an exchange makes, see :func:`mean_error`."""
    biased = candidate.biased
    return mean_error(omega, candidate.codec, exchange, self.sizes, biased=biased)

  def refusal(self, candidate: Candidate, omega: float) -> str:
    """Returns why a candidate's error is too much in all exchanges; "" if it is not."""
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
    """Returns why a mean's error is too much for the budget; "" if it is not.

    Args:
      candidate: one that is not refused altogether.
      omega: what its codec loses.
      error: that of the mean, by ``of_mean``.
    """
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
