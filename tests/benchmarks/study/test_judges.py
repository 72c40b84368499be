"""How intervals, many settings and an analysis of variance decide."""

import numpy as np
from scipy import stats

from benchmarks.study import analysis
from benchmarks.study.analysis import Spread, spread
from benchmarks.study.judges import safe, verdicts
from benchmarks.study.judges.accuracy import blocked
from benchmarks.study.judges.speed import more, timed
from benchmarks.study.judges.verdicts import Limit, Seen, concluded, of_all
from tests.benchmarks.study.records import trained


def test_an_effect_is_told_by_zero_and_by_the_papers_number():
  for mean, half, expected in (
    (-1.0, 0.5, True),  # as the paper
    (-0.3, 0.2, True),  # less than in the paper, and yet an effect
    (-0.1, 0.2, False),  # neither an effect nor the paper's
    (0.6, 0.5, False),
    (-0.5, 0.6, None),  # no effect, or the paper's
    (0.6, 2.0, None),
    (-0.1, float("nan"), None),
  ):
    found = Spread(mean, half, 5)
    assert found.below(1.0) is (-found).above(1.0) is expected, (mean, half)


def test_two_one_sided_tests_give_the_same_verdicts():
  """Each at 2.5 %, by scipy's t test of one sample; both ways round."""
  rng = np.random.default_rng(0)
  told = []
  for _ in range(100):
    values = rng.normal(-0.2, 0.3, 5)
    less, greater = (
      stats.ttest_1samp(values, -0.2, alternative=way).pvalue < 0.025
      for way in ("less", "greater")
    )
    expected = True if greater else False if less else None
    found = spread(values.tolist())
    assert found.at_least(-0.2) is (-found).at_most(0.2) is expected
    told.append(expected)
  assert {True, False, None} == set(told)


def test_the_bar_of_a_ratio_holds_the_limit_where_noise_may_be_all():
  for ratio in (0.9, 0.951, 0.96, 1.04, 1.049, 1.051, 1.06):
    for above in (True, False):
      told = more(ratio, 1.0) if above else more(1.0, ratio)
      found = timed("", ratio, Limit(1.0, above=above))
      assert (found.low <= 1.0 <= found.high) == (told is None), (ratio, above)


def test_settings_that_cannot_tell_might_be_either():
  for told, share, expected in (
    ([True, None], 1.0, "cannot tell"),
    ([False, None], 1.0, "does not"),
    ([], 1.0, "not tested"),
    ([True, False, False], 0.0, "holds"),
    ([False, False], 0.0, "does not"),
    ([True, True, None, False], 0.75, "cannot tell"),
    ([True, None, False, False], 0.75, "does not"),
  ):
    assert concluded([Seen(x, "") for x in told], "", share).verdict == expected
  assert of_all([True, None]) is None and of_all([False, None]) is False


def test_the_papers_own_setting_decides_alone():
  few, usual, own = verdicts.FEW, verdicts.USUAL, verdicts.OWN
  seen = Seen(None, "", few), Seen(False, "", usual), Seen(True, "as the paper", own)
  found = concluded(seen, "")
  *others, last = found.numbers
  assert (found.verdict, last) == ("holds", "as the paper")
  assert all(x.endswith(", and does not count") for x in others)


def arms(*shifts):
  """Five seeds, which differ by points, of arms that differ by hundredths."""
  noise = np.random.default_rng(1).normal(0, 1e-3, (4, 5))
  points = 90 + np.arange(5.0) + np.array(shifts)[:, None] + noise
  return dict(zip(("f32", "a", "b", "c"), points.tolist(), strict=True))


def test_seeds_are_blocks_of_the_analysis_of_variance():
  """What seeds add is in all arms, so that a tenth of a point is seen beside points."""
  found = arms(0.0, -0.1, -0.15, -0.25)
  told = blocked(found)
  # Friedman's statistic, by the ranks of the arms in each seed, without ties.
  sums = (np.array([*found.values()]).T.argsort(axis=1).argsort(axis=1) + 1).sum(axis=0)
  statistic = 12 / (5 * 4 * 5) * (sums**2).sum() - 3 * 5 * 5
  assert told.text == f"p = {stats.chi2.sf(statistic, df=3):.3f}"
  assert told.holds is False and stats.f_oneway(*found.values()).pvalue > 0.9
  found = arms(0.0, 0.0, 0.0, 0.0)
  assert blocked(found).holds is True
  found["c"][0] -= 3.0  # far off in a seed: no difference that p could show
  told = blocked(found)
  assert told.holds is None and told.p > 0.05


def test_a_codec_is_safe_by_the_whole_interval():
  """Images may lose a fifth of a point, and texts have 1 % more perplexity."""
  text, one_seed = {"network": "lstm", "dataset": "brown"}, {"times": 1}
  for ends, loss, changed, says in (
    ((90.0, 91.0), 1.0, {}, "safe"),
    ((90.0, 90.6), 1.0, {}, "open: -0.20 ± 0.23"),
    ((89.0, 89.6), 1.0, {}, "-1.20 ± 0.23"),
    ((90.0, 91.0), 1.02, text, "+2.02 ± 0.00 %"),
    ((80.0,), 1.0, one_seed, ""),  # which says nothing
  ):
    records = trained("f32", 90.0, 91.0, **changed)
    records += trained("qsgd-4", *ends, loss=loss, **changed)
    (group,) = analysis.grouped(records).groups
    assert safe.cell(group, "qsgd-4") == says
