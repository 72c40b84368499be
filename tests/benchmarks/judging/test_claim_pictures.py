"""Pictures of claims show what is near, and say what is far."""

import io

import matplotlib.text
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from benchmarks.study.analysis import Spread
from benchmarks.study.figures import claims
from benchmarks.study.judges.speed import more, timed
from benchmarks.study.judges.verdicts import APART, Bar, Limit, bar, rule

POINTS = Limit(-0.2, above=True)


def row(mean, half, word="holds", limit=POINTS):
  return word, bar(f"a net, {mean}", Spread(mean, half, 5), limit)


def axes(*drawn):
  (found,) = claims.draw(drawn).axes
  return found


def texts(found):
  return [x.get_text() for x in found.findobj(matplotlib.text.Text)]


def test_a_net_that_fails_does_not_hide_the_others():
  """Its number stands beside an arrow."""
  found = axes(row(-0.05, 0.1), row(-78.53, 0.6, "does not"))
  low, high = found.get_xlim()
  assert -5 < low < -0.2 < 0.05 < high < 1
  assert "-78.5" in texts(found)


def test_what_does_not_count_does_not_widen_the_axis():
  found = axes(row(-0.05, 0.1), row(-0.5, 12.0, APART))
  assert found.get_xlim()[0] > -1 and "-0.5" in texts(found)


def test_rows_that_differ_little_are_all_shown():
  found = axes(row(-0.3, 0.05, "does not"), row(-2.2, 0.5, "does not"))
  assert found.get_xlim()[0] < -2.7


def test_ratios_that_differ_much_have_logarithms():
  limit = Limit(1.0, above=True, unit="times as fast")
  found = axes(*(("holds", timed("a link", x, limit)) for x in (1.2, 60.0)))
  assert found.get_xscale() == "log"
  assert {"1", "2", "5", "10", "20", "50"} <= set(texts(found))
  assert found.get_xlim()[0] < 1 < 63 < found.get_xlim()[1]


def test_each_row_has_a_limit_of_its_own():
  """One must be above it, and the other below."""
  below = rule({"at_most": -1.0}).limit()
  found = axes(row(-0.1, 0.1), row(-3.0, 0.5, limit=below))
  low, high = found.get_xlim()
  shades = [x.get_paths()[0].get_extents() for x in found.collections[:2]]
  assert [(x.x0, x.x1) for x in shades] == [(-0.2, high), (low, -1.0)]
  assert shades[0].y1 < shades[1].y0  # a label is between them


@pytest.mark.parametrize(
  "named, limit",
  [
    ({"at_least": -0.2}, (-0.2, True, None)),
    ({"at_most": 1.0}, (1.0, False, None)),
    ({"below": 0.7}, (0.0, False, -0.7)),
    ({"above": 0.7}, (0.0, True, 0.7)),
  ],
)
def test_a_rule_says_from_where_on_it_holds(named, limit):
  decide = rule(named)
  found = decide.limit()
  assert (found.value, found.above, found.theirs) == limit
  step = 1.0 if found.above else -1.0
  assert decide(Spread(found.value + step, 0.5, 5)) is True
  assert decide(Spread(found.value - 2 * step, 0.5, 5)) is not True


@pytest.mark.parametrize("ratio", [0.9, 0.951, 0.96, 1.04, 1.049, 1.051, 1.06])
@pytest.mark.parametrize("above", [True, False])
def test_the_bar_of_a_ratio_holds_the_limit_where_noise_may_be_all(ratio, above):
  told = more(ratio, 1.0) if above else more(1.0, ratio)
  found = timed("", ratio, Limit(1.0, above=above))
  assert (found.low <= 1.0 <= found.high) == (told is None)


def test_files_are_small_and_keep_the_colors_of_their_marks():
  """The long text of many rows would take the colors of few pixels."""
  label = "lenet, N = 4, batch 64, 0.999 epochs, rate 0.1, no momentum, polynomial"
  rows = [
    (word, Bar(label, -0.4, -0.3, -0.1, POINTS)) for word in ("holds", "does not")
  ]
  data = claims.png(rows * 4)
  assert len(data) < 25_000
  image = Image.open(io.BytesIO(data))
  assert image.text[claims.SHOWS] == claims.digest(rows * 4) != claims.digest(rows)
  colors = {x for _, x in image.convert("RGB").getcolors()}
  for name in ("#2e7d32", "#c62828"):
    assert tuple(round(255 * x) for x in to_rgb(name)) in colors
