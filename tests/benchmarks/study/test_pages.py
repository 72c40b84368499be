"""The pages say what the committed records of the study say."""

import functools
import json
import re
import tomllib
from collections import Counter

import jax
import matplotlib.text
import pytest
from PIL import Image

import gradcomp
from benchmarks.links import methods as links_methods
from benchmarks.links import results
from benchmarks.models import package_accuracy
from benchmarks.pages import records as page_records
from benchmarks.pages import study as study_pages
from benchmarks.study import findings, items, methods
from benchmarks.study import records as study_records
from benchmarks.study.analysis import Spread
from benchmarks.study.figures import claims
from benchmarks.study.figures.results import slug
from benchmarks.study.judges.verdicts import APART, Limit, bar
from gradcomp._src.cost.planner.candidates import CANDIDATES
from tests.benchmarks.study.records import SETTING
from tests.support import pages

RESULTS = pages.ROOT / "benchmarks" / "results"
README = pages.ROOT / "README.md"
# What the front page calls a codec, its name here, and how the claim about it begins.
FRONT = {
  "QSGD, 8 bits": ("qsgd-8", "QSGD with 8 bits in"),
  "QSGD, 4 bits": ("qsgd-4", "QSGD with 4 bits in buckets of 512"),
  "1-bit SGD, buckets of 64": ("onebit-64", "1-bit SGD in buckets of 64 ends"),
  "TernGrad": ("terngrad", "TernGrad ends less than 2"),
  "APS (5, 2), ring": ("aps-5-2", "APS with 8 bits ends less than 0.05"),
}
# Rows of link_speed.json with other names.
STEPS = {"aps-5-2": "aps-8 ring"}
study, judged = map(functools.cache, (study_pages.study, study_pages.judged))


def test_the_launches_make_the_records_and_no_others():
  paths = [items.LAUNCHES / f"{name}.toml" for name in ("papers", "times")]
  made = [x.setting for path in paths for x in items.items(path)]
  kept = {x.setting for x in study_records.read(study_pages.RECORDS)}
  assert set(made) == kept and len(made) == len(kept)


def test_plan_has_the_intervals_of_the_records():
  """Plans read trainings that saw data: RedSync with ASQ never trained on images."""
  found = package_accuracy.accuracies(study())
  assert found == {x.name: list(x.records) for x in CANDIDATES}
  assert found["1-bit"] and len(found["top 0.1 % ASQ"]) == 1
  kept = pages.ROOT / "gradcomp/_src/cost/planner/accuracy.json"
  assert kept.read_text() == package_accuracy.written(found)


def test_the_pages_have_each_table():
  every = list(study_pages.tables(study(), judged()))
  counted = study_pages.count(judged())
  texts = [page.read_text() for page in study_pages.pages()]
  for text in texts:
    assert study_pages.written(text, every, counted) == text
  lines = [line for text in texts for line in text.splitlines()]
  for line in (*(heading for heading, _ in every), counted):
    assert lines.count(line) == 1, line
  names = Counter(x.name for x in (*study().groups, *study().cells))
  assert max(names.values()) == 1  # names are headings, and those of pictures


def test_the_site_has_a_table_behind_each_mark():
  tables = study_pages.TABLES
  text = "\n".join(x.read_text() for x in page_records.FOLDER.rglob("*.md"))
  assert sorted(x for x, _ in page_records.MARK.findall(text)) == sorted(tables)
  made = {name: functools.cache(make) for name, make in tables.items()}
  shown = page_records.filled(text, made)
  for name, make in made.items():
    assert f"<!-- records: {name} -->\n\n{make()}\n" in shown
    assert re.search(r"^\| --- .*\n\|.*\d", make(), re.M), name


def test_the_pages_and_pictures_of_claims_are_those_that_the_records_make():
  """A picture says so by its digest: fonts, and so pixels, differ between machines."""
  made = study_pages.claims_pages(judged())
  assert {x.stem for x in study_pages.PAGES.glob("*.md")} == made.keys()
  for name, text in made.items():
    assert (study_pages.PAGES / f"{name}.md").read_text() == text
  lines = "\n".join(made.values()).splitlines()
  headings = [x.removeprefix("## ") for x in lines if x.startswith("## ")]
  assert sorted(headings) == sorted(x.claim.removesuffix(".") for x, _ in judged())
  expected = {slug(x.claim): claims.digest(y.drawn) for x, y in judged() if y.drawn}
  pictures = {x.stem: Image.open(x) for x in study_pages.DRAWN.iterdir()}
  assert {name: x.text[claims.SHOWS] for name, x in pictures.items()} == expected
  count = f"[{len(findings.FINDINGS)} findings](docs/results/findings.md"
  assert count in README.read_text()
  for finding, verdict in judged():
    assert len({x.limit.unit for _, x in verdict.drawn}) < 2, finding.claim


def test_workers_scale_by_one_worker_in_float32():
  """Also those of a codec that one worker alone was not timed with."""
  named = {(x.setting.network, x.setting.workers): x for x in study().cells}
  ratio = named["lenet-x1", 2].speed("qsgd-8") / named["lenet-x1", 1].speed("f32")
  row = f"| lenet-x1, 1gbit, batch fixed | qsgd-8 | {ratio:.2f} |"
  assert row in study_pages.TABLES["study, scaling"]()


