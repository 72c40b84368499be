"""The script, the Makefile and the workflows run what .ci/steps says."""

import os
import re
import shutil
import subprocess

import pytest
import yaml

from tests.support.pages import ROOT

CI = ROOT / ".ci"
WORKFLOWS = ROOT / ".github" / "workflows"
ROWS = [x.split(maxsplit=4) for x in (CI / "steps").read_text().splitlines()]
ROWS = [
  (*row[:2], *map(int, row[2:4]), row[4]) for row in ROWS if row and row[0] != "#"
]
TURNS = 9


def script(*arguments, folder=ROOT, code=0):
  """What .ci/run prints, which reads nothing."""
  done = subprocess.run(
    ["bash", folder / ".ci" / "run", *arguments],
    env={**os.environ, "ARGS": "of an outer make"},
    input="typed",
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.returncode == code, done.stdout + done.stderr
  return done.stdout


def names(*arguments, folder=ROOT):
  return [
    x.split("\t")[0] for x in script("--list", *arguments, folder=folder).splitlines()
  ]


@pytest.fixture
def elsewhere(tmp_path):
  """A folder with the script and the table, for other numbers and other steps."""
  shutil.copytree(CI, tmp_path / ".ci")
  return tmp_path


def test_each_step_has_its_place_and_its_turn_is_short():
  assert len({name for name, *_ in ROWS}) == len(ROWS)
  assert {where for _, where, *_ in ROWS} == {"gate", "night", *map(str, range(TURNS))}
  for turn in range(TURNS):
    assert sum(row[3] for row in ROWS if row[1] == str(turn)) <= 10, turn
  assert sum(row[3] for row in ROWS if row[1] == "gate") + 10 <= 45  # minutes


def test_the_turn_is_a_number():
  assert re.fullmatch(r"(0|[1-9]\d*)\n", (CI / "turn").read_text())


def test_turns_come_to_every_part(elsewhere):
  """Each merge runs what the gate has and one turn: no part is forgotten, or twice."""
  seen = {}
  for number in range(TURNS * max(row[2] for row in ROWS if row[1] != "night")):
    (elsewhere / ".ci" / "turn").write_text(f"{number}\n")
    found = names("gate", folder=elsewhere)
    places = {name: where for name, where, *_ in ROWS}
    of = {places[name.partition(":")[0]] for name in found}
    assert of == {"gate", str(number % TURNS)}
    seen.update(dict.fromkeys(found))
  night = {name for name, where, *_ in ROWS if where == "night"}
  assert set(seen) == {x for x in names("nightly") if x.partition(":")[0] not in night}


def test_nights_run_all_parts_the_cheapest_first():
  minutes = {name: row[1] for name, _, *row in ROWS}
  found = names("nightly")
  costs = [minutes[x.partition(":")[0]] for x in found]
  assert costs == sorted(costs)
  assert len(found) == len(set(found)) == sum(row[2] for row in ROWS)
  said = script("--list", "nightly", "slow:3")
  assert said == 'slow:3\t6\tmake test-slow ARGS="--slow 3/12"\n'


def test_every_step_is_a_target_of_make():
  makefile = (ROOT / "Makefile").read_text()
  for name, *_, command in ROWS:
    (target,) = re.findall(r"\bmake ([\w-]+)", command)
    assert re.search(rf"^{target}:.*##", makefile, re.M), name


def test_workflows_run_what_the_table_says():
  """They ask the script for the steps, and name none of them."""
  targets = {re.search(r"make ([\w-]+)", row[4])[1] for row in ROWS}
  for name, which in (("tests", "gate"), ("nightly", "nightly")):
    jobs = yaml.safe_load((WORKFLOWS / f"{name}.yml").read_text())["jobs"]
    runs = [
      step["run"] for job in jobs.values() for step in job["steps"] if "run" in step
    ]
    (listed,) = (run for run in runs if "--list" in run)
    assert f"bash .ci/run --list {which} " in listed
    command = "make nightly" if which == "nightly" else "bash .ci/run gate"
    step = jobs["step"]
    assert (
      step["strategy"]["matrix"]["step"] == "${{ fromJSON(needs.steps.outputs.steps) }}"
    )
    assert step["steps"][-1]["run"].startswith(command)
    used = set(re.findall(r"make ([\w-]+)", "\n".join(runs)))
    assert used & targets <= {"test"}, name  # elsewhere than in the table's step
  makefile = (ROOT / "Makefile").read_text()
  assert re.search(r"^nightly:.*\n\t@bash \.ci/run nightly \$\(ARGS\)$", makefile, re.M)


STEPS = """
# name  where  parts  minutes  command
late    gate   1      9        test -z "$ARGS" && echo "== 3 passed in 1s =="
broken  gate   1      2        echo "ok: a run"; echo "FAILED tests/a.py::b"; exit 3
reads   0      2      1        cat; echo "part {k} of {n}"; echo "[1/1] SURVIVED: this"
dreams  night  1      1        exit 1
"""


def test_every_step_runs_and_the_last_lines_say_how(elsewhere):
  (elsewhere / ".ci" / "steps").write_text(STEPS)
  (elsewhere / ".ci" / "turn").write_text("8\n")
  said = script(folder=elsewhere, code=1)
  assert "part 1 of 2" in said and "typed" not in said
  last = re.sub(r"\d+ s", "0 s", said.partition("=== results\n")[2])
  assert last.splitlines() == [
    "ok: reads:1, 0 s",
    "[1/1] SURVIVED: this",
    "FAILED: broken, 0 s",
    "FAILED tests/a.py::b",
    "ok: a run",
    "ok: late, 0 s",
    "== 3 passed in 1s ==",
  ]
  assert "late" in script("gate", "late", folder=elsewhere)
  script("gate", "dreams", folder=elsewhere, code=2)
  script("weekly", folder=elsewhere, code=2)
