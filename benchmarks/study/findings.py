"""Reads the papers' claims, each with what judges it, from claims/*.toml.

A claim has the sentence, where the paper has it and the paper's number. Either it names
one of the ``judges`` or, of ``judges.elsewhere``, how to look at the ``record`` of
another benchmark. All other keys are options of that.
"""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import cli
from benchmarks.study.analysis import Study
from benchmarks.study.judges import accuracy, elsewhere, speed
from benchmarks.study.judges.accuracy import Judge, Verdict, concluded

RESULTS = cli.RESULTS
_CLAIMS = Path(__file__).with_name("claims")
_JUDGES = vars(speed) | vars(accuracy)


class Finding(NamedTuple):
  """A claim of a paper.

  Attributes:
    claim: in one sentence.
    paper: where it is.
    said: the paper's number.
    judge: from a study to a verdict.
  """

  claim: str
  paper: str
  said: str
  judge: Judge


def findings(name: str) -> list[Finding]:
  """Reads the claims of a file."""
  text = (_CLAIMS / f"{name}.toml").read_text()
  return [_finding(**entry) for entry in tomllib.loads(text)["claim"]]


def _finding(
  claim: str,
  paper: str,
  said: str,
  judge: str = "",
  record: str = "",
  look: str = "",
  **options: Any,
) -> Finding:
  if "groups" in options:
    options["groups"] = getattr(accuracy, options["groups"])
  if record:
    return Finding(
      claim, paper, said, _of(record, _made(vars(elsewhere)[look], options))
    )
  return Finding(claim, paper, said, _made(_JUDGES[judge], options))


def _made(found: Callable[..., Any], options: dict[str, Any]) -> Any:
  """Calls what takes options, and returns what takes none as it is."""
  return found(**options) if options else found


def _of(record: str, look: Callable[..., Any]) -> Judge:
  """Returns a judge that looks at a record of benchmarks/results."""

  def judge(study: Study) -> Verdict:
    del study
    path = RESULTS / f"{record}.json"
    seen = look(json.loads(path.read_text())) if path.exists() else ()
    return concluded(seen, f"{record}.json, or more seeds in it")

  return judge


ELSEWHERE = findings("elsewhere")
FINDINGS = (*findings("accuracy"), *ELSEWHERE, *findings("speed"))
