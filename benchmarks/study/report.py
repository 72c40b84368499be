"""Writes the report of a study: one page of HTML, Markdown, and the pictures."""

import base64
import functools
import io
import re
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2

from benchmarks.common.tables import table
from benchmarks.study import analysis, findings, records
from benchmarks.study.figures import claims, results
from benchmarks.study.figures.results import Rows, Shown, prices, slug
from benchmarks.study.judges.verdicts import WORDS, Verdict

_TEMPLATES = Path(__file__).with_name("templates")
_PAGES = jinja2.Environment(
  loader=jinja2.FileSystemLoader(_TEMPLATES),
  autoescape=lambda name: name is not None and ".html" in name,
  undefined=jinja2.StrictUndefined,
)
_PAGES.globals["table"] = table
_PAGES.filters["base64"] = lambda data: base64.b64encode(data).decode()
_PAGES.filters["heading"] = lambda claim: claim.removesuffix(".")
Judged = list[tuple[findings.Finding, Verdict]]


def filled(text: str, indent: str = "") -> str:
  r"""Breaks a text of Markdown into lines of 120, all but the first with an indent.

  No line begins with a sign that would make it an item of a list, or a quotation.

  >>> filled("a " * 58 + "b - c").splitlines()[-1]
  'b - c'
  """
  held = re.sub(r" ([->+]) ", "\0\\1\0", text)
  whole = {"break_long_words": False, "break_on_hyphens": False}
  lines = textwrap.fill(held, 120, subsequent_indent=indent, **whole)
  return lines.replace("\0", " ")


_PAGES.filters["filled"] = filled


def sections(study: analysis.Study, price: float) -> Iterator[Any]:
  draws = vars(results) | {"prices": functools.partial(prices, price=price)}
  for part in tomllib.loads((_TEMPLATES / "sections.toml").read_text())["section"]:
    yield part | {"shown": list(draws[part["draw"]](study))}


def fits(study: analysis.Study) -> tuple[list[str], Rows]:
  header = ["cell", "a, ms a sample", "c, ms a sample", "error", "f32's share of c"]
  rows = []
  for cell in study.cells:
    if found := cell.fit():
      a, c = (f"{1e3 * x:.4g}" for x in (found.computation, found.communication))
      rows.append([cell.name, a, c, f"{found.error:.1%}", f"{found.share:.0%}"])
  return header, rows


def runs(study: analysis.Study) -> tuple[list[str], Rows]:
  header = ["what", "codecs", "seeds", "batch", "steps", "learning rate", "machine"]
  rows: Rows = []
  for group in study.groups:
    x = group.setting
    seeds = max(map(len, group.runs.values()))
    counts = [str(len(group.runs)), str(seeds), str(x.batch), str(x.steps)]
    found = [record.results for runs in group.runs.values() for record in runs.values()]
    counts += [f"{x.learning_rate:g}", ""]
    versions = len({x.get("code", x.get("gradcomp", "")) for x in found})
    rows.append([f"{x.way}: {group.name}", *counts, str(versions)])
  for cell in study.cells:
    first = next(iter(cell.times.values()))
    machine = f"{first['cpu']}, {first['cores']} cores for all workers on it"
    if first.get("probe"):
      machine += f"; the link carries {8e-6 * first['probe']:,.0f} Mbit/s"
    counts = [str(len(cell.times)), "", str(cell.setting.batch), ""]
    rows.append([f"timed: {cell.name}", *counts, "", machine, ""])
  for record in study.failed:
    x = record.setting
    what = f"failed: {x.network}, N = {x.workers}: {record.lacking}"
    rows.append([what, x.name, str(x.seed), str(x.batch), str(x.steps), "", "", ""])
  return [*header, "versions of the code"], rows


def write(folders: Sequence[Path], output: Path, price: float = 0.9) -> None:
  """Writes report.html, report.md and figures/*.png of the records of some folders.

  ``price``: dollars an hour of a worker.
  """
  study = analysis.grouped(records.read(*folders))
  if not study.groups and not study.cells:
    named = ", ".join(map(str, folders))
    raise ValueError(f"`folders` must have records of runs, *.jsonl; {named} has none.")
  judged = judge(study)
  drawn = list(sections(study, price))
  pictures = {shown.name: _png(shown) for part in drawn for shown in part["shown"]}
  of_claims = {x.claim: f"claim-{slug(x.claim)}" for x, found in judged if found.drawn}
  pictures |= {of_claims[x.claim]: claims.png(y.drawn) for x, y in judged if y.drawn}
  (output / "figures").mkdir(parents=True, exist_ok=True)
  for name, picture in pictures.items():
    (output / "figures" / f"{name}.png").write_bytes(picture)
  tables = {
    "The line a + c w through the times of a sample": fits(study),
    "What was run": runs(study),
  }
  given = {"summary": summary(judged), "judged": judged, "of_claims": of_claims}
  given |= {"sections": drawn, "pictures": pictures, "tables": tables.items()}
  for name in ("report.md", "report.html"):
    text = filled_in(name, **given, nothing="Nothing was run for this.")
    (output / name).write_text(text)
  print(f"wrote {output / 'report.html'} and report.md: {summary(judged)}")


def judge(study: analysis.Study) -> Judged:
  return [(finding, finding.verdict(study)) for finding in findings.FINDINGS]


def _png(shown: Shown) -> bytes:
  file = io.BytesIO()
  shown.figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
  return file.getvalue()


def counts(judged: Judged) -> list[int]:
  """Counts the verdicts, in the order of ``WORDS``."""
  words = [verdict.verdict for _, verdict in judged]
  return [words.count(word) for word in WORDS]


def summary(judged: Judged) -> str:
  """Counts the verdicts, and in the same order those on our own claims."""
  papers, own = ([x for x in judged if x[0].ours == ours] for ours in (False, True))
  ours = ", ".join(map(str, counts(own)))
  return f"{len(papers)} findings of papers: {counted(papers)}; {len(own)} own: {ours}"


def counted(judged: Judged) -> str:
  return ", ".join(f"{x} {y}" for x, y in zip(counts(judged), WORDS, strict=True))


def filled_in(template: str, **given: Any) -> str:
  return f"{_PAGES.get_template(f'{template}.j2').render(**given).rstrip()}\n"
