"""A diary says how long it takes from the end of a node to the next step."""

import json

from examples.lib import diary


def entry(time, what, **more):
  return {"time": time, "what": what, **more}


def test_a_change_lasts_until_others_take_a_step():
  """It reads any number of steps of the old group, and groups that took none."""
  entries = [entry(t, "step", step=t, workers=4) for t in (1, 2)]
  entries += [entry(3, "a node is killed"), entry(3.5, "failed"), entry(4.5, "failed")]
  entries += [entry(6, "started", workers=4)]
  entries += [entry(t, "started", workers=3) for t in (9, 9.5)]
  entries += [entry(10, "connected"), entry(12, "restored", step=2)]
  entries += [entry(14, "step", step=3, workers=3), entry(15, "started", workers=4)]
  assert list(diary.told(entries)) == [
    "a node is killed after step 2",
    "    0.5 s  the first worker fails in an exchange",
    "    6.5 s  the last worker of a new group has started",
    "    7.0 s  JAX has connected them",
    "    9.0 s  all have their state",
    "   11.0 s  step 3, by 3 workers",
  ]


def test_all_files_are_read_in_the_order_of_time(tmp_path):
  for number, time in enumerate((5.0, 1.0, 3.0)):  # of other processes
    line = json.dumps(entry(time, "step", workers=number))
    (tmp_path / f"diary-{number}.jsonl").write_text(f"{line}\n")
  diary.note(tmp_path, "step", workers=9)
  assert [x["workers"] for x in diary.read(tmp_path)] == [1, 2, 0, 9]
  assert diary.began(tmp_path, 2) == 3.0 and diary.began(tmp_path, 5) is None
