"""What was timed over links is predicted, and plan chooses what was fastest there."""

import json
import statistics

import jax
import pytest

from benchmarks.common import shapes
from benchmarks.models import fit_links
from benchmarks.models.package_speeds import NAMES, estimated, rounded
from gradcomp import cost
from gradcomp._src.cost.planner.candidates import packaged_speeds
from gradcomp._src.cost.planner.choice import best
from gradcomp.codecs import QSGD
from tests.support import pages
from tests.support.cases.plan import BY_NAME, plan

RUNS = fit_links.read_runs(fit_links.LINKS)
SPEEDS = fit_links.read_speeds([json.loads(x.read_text()) for x in fit_links.SPEEDS])
PARTS = {(x["rate"], x["hosts"]) for x in RUNS if x["parts"]}
FITTED = [x for x in RUNS if (x["rate"], x["hosts"]) in PARTS]

# What plan knows of the rows of link_speed.json, by the codecs' names there:
# links/speed.py times quantizers without residuals.
SHARED = dict(name="QSGD-4 shared", codec=QSGD(bits=4, share_scale=True))
ROWS = {
  row: BY_NAME[name]._replace(**changes)
  for row, name, changes in (
    ("bf16", "bfloat16", dict(feedback=False, biased=False)),
    ("qsgd-8", "QSGD-8", {}),
    ("qsgd-4", "QSGD-4", {}),
    ("qsgd-2", "QSGD-2", dict(codec=QSGD(bits=2), feedback=False)),
    ("qsgd-4 shared", "QSGD-4", SHARED),
    ("terngrad", "TernGrad", {}),
    ("aps-8", "APS (5, 2)", dict(feedback=False, biased=False)),
  )
}


def case(run, link):
  plain = run["leaves"] == 1 and run["rate"] in ("100mbit", "loopback")
  name = f"{run['rate']}-{run['hosts']}-{run['leaves']}"
  return pytest.param(run, link, id=name, marks=() if plain else pytest.mark.slow)


@pytest.mark.parametrize("run, link", [*map(case, FITTED, fit_links.fit_links(FITTED))])
def test_the_choice_is_near_the_best_row_that_was_measured(run, link):
  like, leaves = jax.eval_shape(shapes.resnet50), run["leaves"]
  if leaves != "resnet50":
    size = run["mib"] * 2**20 // 4 // leaves
    like = [jax.ShapeDtypeStruct((size,), "float32")] * leaves
  names = {name.rpartition(" ")[0] for name in run["steps"]}
  codecs = {ROWS[name]: name for name in sorted(names & ROWS.keys())}
  of_host = NAMES | {"QSGD-4 shared": "qsgd-4 shared"}
  speeds = {name: SPEEDS[of] for name, of in of_host.items() if of in SPEEDS}
  speeds = packaged_speeds("cpu") | speeds  # sparse codecs have the packaged ones
  # Hosts share the cores of the machine.
  speeds = {name: speed.times(run["hosts"]) for name, speed in speeds.items()}
  options = dict(candidates=list(codecs), steps=10**6, budget="aggressive")
  found = plan(like, workers=run["hosts"], link=link, speeds=speeds, **options)
  took = {name: step["median_seconds"] for name, step in run["steps"].items()}
  seconds = {found.rows[0].name: took["plain f32 mean"]}
  for row in found.rows[1:]:
    name = f"{codecs[row.candidate]} {row.exchange.name}"
    seconds |= {row.name: took[name]} if name in took else {}
  assert len(seconds) > 1
  choice = found.chosen
  if choice.name not in seconds:  # with an exchange that was not timed
    choice = best([row for row in found.rows if row.name in seconds])
  # On loopback nothing limits a link: memory and cores do, of which the model has none.
  limit = 1.1 if run["bits_per_second"] else 1.2
  assert seconds[choice.name] <= limit * min(seconds.values())


@pytest.mark.slow
def test_measured_links_are_predicted():
  """From the plain mean and the parts of one two_shot; on loopback there is no link."""
  rows = fit_links.compare(RUNS, SPEEDS)
  predicted = {row[:3] for row in rows}
  every = {(x["hosts"], x["rate"], name) for x in RUNS for name in x["steps"]}
  others = ("plain f32 mean", "f32 psum", "ddp ", "redsync", "powersgd")
  missed = [name for *_, name in every - predicted if " in leaves " not in name]
  assert all(name.startswith(others) for name in missed)
  limited = [row for row in rows if row.rate != "loopback"]
  errors = sorted(abs(row.error) for row in limited)
  far = [row for row in limited if abs(row.error) > 0.2]
  assert statistics.median(errors) <= 0.07
  page = " ".join((pages.ROOT / "docs" / "results" / "speed.md").read_text().split())
  assert f"over the {len(limited)} rows at" in page
  worst = f"{100 * errors[-1]:.0f} %"
  assert f"and {len(far)} are more than 20 % off, the worst {worst}" in page


def test_speeds_of_a_tpu_are_those_of_the_compiled_codecs():
  """``python -m benchmarks.models.package_speeds --estimates`` writes them."""
  made = {name: cost.CodecSpeed(**rounded(speed)) for name, speed in estimated()}
  assert packaged_speeds("TPU v5e") == made
