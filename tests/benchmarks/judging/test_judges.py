"""How intervals, many settings and an analysis of variance decide."""

import numpy as np
import pytest
from scipy import stats

from benchmarks.study.analysis import Spread, spread
from benchmarks.study.judges.accuracy import blocked
from benchmarks.study.judges.verdicts import FEW, OWN, USUAL, Seen, concluded, of_all


@pytest.mark.parametrize("count", [3, 5, 50])
@pytest.mark.parametrize(
  "mean, half, expected",
  [
    (-0.1, 0.05, True),
    (0.3, 0.4, True),
    (-0.1, 0.15, None),
    (-0.3, 0.15, None),
    (-0.3, 0.05, False),
    (-0.1, float("nan"), None),
  ],
)
def test_an_interval_tells_on_one_side_of_the_limit(mean, half, expected, count):
  """However many seeds it is of; both ways round."""
  found = Spread(mean, half, count)
  assert found.at_least(-0.2) is expected
  assert (-found).at_most(0.2) is expected


@pytest.mark.parametrize(
  "mean, half, expected",
  [
    (-1.0, 0.5, True),  # as the paper
    (-0.3, 0.2, True),  # less than in the paper, and yet an effect
    (-0.1, 0.2, False),  # neither an effect nor the paper's
    (0.6, 0.5, False),
    (-0.5, 0.6, None),  # no effect, or the paper's
    (0.6, 2.0, None),
  ],
)
def test_an_effect_is_told_by_zero_and_by_the_papers_number(mean, half, expected):
  found = Spread(mean, half, 5)
  assert found.below(1.0) is expected
  assert (-found).above(1.0) is expected


def test_two_one_sided_tests_give_the_same_verdicts():
  """Each at 2.5 %, by scipy's t test of one sample."""
  rng = np.random.default_rng(0)
  told = []
  for _ in range(200):
    values = rng.normal(-0.2, 0.3, 5)
    less, greater = (
      stats.ttest_1samp(values, -0.2, alternative=way).pvalue < 0.025
      for way in ("less", "greater")
    )
    expected = True if greater else False if less else None
    assert spread(values.tolist()).at_least(-0.2) is expected
    told.append(expected)
  assert {True, False, None} == set(told)


@pytest.mark.parametrize(
  "told, share, expected",
  [
    ([True, True], 1.0, "holds"),
    ([True, None], 1.0, "cannot tell"),
    ([False, None], 1.0, "does not"),
    ([True, False], 1.0, "does not"),
    ([None], 1.0, "cannot tell"),
    ([], 1.0, "not tested"),
    ([True, False, False], 0.0, "holds"),
    ([None, False], 0.0, "cannot tell"),
    ([False, False], 0.0, "does not"),
    ([True, True, True, False], 0.75, "holds"),
    ([True, True, None, False], 0.75, "cannot tell"),
    ([True, None, False, False], 0.75, "does not"),
  ],
)
def test_settings_that_cannot_tell_might_be_either(told, share, expected):
  assert concluded([Seen(x, "") for x in told], "", share).verdict == expected


@pytest.mark.parametrize("others", [[], [Seen(False, "far", USUAL)]])
def test_the_papers_own_setting_decides_alone(others):
  few = [Seen(None, "two seeds", FEW)]
  found = concluded([*few, *others, Seen(True, "as the paper", OWN)], "")
  assert found.verdict == "holds"
  assert found.numbers[-1] == "as the paper"
  assert all(x.endswith(", and does not count") for x in found.numbers[:-1])


def test_all_of_some_answers():
  assert of_all([True, True]) is True
  assert of_all([True, None]) is None
  assert of_all([None, False]) is False


def friedman(arms):
  """Friedman's statistic by the ranks of the arms in each seed, without ties."""
  found = np.array(arms).T
  seeds, count = found.shape
  ranks = found.argsort(axis=1).argsort(axis=1) + 1
  sums = ranks.sum(axis=0)
  return 12 / (seeds * count * (count + 1)) * (sums**2).sum() - 3 * seeds * (count + 1)


def arms(*shifts):
  """Five seeds, which differ by points, of arms that differ by hundredths."""
  rng = np.random.default_rng(1)
  seeds = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
  return {
    name: (90 + seeds + shift + rng.normal(0, 1e-3, 5)).tolist()
    for name, shift in zip(("f32", "a", "b", "c"), shifts, strict=True)
  }


def test_seeds_are_blocks_of_the_analysis_of_variance():
  """What seeds add is in all arms, so that a tenth of a point is seen beside points."""
  found = arms(0.0, -0.1, -0.15, -0.25)
  told = blocked(found)
  expected = stats.chi2.sf(friedman([*found.values()]), df=3)
  assert told.text == f"p = {expected:.3f}"
  assert told.holds is False
  assert stats.f_oneway(*found.values()).pvalue > 0.9


def test_no_difference_is_told_by_the_intervals_alone():
  """One of two arms is far off in a seed: there is no difference that p could show."""
  assert blocked(arms(0.0, 0.0, 0.0, 0.0)).holds is True
  found = arms(0.0, 0.0, 0.0, 0.0)
  found["c"][0] -= 3.0
  told = blocked(found)
  assert told.holds is None and told.p > 0.05
