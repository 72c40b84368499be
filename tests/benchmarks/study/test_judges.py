"""How intervals, many settings and an analysis of variance decide."""

import numpy as np
import pytest
from scipy import stats

from benchmarks.pages import study as study_pages
from benchmarks.study import analysis
from benchmarks.study.analysis import Spread, spread
from benchmarks.study.judges import verdicts
from benchmarks.study.judges.accuracy import blocked
from benchmarks.study.judges.speed import more, timed
from benchmarks.study.judges.verdicts import Judge, Limit, Seen, concluded, rule
from tests.benchmarks.study.records import trained


def test_an_effect_is_excluded_beyond_half_of_it():
  for mean, half, expected in (
    (-1.0, 0.5, True),  # as the paper
    (-0.3, 0.2, True),  # less than in the paper, and yet an effect
    (-0.1, 0.2, False),  # neither an effect nor half of the paper's
    (0.6, 0.5, False),
    (-0.1, 0.5, None),  # none, or most of the paper's
    (0.6, 2.0, None),
    (-0.1, float("nan"), None),
  ):
    found = Spread(mean, half, 5)
    mirrored = rule({"above": 1.0})(found._replace(mean=-mean))
    assert rule({"below": 1.0})(found) is mirrored is expected, (mean, half)
  for mean, expected in ((-1.2, True), (-0.8, None), (-0.55, None), (-0.3, False)):
    assert rule({"loses": 1.0})(Spread(mean, 0.1, 5)) is expected, mean


def test_two_one_sided_tests_give_the_same_verdicts():
  """Each at 2.5 %, by scipy's t test of one sample; both ways round."""
  rng = np.random.default_rng(0)
  told = []
  for _ in range(100):
    values = rng.normal(-0.2, 0.3, 5)
    ps = [
      stats.ttest_1samp(values, -0.2, alternative=x).pvalue for x in ("less", "greater")
    ]
    expected = True if ps[1] < 0.025 else False if ps[0] < 0.025 else None
    found, least = spread(values.tolist()), rule({"at_least": -0.2})
    mirrored = rule({"at_most": 0.2})(found._replace(mean=-found.mean))
    assert least(found) is mirrored is expected
    assert least.p(found) == pytest.approx(1.0 if expected is None else min(ps))
    told.append(expected)
  assert {True, False, None} == set(told)


def test_pooled_means_are_those_of_least_squares():
  """With weights as precise as they are, of scipy's t with the freedom of all seeds."""
  found = Spread(-1.0, 0.4, 5), Spread(0.2, 0.9, 3)
  errors = [x.half / stats.t.ppf(0.975, x.count - 1) for x in found]
  design, values = np.divide(1, errors), np.divide([x.mean for x in found], errors)
  (mean,), *_ = np.linalg.lstsq(design[:, None], values, rcond=None)
  half = stats.t.ppf(0.975, 6) * np.linalg.norm(design) ** -1
  np.testing.assert_allclose(verdicts.pooled(found), (mean, half, 8))


def test_holm_is_no_stricter_than_bonferroni_and_keeps_the_level():
  ps = np.random.default_rng(0).uniform(size=(4000, 5))
  told = np.array([verdicts.holm(x) for x in ps])
  assert ((ps <= 0.025 / 5) <= told).all()
  assert told.any(axis=1).mean() == pytest.approx(0.025, abs=0.005)
  assert verdicts.holm([0.005, 0.024, 0.012, 0.006, 0.0083]) == [True] * 5


def test_a_setting_counts_where_an_arm_can_fail():
  arms = [Spread(-0.3, 0.2, 5), None, Spread(0.1, 0.1, 5)]
  assert not verdicts.can_fail(arms) and verdicts.can_fail(arms, scale=0.4)
  assert verdicts.can_fail([*arms, Spread(-0.5, 0.2, 5)])


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


def test_what_decides_alone_is_corrected_for_the_number_of_settings():
  for p, share, expected in (
    (0.01, 1.0, "does not"),
    (0.02, 1.0, "cannot tell"),
    (0.01, 0.0, "holds"),
    (0.02, 0.0, "cannot tell"),
  ):
    found = concluded((Seen(share == 0, "so", p=p), Seen(None, "")), "", share)
    assert found.verdict == expected
    assert (": cannot tell" in "".join(found.numbers[:-1])) == (p == 0.02)


def test_settings_of_the_highest_rank_decide_alone():
  far, blind, few, counts = range(4)
  seen = [Seen(None, "", few), Seen(False, "", blind), Seen(True, "it", counts)]
  found = concluded(seen, "")
  *others, last = found.numbers
  assert (found.verdict, last) == ("holds", "it")
  assert all(x.endswith(", and does not count") for x in others)
  # What cannot fail decides nothing; what is far from the claim does not test it.
  for ranks, expected in (((blind, far), "cannot tell"), ((far,), "not tested")):
    assert concluded([Seen(True, "", x) for x in ranks], "").verdict == expected


def test_links_slower_than_a_tenth_of_the_papers_decide_nothing():
  seen = Seen(False, "", gbit=1.0), Seen(True, "", gbit=10.0)
  for gbit, expected in ((9.0, "does not"), (11.0, "holds"), (101.0, "not tested")):
    assert Judge(lambda study: seen, "", gbit=gbit)(None).verdict == expected


def arms(*shifts):
  """Five seeds, which differ by points, of arms that differ by hundredths."""
  noise = np.random.default_rng(1).normal(0, 1e-3, (4, 5))
  points = 90 + np.arange(5.0) + np.array(shifts)[:, None] + noise
  return dict(zip(("f32", "a", "b", "c"), points.tolist(), strict=True))


def test_seeds_are_blocks_of_the_analysis_of_variance():
  """What seeds add is in all arms, so that a tenth of a point is seen beside points."""
  found = arms(0.0, -0.1, -0.15, -0.25)
  told = blocked("nets", found)
  # Friedman's statistic, by the ranks of the arms in each seed, without ties.
  sums = (np.array([*found.values()]).T.argsort(axis=1).argsort(axis=1) + 1).sum(axis=0)
  statistic = 12 / (5 * 4 * 5) * (sums**2).sum() - 3 * 5 * 5
  assert 2 * told.p == pytest.approx(stats.chi2.sf(statistic, df=3))
  assert told.holds is False and stats.f_oneway(*found.values()).pvalue > 0.9
  found = arms(0.0, 0.0, 0.0, 0.0)
  assert blocked("nets", found).holds is True
  found["c"][0] -= 3.0  # far off in a seed: no difference that p could show
  told = blocked("nets", found)
  assert told.holds is None and told.p > 0.025


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
    assert study_pages.safe(group, "qsgd-4") == says
