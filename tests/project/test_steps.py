"""The script, the Makefile and the workflows run what .ci/steps says."""

import collections
import os
import re
import shutil
import subprocess

import pytest
import yaml

from tests.support.pages import ROOT

CI = ROOT / ".ci"
WORKFLOWS = ROOT / ".github" / "workflows"
MAKEFILE = (ROOT / "Makefile").read_text()
ROW = r"^([\w-]+) +(\w+) +(\d+) +(\d+) .*\bmake ([\w-]+)"
ROWS = re.findall(ROW, (CI / "steps").read_text(), re.M)
# Of each step: where, into how many parts it is cut, minutes of a part, and its target.
STEPS = {name: (x, int(parts), int(long), of) for name, x, parts, long, of in ROWS}
TURNS = 9


def script(*arguments, folder=ROOT, code=0):
  """What .ci/run prints, which reads nothing."""
  env = {**os.environ, "ARGS": "of an outer make"}
  pipes = dict(input="typed", capture_output=True, text=True, timeout=60)
  done = subprocess.run(["bash", folder / ".ci" / "run", *arguments], env=env, **pipes)
  assert done.returncode == code, done.stdout + done.stderr
  return done.stdout


def listed(which, folder=ROOT):
  """The steps that it would run, by their names with their parts."""
  lines = script("--list", which, folder=folder).splitlines()
  names = [x.split("\t")[0] for x in lines]
  assert len(names) == len(set(names))
  return {x: x.partition(":")[0] for x in names}


@pytest.fixture
def elsewhere(tmp_path):
  """A folder with the script and the table, for other numbers and other steps."""
  shutil.copytree(CI, tmp_path / ".ci")
  return tmp_path


def test_each_step_has_its_place_and_its_turn_is_short():
  minutes = collections.Counter()
  for where, _, each, target in STEPS.values():
    minutes[where] += each
    assert re.search(rf"^{target}:.*##", MAKEFILE, re.M), target
  turns = [*map(str, range(TURNS))]
  assert minutes.keys() == {"gate", "night", *turns}
  assert minutes["gate"] + 10 <= 45 and max(minutes[x] for x in turns) <= 10
  assert re.fullmatch(r"(0|[1-9]\d*)\n", (CI / "turn").read_text())


def test_turns_come_to_every_part_and_nights_run_all_the_cheapest_first(elsewhere):
  seen = set()
  most = max(parts for where, parts, *_ in STEPS.values() if where != "night")
  for number in range(TURNS * most):
    (elsewhere / ".ci" / "turn").write_text(f"{number}\n")
    steps = listed("gate", folder=elsewhere)
    assert {STEPS[x][0] for x in steps.values()} == {"gate", str(number % TURNS)}
    seen.update(steps)
  steps = listed("nightly")
  assert seen == {name for name, x in steps.items() if STEPS[x][0] != "night"}
  costs = [STEPS[x][2] for x in steps.values()]
  assert costs == sorted(costs)
  assert len(steps) == sum(parts for _, parts, *_ in STEPS.values())
  said = script("--list", "nightly", "slow:3")
  assert said == 'slow:3\t6\tmake test-slow ARGS="--slow 3/12"\n'


def test_workflows_run_what_the_table_says():
  targets = {target for *_, target in STEPS.values()}
  gate, night = ("tests", "gate", "bash .ci/run"), ("nightly", "nightly", "make")
  for name, which, command in (gate, night):
    jobs = yaml.safe_load((WORKFLOWS / f"{name}.yml").read_text())["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    runs = [step["run"] for step in steps if "run" in step]
    (lists,) = (run for run in runs if "--list" in run)
    assert f"bash .ci/run --list {which} " in lists
    matrix = jobs["step"]["strategy"]["matrix"]["step"]
    assert matrix == "${{ fromJSON(needs.steps.outputs.steps) }}"
    assert jobs["step"]["steps"][-1]["run"].startswith(f"{command} {which}")
    used = set(re.findall(r"make ([\w-]+)", "\n".join(runs)))
    assert used & targets <= {"test"}, name  # elsewhere than in the table's step
  assert re.search(r"^nightly:.*\n\t@bash \.ci/run nightly \$\(ARGS\)$", MAKEFILE, re.M)


SOME = """
# name  where  parts  minutes  command
late    gate   1      9        test -z "$ARGS" && echo "== 3 passed in 1s =="
broken  gate   1      2        echo "ok: a run"; echo "FAILED tests/a.py::b"; exit 3
reads   0      2      1        cat; echo "part {k} of {n}"; echo "[1/1] SURVIVED: this"
dreams  night  1      1        exit 1
"""


def test_every_step_runs_and_the_last_lines_say_how(elsewhere):
  (elsewhere / ".ci" / "steps").write_text(SOME)
  (elsewhere / ".ci" / "turn").write_text("9\n")
  said = script(folder=elsewhere, code=1)
  assert "part 1 of 2" in said and "typed" not in said
  assert re.sub(r"\d+ s", "0 s", said.partition("=== results\n")[2]).splitlines() == [
    *("ok: reads:1, 0 s", "[1/1] SURVIVED: this"),
    *("FAILED: broken, 0 s", "FAILED tests/a.py::b", "ok: a run"),
    *("ok: late, 0 s", "== 3 passed in 1s =="),
  ]
  assert "late" in script("gate", "late", folder=elsewhere)
  script("gate", "dreams", folder=elsewhere, code=2)
  script("weekly", folder=elsewhere, code=2)
