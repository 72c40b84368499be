"""The errors of codecs and of means of workers, and the budgets that bound them."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src import checks
from gradcomp._src.core.transform import compress
from gradcomp._src.cost.planner.candidates import Candidate, Record
from gradcomp._src.cost.rules import above_0
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.exchange.schedules import TwoShot

BudgetName = Literal["none", "tight", "paper", "aggressive"]
Optimizer = Literal["sgd", "adam"]
OPTIMIZER = checks.choice(Optimizer, none=True)

_TIGHT = 0.01  # of omega; of a mean's error over N, where errors of workers cancel
_LOST = 0.5  # points of accuracy
_ENOUGH = 3  # seeds; the interval of two is 12.7 standard errors to each side
_NEAR = False, 1.0  # by the same optimizer, with from half to twice the workers
# The setting of nearly all trainings of the study. Odd numbers of workers err more, by
# a sixth.
_TRAINED: tuple[Exchange, tuple[int, ...]] = (TwoShot(), (8,))
_SLACK = 1.25
_LEAVES = 8  # of a gradient that are encoded, the largest
_MATRIX = 512, 512  # of normal numbers in place of a gradient
_WAITS = 10  # times what an element waits for, a run must be long
_SHORT_WAIT = 100  # steps that an element may wait in a run of unknown length
_GROWN = 0.85  # the share by which a ring's errors grow at most, as measured


def omega(codec: Any, leaves: Any = None) -> float:
  """Returns ``E|Q(g) - g|^2 / |g|^2`` of a tree, by default of 2**18 normal numbers."""
  given = jax.tree.map(jnp.float32, [_normal(_MATRIX)] if leaves is None else leaves)
  whole = energy(jax.tree.leaves(given))
  if not 0 < whole < np.inf:
    raise ValueError(
      "`gradients` must have a norm that is finite and not 0, got the square "
      f"{whole!r}."
    )
  wrong = jax.tree.map(jnp.subtract, encoder(codec, 0)(given), given)
  return energy(jax.tree.leaves(wrong)) / whole


def _normal(shape: tuple[int, ...]) -> np.ndarray:
  """Draws a leaf of normal numbers."""
  return np.random.default_rng(0).standard_normal(shape)


@functools.lru_cache(maxsize=64)
def encoder(codec: Any, min_leaf_size: int | None) -> Callable[[Any], Any]:
  """Returns the jitted function from gradients to their decoded payloads."""
  tx = compress(codec, feedback=None, min_leaf_size=min_leaf_size)
  return jax.jit(lambda gradients: tx.update(gradients, tx.init(gradients))[0])


def energy(leaves: Iterable[Any]) -> float:
  """Returns the sum of all squares, in the range of float64."""
  return math.fsum(float(np.sum(np.abs(wide(leaf)) ** 2)) for leaf in leaves)


def wide(x: Any) -> np.ndarray:
  """Returns an array in float64, or in complex128."""
  return np.asarray(x, np.promote_types(x.dtype, np.float64))


def checked_budget(budget: Any) -> BudgetName | float:
  """Returns a valid budget: a name, or a number above 0; else raises ValueError."""
  if not isinstance(budget, str):
    return above_0("budget", budget)
  return checks.choice(BudgetName).check("budget", budget)


class Errors(NamedTuple):
  """The errors of candidates, and the budget that they must keep."""

  budget: BudgetName | float  # see gradcomp.cost.plan
  sizes: tuple[int, ...]  # of the axes, in workers
  steps: int | None = None  # of the training; None if unknown
  gradients: Sequence[np.ndarray] | None = None  # None for normal numbers
  optimizer: Optimizer | None = None  # None if unknown
  model: Any = None  # the parameters' shapes, in their tree

  @property
  def workers(self) -> int:
    """The number of workers, N."""
    return math.prod(self.sizes)

  def omega(self, candidate: Candidate) -> float:
    """Returns a candidate's loss, see :func:`omega`; the largest leaves count."""
    codec, given = candidate.codec, self.gradients
    if candidate.omega is not None and (codec.facts.parts or given is None):
      return candidate.omega
    if not codec.facts.parts:
      return omega(codec, given and sorted(given, key=np.size)[-_LEAVES:])
    # The rules of a policy are for the leaves of a tree, by their names.
    leaves, treedef = jax.tree.flatten(self.model)
    shape = lambda x: x.shape if x.size < math.prod(_MATRIX) else _MATRIX
    given = given or [_normal(shape(x)) for x in leaves]
    return omega(codec, jax.tree.unflatten(treedef, given))

  def refusal(self, candidate: Candidate, omega: float) -> str:
    """Returns the reason to refuse a candidate in all exchanges; "" for none."""
    if candidate.biased and not candidate.feedback:
      return f"it is biased, loses {omega:.3g} of the energy, and keeps no residual"
    if candidate.feedback and omega >= 1:
      return f"it loses {omega:.3g} of the energy, so that a residual would grow"
    if candidate.density is not None:
      wait = round(1 / candidate.density)
      waits = f"an element waits for about {wait:,} steps"
      if self.steps is None and wait > _SHORT_WAIT:
        return f"{waits}; it needs steps={_WAITS * wait} or more"
      if self.steps is not None and _WAITS * wait > self.steps:
        return f"{waits}, more than a tenth of {self.steps:,}"
    if self.budget == "none":
      return f'budget "none" allows no error, and omega is {omega:.3g}'
    if self.budget == "paper":
      found = self.deciding(candidate)  # what sparse ones lose depends on the net
      tasks, where = (1, "") if candidate.density is None else (2, " in two tasks")
      if len({x.task for x in found}) < tasks:
        return f"the study has no record of it with {_ENOUGH} seeds{where}"
      for x in found:  # a loss is one that all of its interval shows
        if x.points < -_LOST and x.points + x.half < 0:
          return f'it ended {x}; budget "paper" allows {_LOST}'
    return ""

  def notes(self, chosen: Candidate, compared: Iterable[Candidate]) -> list[str]:
    """Returns sentences about records: of the choice, and of candidates without any."""
    if self.budget != "paper" or not chosen.records:
      return []
    near = lambda x: x.far(self.workers, self.optimizer) <= _NEAR
    alone = [x.name for x in compared if not any(map(near, self.deciding(x)))]
    notes = [f"{chosen.name} in the study, at worst: {self.deciding(chosen)[0]}."]
    if alone:
      by = f" by {self.optimizer}" if self.optimizer else ""
      range_of = f"{-(-self.workers // 2)} to {2 * self.workers} workers"
      names = ", ".join(dict.fromkeys(alone))
      notes.append(f"No record{by} with {range_of}: {names}.")
    return notes

  def deciding(self, candidate: Candidate) -> list[Record]:
    """Returns the nearest records of each task, the lowest accuracy first."""
    away = lambda x: x.far(self.workers, self.optimizer)
    enough = sorted((x for x in candidate.records if x.seeds >= _ENOUGH), key=away)
    least = {x.task: away(x) for x in reversed(enough)}
    found = (x for x in enough if away(x) == least[x.task])
    return sorted(found, key=lambda x: x.points)

  def excess(self, candidate: Candidate, omega: float, error: float) -> str:
    """Returns the reason why a mean's error exceeds the budget; "" if it does not."""
    share = error / self.workers
    says = f"the mean's error is {error:.3g}, and"
    over = f"{says} {share:.3g} over the workers"
    if self.budget == "tight":
      kept = candidate.feedback and omega <= _TIGHT
      if not kept and (candidate.biased or share > _TIGHT):
        return f'{over}; budget "tight" allows {_TIGHT}'
    elif self.budget == "paper":
      trained = mean_error(candidate, omega, *_TRAINED)
      if error > max(_TIGHT, _SLACK * trained):
        return f"{says} {trained:.3g} where it was trained"
    elif not isinstance(self.budget, str) and share > self.budget:
      return f"{over}, above the budget of {self.budget:.3g}"
    return ""


