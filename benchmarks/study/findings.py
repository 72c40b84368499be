"""Reads the papers' claims, each with what judges it, from the files of claims/.

A claim has the sentence, where the paper has it, the paper's number, and the paper's
setting: one of the file's ``settings`` by its name, or the words. ``place`` says
whether ours is that. ``here`` says what differs in ours that the names of runs do not
say. ``ours`` marks a sentence that no paper has, or of which it has no experiment.
Either it names one of the ``judges`` or, of ``judges.elsewhere``, how to look at the
``record`` of another benchmark; ``also`` has more of both, which count alike. ``share``
and ``gbit`` are those of the ``Judge``. All other keys are options.
"""

import json
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import cli
from benchmarks.study.analysis import Study
from benchmarks.study.judges import accuracy, elsewhere, speed
from benchmarks.study.judges.verdicts import Judge, Seen, Verdict

RESULTS = cli.RESULTS
_CLAIMS = Path(__file__).with_name("claims")
_JUDGES = vars(elsewhere) | vars(speed) | vars(accuracy)


class Finding(NamedTuple):
  """A claim of a paper."""

  claim: str  # in one sentence
  paper: str  # where it is
  said: str  # the paper's number
  judge: Judge  # from a study to a verdict
  setting: str  # the paper's
  here: str = ""  # what differs in ours, but for what the names of runs say
  # "yes" where ours is the paper's, "near" where the net or the data are smaller and
  # the training is as long, or the link as fast, and else "far".
  place: str = "far"
  ours: bool = False  # whether no experiment says it, and it is our own reading

  def verdict(self, study: Study) -> Verdict:
    """Judges it; where the setting is far, what does not hold is not seen here."""
    found = self.judge(study)
    far = found.verdict == "does not" and self.place == "far"
    return found._replace(verdict="not seen here") if far else found


def findings(name: str) -> list[Finding]:
  found = tomllib.loads((_CLAIMS / f"{name}.toml").read_text())
  return [_finding(found["settings"], **entry) for entry in found["claim"]]


def _finding(
  settings: dict[str, str],
  *,
  setting: str,
  also: Sequence[dict[str, Any]] = (),
  share: float = 1.0,
  gbit: float = 0.0,
  **entry: Any,
) -> Finding:
  said = {x: entry.pop(x) for x in Finding._fields if x in entry and x != "judge"}
  judge = _judge(**entry).beside(_judge(**x) for x in also)
  judge = judge._replace(share=share, gbit=gbit)
  said.setdefault("ours", setting == "no experiment")
  return Finding(**said, judge=judge, setting=settings.get(setting, setting))


def _judge(judge: str = "", record: str = "", look: str = "", **options: Any) -> Judge:
  """Returns the judge that a claim names, or one that looks at a record."""
  for name in options.keys() & {"groups", "own", "pairs"}:
    options[name] = getattr(accuracy, options[name])
  found = _JUDGES[look or judge]
  if options:  # what takes none is made already
    found = found(**options)
  return _of(record, found) if record else found


def _of(record: str, look: elsewhere.Look) -> Judge:
  """Returns a judge that looks at a record of benchmarks/results."""

  def looked(study: Study) -> Iterable[Seen]:
    del study
    path = RESULTS / f"{record}.json"
    return look(json.loads(path.read_text())) if path.exists() else ()

  return Judge(looked, f"{record}.json, or more seeds in it")


_PAPERS = ("grubic", "wen", "dettmers", "han", "fang")
_ACCURACY = (x for paper in _PAPERS for x in findings(f"accuracy/{paper}"))
ELSEWHERE = findings("elsewhere")
FINDINGS = (*_ACCURACY, *ELSEWHERE, *findings("speed"))
