"""The trainings of the evidence queue: what they are, and that they go on as before."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from benchmarks.study import analysis, methods, options, records, runner
from benchmarks.study.queue import items as queue_items
from benchmarks.study.queue import launches, times, train
from benchmarks.study.queue.train import Heart, Keeper
from benchmarks.study.records import Record
from benchmarks.study.tasks import TEXTS, Source
from examples.lib.training import Task
from tests.benchmarks.study_records import SETTING

DIGITS = SETTING._replace(workers=2, batch=32, steps=6, epoch=1437, points=2)


def test_each_training_has_one_place_and_a_codec():
  items = queue_items.items()
  assert len({x.digest for x in items}) == len({x.setting for x in items}) == len(items)
  assert {x.launch for x in items} == {x.name for x in launches.LAUNCHES}
  for x in items:
    assert methods.check(x.setting.codec)
    assert x.setting.batch % x.setting.workers == 0


def test_seeds_are_the_outer_loop_of_a_launch():
  for launch in launches.LAUNCHES:
    items = [x for x in queue_items.items() if x.launch == launch.name]
    seeds = [x.setting.seed for x in items]
    assert seeds == sorted(seeds) and set(seeds) == set(range(launch.seeds))
    assert len(set(map(seeds.count, seeds))) == 1


def test_each_arm_is_beside_float32():
  for launch in launches.LAUNCHES:
    assert all("f32" in arms.codecs for arms in launch.arms)


def test_no_two_comparisons_have_one_name():
  """Names are headings in the report; records of launches that share a setting join."""
  found = analysis.grouped(
    Record(x.setting, {"points": []}) for x in queue_items.items()
  )
  names = [x.name for x in found.groups]
  assert len(set(names)) == len(names)
  assert all("f32" in group.runs for group in found.groups)


def test_timed_launches_are_those_of_the_study(monkeypatch):
  """Each host runs these settings on its link, with the sizes of the data alone."""

  def source(args, network):
    images = (f"{args.dataset}/{args.pixels}", 60_000)
    name, epoch = ("brown", 172_221) if network in TEXTS else images
    return Source(name, None, (), (), epoch, None, network in TEXTS)

  monkeypatch.setattr(runner, "_source", source)
  timed = {x.setting for x in queue_items.items() if x.setting.way == "timed"}
  made = set()
  for _, rate, hosts, line in times.lines(timed):
    monkeypatch.setattr(jax, "process_count", lambda hosts=hosts: hosts)
    monkeypatch.setattr(jax, "device_count", lambda hosts=hosts: hosts)
    args = options.parse(["run", *line, "--link", rate, "--output", "unused"])
    made |= {x.setting for x in runner.jobs(args)}
  assert made == timed


def steps_of(setting, patch):
  """Trains, and returns the parameters that were tested and the results."""
  trainer, _ = train.trainer_of(setting)
  tested, evaluate = [], Task.evaluate

  def watched(task, params):
    tested.append(jax.device_get(params))
    return evaluate(task, params)

  with patch.context() as patched:
    patched.setattr(Task, "evaluate", watched)
    return tested, trainer.train(setting.seed)


def test_means_of_parameters_are_tested(monkeypatch):
  """Wen: decayed by 0.9 here, divided by the sum of the weights, in float64."""
  setting = DIGITS._replace(network="mlp", dropout=0.0, steps=4, points=4)
  plain, found = steps_of(setting, monkeypatch)
  both, averaged = steps_of(setting._replace(ema=0.9), monkeypatch)
  assert found["fingerprint"] == averaged["fingerprint"]
  means = both[::2]  # each before the parameters themselves
  last = [x["last_accuracy"] for x in averaged["points"]]
  assert last == [x["accuracy"] for x in found["points"]]
  weights = 0.9 ** np.arange(4)[::-1]
  for path, leaf in jax.tree.leaves_with_path(means[-1]):
    each = [dict(jax.tree.leaves_with_path(x))[path] for x in plain]
    mean = np.average(np.array(each, np.float64), axis=0, weights=weights)
    # Four updates of a running mean, each rounded to float32.
    np.testing.assert_allclose(leaf, mean, rtol=1e-5, atol=1e-7)


def test_the_rate_halves_where_the_test_loss_stands_still(monkeypatch):
  setting = DIGITS._replace(
    network="mlp", dropout=0.0, steps=8, points=8, schedule="plateau", momentum=None
  )
  trainer, _ = train.trainer_of(setting)
  monkeypatch.setattr(Task, "evaluate", lambda task, params: (1.0, 0.5))
  scales = []

  class Watching:
    def restore(self, state, batches, notes):
      return 0, state, notes

    def save(self, step, state, notes):
      (scale,) = optax.tree.get_all_with_path(state[2], "scale")
      scales.append(float(scale[1]))

  trainer.train(0, saved=Watching())
  # The first loss is the best so far; three in a row are not below it.
  assert scales == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25]


class Killed(Exception):
  pass


@pytest.mark.parametrize(
  "changed",
  [
    pytest.param(
      {"codec": "redsync-1-paper", "max_norm": 0.1, "clipping": "share", "ema": 0.9},
      id="momentum",
      marks=pytest.mark.slow,
    ),
    pytest.param({"codec": "qsgd-2-feedback", "schedule": "plateau"}, id="feedback"),
  ],
)
def test_a_training_goes_on_with_the_same_bits(changed, tmp_path, monkeypatch):
  setting = DIGITS._replace(network="mlp", **changed)
  monkeypatch.setattr(train, "_LONG", 0.0)
  monkeypatch.setattr(train, "_BETWEEN", 0.0)
  trainer, _ = train.trainer_of(setting)
  whole = trainer.train(setting.seed)
  assert len(whole["points"]) == 2

  def keeper():
    heart = Heart(tmp_path / "heartbeat.json", setting.steps)
    heart.estimate = 1.0
    return Keeper(tmp_path / "saved", heart, trainer.recorded()), heart

  done = []

  def stepped():
    done.append(len(done))
    if len(done) == 5:
      raise Killed

  first, _ = keeper()
  with pytest.raises(Killed):
    trainer.train(setting.seed, stepped, first)
  again, heart = keeper()
  later = []
  found = trainer.train(setting.seed, lambda: later.append(1), again)
  assert found == whole
  assert len(later) == 2 and heart.cpu > 0


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[1:2]
from benchmarks.study import records
from benchmarks.study.queue import train
from test_evidence_training import DIGITS
train._LONG = train._BETWEEN = 0.0
train._MEASURED = 0.0
setting = DIGITS._replace(codec="onebit-64", network="mlp", steps=60)
path, state = map(Path, sys.argv[2:])
append = lambda results: records.append(path, setting, results)
train.train(setting, state, append)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_training_that_is_killed_at_any_time_ends_as_one_that_is_not(
  number, tmp_path
):
  """The moment is that of the tenth step or a later one, as chance has it."""
  here = str(Path(__file__).parent)
  env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

  def start(name):
    given = [here, str(tmp_path / f"{name}.jsonl"), str(tmp_path / name)]
    return subprocess.Popen([sys.executable, "-c", SCRIPT, *given], env=env)

  assert start("whole").wait() == 0
  process = start("killed")
  beat = tmp_path / "killed" / "heartbeat.json"
  while not beat.exists() or json.loads(beat.read_text())["step"] < 10:
    assert process.poll() is None
  process.send_signal(number)
  assert process.wait() == (128 + number if number == signal.SIGTERM else -number)
  assert start("killed").wait() == 0
  whole, found = (
    json.loads((tmp_path / f"{name}.jsonl").read_text()) for name in ("whole", "killed")
  )
  assert found["fingerprint"] == whole["fingerprint"]
  assert found["points"] == whole["points"]


def test_a_heart_says_how_far_a_training_is(tmp_path, monkeypatch, capsys):
  clock = iter(np.arange(0.0, 1000.0, 0.5).tolist())
  monkeypatch.setattr(train.time, "process_time", lambda: next(clock))
  monkeypatch.setattr(train, "_BEAT", 0.0)
  monkeypatch.setattr(train, "_MEASURED", 2.0)
  heart = Heart(tmp_path / "heartbeat.json", 100)
  for _ in range(12):
    heart.beat()
  found = json.loads((tmp_path / "heartbeat.json").read_text())
  assert (found["step"], found["steps"]) == (12, 100)
  assert found["estimate"] == heart.estimate > found["cpu"]
  assert "CPU seconds" in capsys.readouterr().out


def test_a_training_leaves_a_record_and_nothing_else(tmp_path):
  setting = DIGITS._replace(network="mlp", steps=2, points=1)
  path = tmp_path / "records" / "1-test.jsonl"
  state = tmp_path / "state"
  path.parent.mkdir()
  ended = lambda results: records.append(path, setting, results)
  train.train(setting, state, ended)
  assert not state.exists()
  [record] = records.read(path.parent)
  assert record.setting == setting
  found = record.results
  assert found["points"][0]["step"] == 2 and found["cpu"] > 0
  assert found["commit"] and len(found["fingerprint"]) == 16
  assert found["ratio"] == 1.0 and found["bytes_a_step"] > 0


def test_a_training_that_diverges_says_so(monkeypatch):
  setting = DIGITS._replace(network="mlp", dropout=0.0, learning_rate=1e30)
  trainer, _ = train.trainer_of(setting)
  found = trainer.train(0)
  assert found["diverged"] == found["points"][-1]["step"] < setting.steps


def test_data_of_another_size_is_refused():
  with pytest.raises(ValueError, match="'digits' with 1437 .* got 'digits' with 1280"):
    train.source_of(DIGITS._replace(epoch=1280))
