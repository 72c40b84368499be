"""Writes the report of a study: one page of HTML, Markdown, and the pictures."""

import base64
import functools
import html
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import cluster_figures
import cluster_records
import cluster_speed_figures
from cluster_findings import FINDINGS
from cluster_numbers import Study, grouped
from cluster_panels import Rows, Shown
from cluster_verdicts import Finding, Verdict
from tables import table

_NOTHING = "Nothing was run for this."
_PAGE = Path(__file__).with_name("cluster_page.html")
Judged = list[tuple[Finding, Verdict]]


class Section(NamedTuple):
  """A part of the report: pictures, each with its table."""

  title: str
  text: str
  shown: list[Shown]


def sections(study: Study, price: float | None = None) -> Iterator[Section]:
  """Yields the parts of the report that have pictures."""
  accuracy, speed = cluster_figures, cluster_speed_figures
  parts: tuple[tuple[str, str, Callable[[Study], Iterable[Shown]]], ...] = (
    (
      "Accuracy at the end",
      "Means over seeds of the differences to float32, seed by seed, with intervals of "
      "95 %. The steps are those until the mean accuracy is float32's at the end less "
      "0.2 points.",
      accuracy.losses,
    ),
    (
      "Accuracy by workers",
      "As Wen's figure 3: trainings that differ in their workers alone.",
      accuracy.sweeps,
    ),
    ("Accuracy by epoch", "As Grubic's figure 5.", accuracy.curves),
    ("Samples a second", "As Grubic's figures 10 and 11.", speed.speeds),
    (
      "Where the time goes",
      "As Grubic's figures 6 to 9. Compute is a step without any exchange. Codec is "
      "what encoding and decoding add. Communication is the rest: a difference, which "
      "has the decoding of other workers' payloads in it. A part below zero is drawn "
      "as zero.",
      speed.bars,
    ),
    ("Scalability", "As Grubic's figures 12 to 15.", speed.scalings),
    (
      "Dollars against accuracy",
      "As Grubic's figure 16, left. The time is that of the training's steps at the "
      "measured speed. The accuracy may be that of emulated workers.",
      functools.partial(speed.prices, price=price),
    ),
    (
      "Speed-up against MB/GFLOP",
      "As Grubic's figure 16, right. Megabytes of parameters, and billions of "
      "operations of a training step for one sample, as XLA counts them: those in a "
      "loop once.",
      speed.intensities,
    ),
  )
  for title, text, draw in parts:
    yield Section(title, text, list(draw(study)))


def fits(study: Study) -> tuple[list[str], Rows]:
  """Returns the table of the lines through the times."""
  header = ["cell", "a, ms a sample", "c, ms a sample", "error", "f32's share of c"]
  rows = [
    [
      cell.name,
      f"{1e3 * found.computation:.4g}",
      f"{1e3 * found.communication:.4g}",
      f"{found.error:.1%}",
      f"{found.share:.0%}",
    ]
    for cell in study.cells
    if (found := cell.fit())
  ]
  return header, rows


def runs(study: Study) -> tuple[list[str], Rows]:
  """Returns the table of what was run."""
  header = [
    *("what", "codecs", "seeds", "batch", "steps", "learning rate", "machine"),
    "versions of the code",
  ]
  rows: Rows = []
  for group in study.groups:
    x = group.setting
    seeds = max(map(len, group.runs.values()))
    kind = f"{x.way}: {group.name}"
    counts = [str(len(group.runs)), str(seeds), str(x.batch), str(x.steps)]
    found = [record.results for runs in group.runs.values() for record in runs.values()]
    versions = len({x.get("code", x.get("gradcomp", "")) for x in found})
    rows.append([kind, *counts, f"{x.learning_rate:g}", "", str(versions)])
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
  return header, rows


def write(folders: Sequence[Path], output: Path, price: float | None = None) -> None:
  """Writes report.html, report.md and figures/*.png.

  Args:
    folders: of the records, which are joined.
    output: where to write.
    price: dollars an hour of a worker; None for what the launches said.

  Raises:
    ValueError: the folders have no records.
  """
  study = grouped(cluster_records.read(*folders))
  if not study.groups and not study.cells:
    named = ", ".join(map(str, folders))
    raise ValueError(f"`folders` must have records of runs, *.jsonl; {named} has none.")
  judged = judge(study)
  drawn = list(sections(study, price))
  pictures = {shown.name: _png(shown) for part in drawn for shown in part.shown}
  (output / "figures").mkdir(parents=True, exist_ok=True)
  for name, picture in pictures.items():
    (output / "figures" / f"{name}.png").write_bytes(picture)
  (output / "report.md").write_text(markdown(study, judged, drawn))
  (output / "report.html").write_text(page(study, judged, drawn, pictures))
  print(f"wrote {output / 'report.html'} and report.md: {summary(judged)}")


