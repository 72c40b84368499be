"""The trainings of the evidence queue: what they are, and that they go on as before."""

from unittest import mock

import jax
import pytest

from benchmarks.study import analysis, methods, options, records, runner, tasks
from benchmarks.study.queue import arms, times, train
from benchmarks.study.queue import items as queue_items
from benchmarks.study.queue.items import Item
from benchmarks.study.records import Record
from tests.benchmarks.study.records import SETTING, unread
from tests.plugins.slow_cases import slow

DIGITS = SETTING._replace(workers=2, batch=32, steps=6, epoch=1437, points=2)


def test_launches_have_each_training_once_and_beside_float32():
  items = queue_items.items()
  assert len({x.digest for x in items}) == len({x.setting for x in items}) == len(items)
  launches = {x["name"]: x.get("seeds", 5) for x in queue_items.LAUNCHES["launch"]}
  assert {x.launch for x in items} == {*launches}
  for x in items:
    assert methods.check(x.setting.codec)
    assert x.setting.batch % x.setting.workers == 0
  for launch, count in launches.items():
    seeds = [x.setting.seed for x in items if x.launch == launch]
    assert seeds == sorted(seeds) and set(seeds) == set(range(count))
    assert len(set(map(seeds.count, seeds))) == 1
  found = analysis.grouped(Record(x.setting, {"points": []}) for x in items)
  assert len({x.name for x in found.groups}) == len(found.groups)
  assert all("f32" in group.runs for group in found.groups)


def test_timed_launches_are_those_of_the_study(monkeypatch):
  """Each host runs these settings on its link, with the sizes of the data alone."""
  monkeypatch.setattr(tasks, "source", unread)
  timed = {x.setting for x in queue_items.items() if x.setting.way == "timed"}
  made = set()
  for _, rate, hosts, line in times.lines(timed):
    monkeypatch.setattr(jax, "process_count", lambda hosts=hosts: hosts)
    monkeypatch.setattr(jax, "device_count", lambda hosts=hosts: hosts)
    args = options.parse(["run", *line, "--link", rate, "--output", "unused"])
    made |= {x.setting for x in runner.jobs(args)}
  assert made == timed


@pytest.mark.parametrize(
  "changed",
  [
    {"codec": "qsgd-2-feedback", "schedule": "plateau"},
    *slow(
      dict(codec="redsync-1-paper", max_norm=0.1, clipping="share", ema=0.9),
      # Workers whose parameters move apart, and whose exchange is the optimizer.
      dict(codec="adam-local", optimizer="adam", learning_rate=1e-3, momentum=None),
    ),
  ],
)
def test_a_training_goes_on_with_the_same_bits(changed, tmp_path, monkeypatch):
  setting = DIGITS._replace(network="mlp", **changed)
  monkeypatch.setattr(train, "_BETWEEN", 0.0)
  trainer, _ = train.trainer_of(setting)
  whole = trainer.train(setting.seed)
  assert len(whole["points"]) == 2
  stepped = mock.Mock(side_effect=[None] * 4 + [InterruptedError] + [None] * 2)

  def kept():
    return train.Keeper(tmp_path / "saved", setting.steps, trainer.recorded())

  with pytest.raises(InterruptedError):
    trainer.train(setting.seed, stepped, kept())
  assert (tmp_path / "heartbeat.json").exists()
  keeper = kept()
  assert trainer.train(setting.seed, stepped, keeper) == whole
  assert stepped.call_count == 5 + 2 and keeper.cpu > 0


def test_a_training_leaves_a_record_and_nothing_else(tmp_path):
  setting = DIGITS._replace(network="mlp", steps=2, points=1)
  path, state = tmp_path / "records" / "1-test.jsonl", tmp_path / "state"
  path.parent.mkdir()
  train.train(setting, state, lambda results: records.append(path, setting, results))
  assert not state.exists()
  [(found, results)] = records.read(path.parent)
  assert found == setting and results["points"][0]["step"] == 2
  assert results["commit"] and len(results["fingerprint"]) == 16
  assert results["cpu"] > 0 and results["ratio"] == 1.0 and results["bytes_a_step"] > 0


def test_a_training_that_diverges_says_so():
  setting = DIGITS._replace(network="mlp", dropout=0.0, learning_rate=1e30)
  trainer, _ = train.trainer_of(setting)
  found = trainer.train(0)
  assert found["diverged"] == found["points"][-1]["step"] < setting.steps
  with pytest.raises(ValueError, match="'digits' with 1437 .* got 'digits' with 1280"):
    train.source_of(DIGITS._replace(epoch=1280))


@pytest.mark.parametrize(
  "changed",
  [
    {"network": "mlp", "codec": "terngrad-paper", "schedule": "plateau"},
    *slow(
      dict(network="mlp", codec="f32", ema=0.9),
      dict(network="mlp", codec="adam-local", optimizer="adam", momentum=None),
    ),
  ],
)
def test_seeds_that_train_together_end_as_alone(changed, tmp_path, capsys):
  """But for the order of float32 sums: a vmap multiplies other matrices."""
  setting = DIGITS._replace(**changed)
  items = [Item("1-test", setting._replace(seed=seed), 0.0) for seed in (3, 1, 4)]
  records.append(tmp_path / "1-test.jsonl", items[2].setting, {"points": []})
  arms.run(items, tmp_path, minutes=1.0)
  assert "and 1 more" in capsys.readouterr().out
  found = {x.setting.seed: x.results for x in records.read(tmp_path)}
  alone, _ = train.trainer_of(setting)
  for seed in (3, 1):
    expected = alone.train(seed)["points"]
    assert [x["step"] for x in found[seed]["points"]] == [3, 6]
    for x, y in zip(expected, found[seed]["points"], strict=True):
      assert x["train_loss"] == pytest.approx(y["train_loss"], rel=1e-4)
      assert x["test_loss"] == pytest.approx(y["test_loss"], rel=1e-3)
    assert found[seed]["ratio"] == alone.bytes()["ratio"]
  assert found[3]["points"] != found[1]["points"]


@pytest.mark.slow
def test_an_arm_says_where_a_seed_diverged():
  setting = DIGITS._replace(network="mlp", learning_rate=1e3, max_norm=None)
  trainer, _ = train.trainer_of(setting)
  (found,) = trainer.train_together([0])
  assert found["diverged"] == trainer.train(0)["diverged"]