@pytest.mark.parametrize(
  "name, row, said",
  [
    ("quantizing", "QSGD, 8 bits", "digits, 8 workers, momentum, 200 steps: {} {}"),
    ("sparse digits", "RedSync 0.1 %", "LeNet on digits, 600 steps: {} {}"),
    ("sparse words", "RedSync 1 %, dense first", "{}, % of perplexity: {}"),
    ("sharded nets", "locally connected", "{}: dynamic_tree {}"),
  ],
)
def test_tables_of_trainings_have_the_numbers_of_claims(name, row, said):
  (line,) = re.findall(rf"^\| {re.escape(row)} \|.*", study_pages.TABLES[name](), re.M)
  (above, *_) = re.findall(r"[+-][\d.]+ ± [\d.]+", line)
  numbers = "\n".join(x for _, verdict in judged() for x in verdict.numbers)
  assert said.format(row, above) in numbers


def facts(found, name=""):
  """Returns a record's data, net, workers and steps, in the words of claims."""
  if isinstance(found, dict):
    return "\n".join(facts(x, name) for name, x in found.items())
  if isinstance(found, list):
    return "\n".join(map(facts, found))
  unit = {"workers": "workers", "steps": "steps", "tested": "to test on"}.get(name)
  return f"{found:,} {unit}" if unit else str(found)


# Records whose data scripts loaded that are gone, and that they do not name.
DIGITS = {
  "codecs/roundoff": "LeNet on digits",
  **{f"training/{x}_study": "digits, 360 to test on" for x in ("codec", "aps")},
  **{f"training/model_parallel{x}": "digits" for x in ("", "_nets")},
}
NAMED = r"Fashion-MNIST|MNIST|digits|CIFAR|ImageNet|LeNet|[\d-]+-10\b"
COUNTED = r"[\d,]+ (?:workers|steps|to test on)"


def test_claims_name_the_data_nets_workers_and_steps_of_their_records():
  full = lambda text: re.sub(r"(?m)^(?:lenet|mlp|resnet)[:,]", "fashion-mnist", text)
  verdicts = {x.claim: (x.here, full("\n".join(y.numbers))) for x, y in judged()}
  files = (study_pages.RESULTS.parent / "study" / "claims").rglob("*.toml")
  entries = [x for file in files for x in tomllib.loads(file.read_text())["claim"]]
  assert {x["claim"] for x in entries} == verdicts.keys()
  for entry in entries:
    here, known = verdicts[entry["claim"]]
    for part in (entry, *entry.get("also", ())):
      if name := part.get("record"):
        record = json.loads((RESULTS / f"{name}.json").read_text())
        page = RESULTS / f"{name}.md"
        text = facts(record[part["part"]] if "part" in part else record)
        text += page.read_text() if page.exists() and "part" not in part else ""
        text += DIGITS.get(name, "")
        assert "digits" not in text or "digits" in (here + known).lower(), here
        known += text
    for word in re.findall(f"{NAMED}|{COUNTED}", here):
      assert word.lower() in known.lower(), (entry["claim"], word)


def test_what_does_not_count_does_not_widen_the_axis():
  """A net that fails does not hide the others: its number stands beside an arrow."""
  limit = Limit(-0.2, above=True)
  near = "holds", bar("a net", Spread(-0.05, 0.1, 5), limit)
  refuted, apart = ("does not", -78.53, 0.6, "-78.5"), (APART, -0.5, 12.0, "-0.5")
  for word, mean, half, said in (refuted, apart):
    other = word, bar("a net", Spread(mean, half, 5), limit)
    (axes,) = claims.draw((near, other)).axes
    low, high = axes.get_xlim()
    assert -5 < low < -0.2 < 0.05 < high < 1
    assert said in [x.get_text() for x in axes.findobj(matplotlib.text.Text)]


@pytest.mark.parametrize("label", FRONT)
def test_the_front_page_has_the_measured_numbers(label):
  codec, claim = FRONT[label]
  (row,) = re.findall(rf"^\| {re.escape(label)} \|.*", README.read_text(), re.M)
  *_, points, verdict, sent, times = (x.strip() for x in row.strip("|").split("|"))
  (found,) = (x for finding, x in judged() if finding.claim.startswith(claim))
  assert verdict.startswith(found.verdict)
  (lenet,) = (x for x in study().groups if x.name == study_pages.HEADLINE)
  assert points == str(lenet.difference(codec))
  setting = SETTING._replace(codec=codec, momentum=0.9)
  like = {"w": jax.ShapeDtypeStruct((4096, 4096), "float32")}  # the picture's gradient
  explain = lambda tx: gradcomp.explain(tx, like, workers=4)
  explanation = explain(methods.make(setting, steady=True)[0])
  assert float(sent) == pytest.approx(explanation.ratio, abs=0.0011)
  step = STEPS.get(codec, f"{codec} two_shot")
  name, _, way = step.rpartition(" ")
  case = links_methods.CASES[name]
  options = dict(axis_name="data", exchange=way, feedback=case.feedback)
  timed = explain(gradcomp.compress(case.codec, **options))
  (leaf,), (other,) = explanation.leaves, timed.leaves
  assert (leaf.codec, leaf.exchange) == (other.codec, other.exchange)
  runs = json.loads((RESULTS / "links" / "link_speed.json").read_text())["runs"]
  steps = results.find(runs, hosts=4, rate="1gbit", leaves=1)["steps"]
  found, plain = steps[step], steps["plain f32 mean"]
  measured = found["bytes_wire_report"] / plain["bytes_wire_report"]
  assert (sent, times) == (f"{measured:.3f}", f"{results.speed_up(found):.1f}")