def judge(study: Study) -> Judged:
  """Returns all findings with their verdicts."""
  return [(finding, finding.judge(study)) for finding in FINDINGS]


def _png(shown: Shown) -> bytes:
  file = io.BytesIO()
  shown.figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
  return file.getvalue()


def summary(judged: Judged) -> str:
  """Counts the verdicts."""
  verdicts = [verdict.verdict for _, verdict in judged]
  counts = [f"{verdicts.count(x)} {x}" for x in ("holds", "does not", "not tested")]
  return f"{len(judged)} findings: {', '.join(counts)}"


def claims(judged: Judged) -> tuple[list[str], Rows]:
  """Returns the table of the findings."""
  header = ["claim", "paper", "it says", "verdict", "our numbers"]
  rows = [
    [
      finding.claim,
      finding.paper,
      finding.said,
      verdict.verdict,
      "; ".join(verdict.numbers),
    ]
    for finding, verdict in judged
  ]
  return header, rows


def markdown(study: Study, judged: Judged, drawn: list[Section]) -> str:
  """Writes the report in Markdown."""
  parts = [
    "# Study of the papers' claims",
    f"## Findings\n\n{summary(judged)}.",
    table(*claims(judged)),
  ]
  for section in drawn:
    parts.append(f"## {section.title}\n\n{section.text}")
    for shown in section.shown:
      picture = f"![{shown.caption}](figures/{shown.name}.png)"
      parts += [f"### {shown.caption}", picture, table(shown.header, shown.rows)]
    if not section.shown:
      parts.append(_NOTHING)
  for title, (header, rows) in _tables(study):
    parts += [f"## {title}", table(header, rows) if rows else _NOTHING]
  return "\n\n".join(parts) + "\n"


def _tables(study: Study) -> tuple[tuple[str, tuple[list[str], Rows]], ...]:
  return (
    ("The line a + c w through the times of a sample", fits(study)),
    ("What was run", runs(study)),
  )


def page(
  study: Study, judged: Judged, drawn: list[Section], pictures: dict[str, bytes]
) -> str:
  """Writes the report as a page that needs nothing else."""
  parts = [f"<p>{html.escape(summary(judged))}.</p>", '<div class="findings">']
  parts += [_card(finding, verdict) for finding, verdict in judged]
  parts.append("</div>")
  for section in drawn:
    parts.append(f"<h2>{html.escape(section.title)}</h2>")
    parts.append(f"<p>{html.escape(section.text)}</p>")
    parts.append('<div class="figures">')
    parts += [_figure(shown, pictures[shown.name]) for shown in section.shown]
    parts.append("</div>" if section.shown else f"</div><p>{_NOTHING}</p>")
  for title, (header, rows) in _tables(study):
    parts.append(f"<h2>{html.escape(title)}</h2>")
    parts.append(_grid(header, rows) if rows else f"<p>{_NOTHING}</p>")
  return _PAGE.read_text().replace("<!-- report -->", "\n".join(parts))


def _card(finding: Finding, verdict: Verdict) -> str:
  kind = verdict.verdict.replace(" ", "-")
  numbers = "".join(f"<li>{html.escape(line)}</li>" for line in verdict.numbers)
  return (
    f'<article class="{kind}"><p class="verdict">{verdict.verdict}</p>'
    f"<h3>{html.escape(finding.claim)}</h3>"
    f"<p>{html.escape(finding.paper)}: {html.escape(finding.said)}</p>"
    f"<ul>{numbers}</ul></article>"
  )


def _figure(shown: Shown, picture: bytes) -> str:
  caption = html.escape(shown.caption)
  source = base64.b64encode(picture).decode()
  return (
    f'<figure><img alt="{caption}" src="data:image/png;base64,{source}">'
    f"<figcaption>{caption}</figcaption>{_grid(shown.header, shown.rows)}</figure>"
  )


def _grid(header: list[str], rows: Rows) -> str:
  line = lambda cells, tag: "".join(f"<{tag}>{html.escape(x)}</{tag}>" for x in cells)
  body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
  return (
    f'<div class="table"><table><thead><tr>{line(header, "th")}</tr></thead>'
    f"<tbody>{body}</tbody></table></div>"
  )