def mean_error(
  candidate: Candidate, omega: float, exchange: Exchange, sizes: Sequence[int]
) -> float:
  """Returns the squared error of a first mean of normal numbers, over its square."""
  workers, errors = math.prod(sizes), [0.0]
  inside = sizes[-1] if exchange.way == "grouped" else 1
  groups = workers // inside
  # Unbiased codecs round in pairs of workers with errors that cancel by half.
  pairs = groups // 2 + groups % 2
  leaves = omega if candidate.biased else omega * pairs / groups
  for facts in (x for x in candidate.codec.facts.each if not x.plain):
    error, exact = leaves, facts.exact and not facts.in_format
    if facts.rounds:  # each addition in the codec's format rounds the sum so far
      added = lambda n: ((n + 1) * n / 2 - 1) / n  # of sums of 2, 3, ... n, over n
      error = omega * (1 + added(inside) + added(groups))
    elif exact or groups == 1 or exchange.way in ("gathered", "reduced"):
      pass  # sums lose nothing
    elif candidate.biased:
      left = [(1 - omega) ** n for n in range(1, workers + 1)]  # after n encodings
      error = 1 - (sum(left) / workers if exchange.way == "passed" else left[1])
    elif exchange.way == "passed":
      # It encodes the sums of 1, 2, ... N gradients, and the errors so far with them.
      grown = _GROWN * (1 - math.exp(-omega / 2 * workers / (3 * _GROWN)))
      error = omega / 2 * ((workers + 1) / 2 * (1 + grown) + workers % 2 / workers)
    else:
      # Owners round means to nearest, with half of omega. A mean has its errors in it,
      # too, and with few levels its own loss grows with the root of that.
      error += omega / 2 * math.sqrt(1 + leaves)
    errors.append(error)
  return max(errors)
