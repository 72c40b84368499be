"""The trainings of the evidence queue: what they are, and that they go on as before."""

import tomllib
from unittest import mock

import pytest

from benchmarks.study import analysis, methods, records, runner
from benchmarks.study import items as study_items
from benchmarks.study.items import Item
from benchmarks.study.queue import train
from benchmarks.study.records import Record
from tests.benchmarks.study.records import SETTING
from tests.plugins.slow_cases import slow

DIGITS = SETTING._replace(workers=2, batch=32, steps=6, epoch=1437, points=2)


@pytest.mark.parametrize("path", sorted(study_items.LAUNCHES.glob("*.toml")))
def test_launches_have_each_run_once_and_beside_float32(path):
  items = study_items.items(path)
  assert len({x.digest for x in items}) == len({x.setting for x in items}) == len(items)
  read = tomllib.loads(path.read_text())["launch"]
  assert {x.launch for x in items} == {x["name"] for x in read}
  for x in items:
    assert methods.check(x.setting.codec)
    assert x.setting.batch % x.setting.workers == 0
  for launch in read:
    seeds = [x.setting.seed for x in items if x.launch == launch["name"]]
    assert seeds == sorted(seeds) and set(seeds) == {*range(launch.get("seeds", 5))}
  found = analysis.grouped(Record(x.setting, {"points": []}) for x in items)
  assert len({x.name for x in found.groups}) == len(found.groups)
  assert all("f32" in x.runs or x.setting.exchange != "auto" for x in found.groups)


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
  trainer, _ = runner.trainer_of(setting)
  whole = trainer.train(setting.seed)
  assert len(whole["points"]) == 2
  stepped = mock.Mock(side_effect=[None] * 4 + [InterruptedError] + [None] * 2)
  kept = lambda: train.Keeper(tmp_path / "saved", setting.steps, trainer.recorded())
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
  trainer, _ = runner.trainer_of(setting)
  found = trainer.train(0)
  assert found["diverged"] == found["points"][-1]["step"] < setting.steps
  with pytest.raises(ValueError, match="must be 1437, .*'digits', got 1280"):
    runner.source_of(DIGITS._replace(epoch=1280))


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
  train.train_arms(items, tmp_path, minutes=1.0)
  assert "and 1 more" in capsys.readouterr().out
  found = {x.setting.seed: x.results for x in records.read(tmp_path)}
  alone, _ = runner.trainer_of(setting)
  for seed in (3, 1):
    assert [x["step"] for x in found[seed]["points"]] == [3, 6]
    for x, y in zip(alone.train(seed)["points"], found[seed]["points"], strict=True):
      assert x["train_loss"] == pytest.approx(y["train_loss"], rel=1e-4)
      assert x["test_loss"] == pytest.approx(y["test_loss"], rel=1e-3)
    assert found[seed]["ratio"] == alone.bytes()["ratio"]
  assert found[3]["points"] != found[1]["points"]


@pytest.mark.slow
def test_an_arm_says_where_a_seed_diverged():
  setting = DIGITS._replace(network="mlp", learning_rate=1e3, max_norm=None)
  trainer, _ = runner.trainer_of(setting)
  (found,) = trainer.train_together([0])
  assert found["diverged"] == trainer.train(0)["diverged"]
