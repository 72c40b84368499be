"""The pages say what the committed records of the study say."""

import json
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from PIL import Image

import gradcomp
from benchmarks.links import methods as links_methods
from benchmarks.links import results
from benchmarks.models import package_accuracy
from benchmarks.pages import records as page_records
from benchmarks.pages import study as study_pages
from benchmarks.study import findings, methods, runner
from benchmarks.study import records as study_records
from benchmarks.study.figures import claims
from benchmarks.study.figures.style import slug
from benchmarks.study.judges.verdicts import APART
from benchmarks.study.options import launches
from benchmarks.study.tasks import TEXTS, Source
from gradcomp.cost import CANDIDATES
from tests.benchmarks.study_records import SETTING
from tests.support import pages

RESULTS = pages.ROOT / "benchmarks" / "results"
README = pages.ROOT / "README.md"
# What the front page calls a codec, its name here, its row of link_speed.json or "" if
# it was not timed, and how the claim about it begins.
FRONT = {
  "QSGD, 8 bits": ("qsgd-8", "qsgd-8 two_shot", "QSGD with 8 bits in"),
  "QSGD, 4 bits": ("qsgd-4", "qsgd-4 two_shot", "QSGD with 4 bits in buckets of 512"),
  "QSGD, 2 bits, buckets of 128": ("qsgd-2", "", "QSGD with 2 bits in"),
  "1-bit SGD, buckets of 64": (
    "onebit-64",
    "onebit-64 two_shot",
    "1-bit SGD in buckets of 64 ends",
  ),
  "TernGrad": ("terngrad", "terngrad two_shot", "TernGrad ends less than 2"),
  "8 bits, dynamic tree": (
    *("dynamic-tree", "dynamic-tree two_shot"),
    "Dettmers' four types of 8 bits end",
  ),
  "APS (5, 2), ring": ("aps-5-2", "aps-8 ring", "APS with 8 bits ends less than 0.05"),
  "RedSync, 1 %, a tenth of the steps dense": (
    *("redsync-1", "redsync-1% all_gather"),
    "RedSync with 1 % ends",
  ),
}


@pytest.fixture(scope="module")
def study():
  return study_pages.study()


@pytest.fixture(scope="module")
def judged():
  return study_pages.judged()


@pytest.fixture(scope="module")
def lenet(study):
  (group,) = (x for x in study.groups if x.name == study_pages.HEADLINE)
  return group


def test_no_two_groups_have_one_name(study):
  """Names are headings, and those of pictures."""
  counts = Counter(x.name for x in study.groups) + Counter(x.name for x in study.cells)
  assert max(counts.values()) == 1, counts.most_common(1)


def test_the_launches_make_the_records_and_no_others(monkeypatch):
  """With the names and sizes of their data, and none of the data."""

  def source(args, network):
    name, epoch = f"{args.dataset}/{args.pixels}", 60_000
    if network in TEXTS:
      name, epoch = args.text, 172_221
    return Source(name, None, (), (), epoch, None, network in TEXTS)

  monkeypatch.setattr(runner, "_source", source)
  made = Counter(
    job.setting for launch in launches("papers") for job in runner.jobs(launch)
  )
  records = study_records.read(study_pages.RECORDS)
  kept = {x.setting for x in records if x.setting.way == "emulated"}
  assert set(made) == kept
  assert max(made.values()) == 1  # no run is in two launches


def test_plan_has_the_points_of_the_records(study):
  """1-bit SGD lost points, and RedSync with ASQ was never trained on images."""
  found = package_accuracy.accuracies(study)
  assert found == {x.name: x.points for x in CANDIDATES}
  assert found["1-bit"] < -4 and found["top 0.1 % ASQ"] is None
  kept = (pages.ROOT / "gradcomp/_src/cost/planner/accuracy.json").read_text()
  assert json.loads(kept) == found


def test_trainings_that_saw_a_part_of_their_data_are_not_enough(study):
  """What they lost counts, beside one that went to its end."""
  short = [
    x for x in study.groups if x.setting.steps * x.setting.batch < x.setting.epoch / 2
  ]
  assert short and package_accuracy.accuracies(study)["top 1 %"] < -5
  found = package_accuracy.accuracies(study._replace(groups=short))
  assert found["top 1 %"] is None


def test_the_study_trained_with_eight_workers_what_plan_allows(study):
  """plan takes the error of two_shot with 8 workers for the one that was trained."""
  eight = [x for x in study.groups if x.setting.workers == 8]
  trained = {codec for group in eight for codec in group.runs}
  for name in ("QSGD-8", "QSGD-4", "QSGD-2 fitted", "APS (5, 2)", "APS (4, 3)"):
    assert trained.intersection(package_accuracy.NAMES[name])


def test_the_pages_have_each_table(study, judged):
  """Each behind its heading, on one page, and the line that counts the findings."""
  every = list(study_pages.tables(study, judged))
  counted = study_pages.count(judged)
  texts = [page.read_text() for page in study_pages.pages()]
  for text in texts:
    assert study_pages.written(text, every, counted) == text
  lines = [line for text in texts for line in text.splitlines()]
  for line in (*(heading for heading, _ in every), counted):
    assert lines.count(line) == 1, line


def test_the_site_has_a_table_behind_each_mark():
  """Each once, and with a number; those of the study among them."""
  tables = page_records.TABLES | study_pages.TABLES
  made = {name: make() for name, make in tables.items()}
  text = "\n".join(x.read_text() for x in page_records.FOLDER.rglob("*.md"))
  names = [name for name, _ in page_records.MARK.findall(text)]
  assert sorted(names) == sorted(made)
  shown = page_records.filled(text, {x: lambda x=x: made[x] for x in made})
  for name, lines in made.items():
    assert f"<!-- records: {name} -->\n\n{lines}\n" in shown
    assert re.search(r"^\| --- .*\n\|.*\d", lines, re.M), name


def test_the_pages_of_claims_are_those_that_the_records_make(judged):
  """Each claim is on one of them."""
  made = study_pages.claims_pages(judged)
  assert {x.stem for x in study_pages.PAGES.glob("*.md")} == made.keys()
  for name, text in made.items():
    assert (study_pages.PAGES / f"{name}.md").read_text() == text
  lines = "\n".join(made.values()).splitlines()
  headings = [x.removeprefix("## ") for x in lines if x.startswith("## ")]
  assert sorted(headings) == sorted(x.claim.removesuffix(".") for x, _ in judged)


def test_the_pictures_of_claims_show_the_bars_of_the_records(judged):
  """Each claim with numbers has one that says so by its digest, and no other is there.

  The pixels are left to those who draw: fonts differ between machines.
  """
  expected = {slug(x.claim): claims.digest(y.drawn) for x, y in judged if y.drawn}
  found = {
    x.stem: Image.open(x).text[claims.SHOWS] for x in study_pages.DRAWN.iterdir()
  }
  assert found == expected
  untested = [y.verdict for _, y in judged if not y.drawn]
  assert set(untested) <= {"not tested"}  # other judges have bars


def beside(bar):
  """Returns whether a whole bar is where its claim holds; None if only a part is."""
  limit = bar.limit
  sign = 1 if limit.above else -1
  least, most = sorted((sign * bar.low, sign * bar.high))
  if least >= sign * limit.value:
    return True
  excluded = limit.value if limit.theirs is None else limit.theirs
  return False if most < sign * excluded else None


# Claims whose settings say what more than one bar, or none, can show.
COMPOUND = (
  "Dettmers' four types of 8 bits end",
  "Dettmers' four types of 8 bits on",
  "1-bit SGD converges later",
  "Clipping at 2.5 sigma",
  "The gain rises",
)


def test_bars_are_beside_their_limits_where_their_settings_say_so(judged):
  """A reader who looks at a picture comes to the words of its colors."""
  words = {True: "holds", False: "does not", None: "cannot tell"}
  seen = Counter()
  for finding, verdict in judged:
    for word, bar in verdict.drawn:
      seen[word] += 1
      assert bar.low <= bar.mean <= bar.high
      if word != APART and not finding.claim.startswith(COMPOUND):
        assert words[beside(bar)] == word, (finding.claim, bar)
  assert min(seen[x] for x in (*words.values(), APART)) > 20


def test_the_rows_of_a_picture_have_one_unit(judged):
  for finding, verdict in judged:
    assert len({bar.limit.unit for _, bar in verdict.drawn}) < 2, finding.claim


def front(label):
  """The cells of a row of the front page, behind its label."""
  (row,) = re.findall(rf"^\| {re.escape(label)} \|.*", README.read_text(), re.M)
  return [x.strip() for x in row.strip("|").split("|")][1:]


def explained(tx):
  """What is sent of the picture's gradient."""
  like = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
  return gradcomp.explain(tx, like, workers=4)


@pytest.mark.parametrize("label", FRONT)
def test_the_front_page_has_the_measured_numbers(lenet, label):
  """Bytes and times are of the setting of the accuracy, with its dense steps."""
  codec, step, _ = FRONT[label]
  *_, points, _, sent, times = front(label)
  assert points == str(lenet.difference(codec))
  start = methods.METHODS[codec].start
  setting = SETTING._replace(codec=codec, momentum=0.9)
  explanation = explained(methods.make(setting, steady=True)[0])
  ratio = start + (1 - start) * explanation.ratio
  assert float(sent) == pytest.approx(ratio, abs=0.0011)
  if not step:
    assert times.startswith("not timed")
    return
  name, _, way = step.rpartition(" ")
  case = links_methods.CASES[name]
  options = dict(axis_name="data", exchange=way, feedback=case.feedback)
  (leaf,), (timed,) = (
    x.leaves for x in (explanation, explained(gradcomp.compress(case.codec, **options)))
  )
  assert (leaf.codec, leaf.exchange) == (timed.codec, timed.exchange)
  runs = json.loads((RESULTS / "links" / "link_speed.json").read_text())["runs"]
  steps = results.find(runs, hosts=4, rate="1gbit", leaves=1)["steps"]
  found, plain = steps[step], steps["plain f32 mean"]
  measured = found["bytes_wire_report"] / plain["bytes_wire_report"]
  assert sent == f"{start + (1 - start) * measured:.3f}"
  assert times == f"{1 / (start + (1 - start) / results.speed_up(found)):.1f}"


@pytest.mark.parametrize("label", FRONT)
def test_the_front_page_has_the_verdicts_of_the_findings(judged, label):
  (found,) = (x for finding, x in judged if finding.claim.startswith(FRONT[label][2]))
  assert front(label)[3].startswith(found.verdict)


def test_the_front_page_counts_the_findings():
  count = f"[{len(findings.FINDINGS)} findings](docs/results/findings.md"
  assert count in README.read_text()
