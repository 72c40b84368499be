"""The tables, pages and pictures in docs/results/ that the records of the study make.

``python -m benchmarks.pages.study`` writes what the tree has of them: each table behind
its heading, the pages of docs/results/claims/ whole, a picture for each claim that has
numbers, and those pictures of the report that the pages show. All other tables, behind
marks, are built with the site.
"""

import functools
import re

from benchmarks.common.tables import table
from benchmarks.pages import digits
from benchmarks.pages.records import FOLDER as DOCS
from benchmarks.pages.records import RECORDS as RESULTS
from benchmarks.study import analysis, records, report
from benchmarks.study.figures import accuracy
from benchmarks.study.figures import claims as figures_claims
from benchmarks.study.figures.style import slug
from benchmarks.study.judges import safe
from benchmarks.study.judges.verdicts import WORDS
from benchmarks.study.queue import items, status

FOLDER = DOCS / "results"
RECORDS = RESULTS / "study" / "papers"
EVIDENCE = RECORDS.with_name("evidence")
CLAIMS = "# What the papers say"
HEADLINE = "lenet on fashion-mnist/14, N = 8, batch 128, 2 epochs"
SAFE = "## What does it cost in accuracy?"
PAGES = FOLDER / "claims"
DRAWN = PAGES / "pictures"
# Of each page: its claims' paper, or our own, and what it is about.
PAPERS = {
  "grubic": (
    "Grubic",
    "Grubic et al., 2018: [Synchronous Multi-GPU Deep Learning with Low-Precision "
    "Communication](https://doi.org/10.3929/ethz-b-000319485). Momentum is 0.9.",
  ),
  "wen": (
    "Wen",
    "Wen et al., 2017: [TernGrad](https://arxiv.org/abs/1705.07878).",
  ),
  "dettmers": (
    "Dettmers",
    "Dettmers, 2016: [8-Bit Approximations for Parallelism in Deep "
    "Learning](https://arxiv.org/abs/1511.04561).",
  ),
  "han": (
    "Han",
    "Han et al., 2021: [Auto-Precision Scaling for Distributed Deep "
    "Learning](https://arxiv.org/abs/1911.08907).",
  ),
  "fang": (
    "Fang",
    "Fang et al., 2018: [RedSync](https://arxiv.org/abs/1808.04357).",
  ),
  "ours": (
    "Our own",
    "No paper has an experiment on these sentences. They are its opinion, our reading "
    "of it, or about a setting that it does not have.",
  ),
}
_LENET = "lenet-on-fashion-mnist-14-n-8-batch-128"
_MLP = "mlp-on-fashion-mnist-14-n-8-batch-128"
_MNIST = {
  "momentum": "rate-0-01-weight-decay-0-0005-polynomial-mean-by-0-9999",
  "plain": "rate-0-1-no-momentum-weight-decay-0-0005-polynomial-mean-by-0-9999",
}
# The pictures of the page, and what the report calls them.
PICTURES = {
  "qsgd": f"curve-qsgd-{_LENET}-2-epochs",
  "onebit": f"curve-1-bit-sgd-{_LENET}-2-epochs",
  "onebit-longer": f"curve-1-bit-sgd-{_LENET}-5-99-epochs",
  "terngrad": f"curve-terngrad-{_MLP}-2-epochs",
  "sparse": f"curve-sparse-{_MLP}-2-epochs",
  "workers": "workers-lenet-on-fashion-mnist-14-batch-64-0-999-epochs-rate-0-01-weight-"
  "decay-0-0005-polynomial",
  **{
    f"mnist-{way}-{workers}": f"curve-terngrad-lenet-on-mnist-14-n-{workers}-batch-64-"
    f"10-7-epochs-{name}"
    for way, name in _MNIST.items()
    for workers in (2, 4)
  },
}


@functools.cache
def study():
  """The study with the records of the evidence queue."""
  return analysis.grouped(records.read(RECORDS, EVIDENCE))


def judged():
  """All findings with their verdicts, by the records of the evidence queue, too."""
  found = report.judge(study())
  return [(finding, shortened(verdict)) for finding, verdict in found]


def short(text):
  """Returns a text without what nearly all runs have."""
  usual = r" on fashion-mnist/14|, N = 8, batch 128, 2 epochs|, batch 128| \(5 seeds\)"
  return re.sub(usual, "", text)


def shortened(verdict):
  """Returns a verdict whose numbers and labels are short."""
  drawn = ((word, bar._replace(label=short(bar.label))) for word, bar in verdict.drawn)
  return verdict._replace(
    numbers=tuple(map(short, verdict.numbers)), drawn=tuple(drawn)
  )


def page_of(finding):
  """Returns the name of a claim's page."""
  return "ours" if finding.ours else finding.paper.split()[0].lower()


def by_page(findings):
  """Returns the findings of each page."""
  return {x: [y for y in findings if page_of(y[0]) == x] for x in PAPERS}


def anchor(claim):
  """Returns the address of a claim's section, as GitHub makes it of a heading."""
  kept = re.sub(r"[^\w\- ]", "", claim.removesuffix(".").lower())
  return kept.replace(" ", "-")


def claims_pages(findings):
  """Returns the text of each page of claims."""
  shown = {x.claim: f"pictures/{slug(x.claim)}.png" for x, y in findings if y.drawn}
  return {
    name: report.claims_page(f"Claims: {title}", about, found, shown)
    for (name, (title, about)), found in zip(
      PAPERS.items(), by_page(findings).values(), strict=True
    )
  }


def trainings():
  """Returns a table for each group, or for all of one way by workers, and headings."""
  found = study()
  sweeps = accuracy.by_workers(found)
  named = {
    x.name: table(*accuracy.ends(x))
    for x in found.groups
    if x.name_for_any_workers not in sweeps and x.name != HEADLINE
  }
  named |= {x: table(*accuracy.ends_by_workers(y)) for x, y in sweeps.items()}
  return "\n\n".join(f"### {name}\n\n{lines}" for name, lines in named.items())


def steps():
  """Returns how many times as fast steps are as float32's, a row for each cell."""
  found = study()
  codecs = list(dict.fromkeys(x for cell in found.cells for x in cell.times))[1:]
  header = ["network", "hosts", "link", "f32, ms", "communication", *codecs]
  rows = []
  for cell in found.cells:
    x = cell.setting
    gains = [f"{cell.gain(name):.2f}" if name in cell.times else "" for name in codecs]
    step = f"{1e3 * cell.times['f32']['step']:.0f}"
    rows.append([x.network, str(x.hosts), x.link, step, f"{cell.share:.0%}", *gains])
  return table(header, rows)


def launches():
  """Returns how far each launch of the queue is, with hours of CPU time."""
  counts = ("done", "to do", "seeds", "timed")
  header = ["launch", "done", "to do", "whole seeds", "to time", "hours", "hours to do"]
  rows = []
  for name, row in status.rows(items.items(), records.read(EVIDENCE)).items():
    hours = (f"{row[x]:.1f}" for x in ("h done", "h to do"))
    rows.append([name, *(str(row[x]) for x in counts), *hours])
  return table(header, rows)


# Behind marks, when the site is built.
TABLES = {
  **digits.TABLES,
  "study, trainings": trainings,
  "study, steps on links": steps,
  "study, launches": launches,
}


def pages():
  """The pages that have the tables."""
  return [*sorted(FOLDER.glob("*.md")), FOLDER.with_name("start") / "how-to-choose.md"]


def tables(found, findings):
  """Yields the tables of a study and its findings that the tree has, by headings."""
  (group,) = (x for x in found.groups if x.name == HEADLINE)
  yield f"### {HEADLINE}", table(*accuracy.ends(group))
  yield SAFE, table(*safe.table(found))
  papers = by_page(findings)
  rows = [
    [f"[{PAPERS[name][0]}](claims/{name}.md)", *map(str, report.counts(own))]
    for name, own in papers.items()
  ]
  yield CLAIMS, table(["paper", *WORDS], rows)
  for name, own in papers.items():
    rows = [
      [
        f"[{x.claim.removesuffix('.')}](claims/{name}.md#{anchor(x.claim)})",
        x.said,
        "" if x.ours else x.place,
        y.verdict,
      ]
      for x, y in own
    ]
    header = ["claim", "it says", "its setting?", "verdict"]
    yield f"## {PAPERS[name][0]}", table(header, rows)


def count(findings):
  """Returns the line that counts the verdicts."""
  return f"{report.summary(findings)}."


def written(page, tables, counted):
  """Returns a page with the tables whose headings it has, and its line that counts."""
  for heading, lines in tables:
    if found := re.search(rf"^{re.escape(heading)}\n", page, re.M):
      before, after = page[: found.end()], page[found.end() :]
      old = re.search(r"(^\|.*\n)+", after, re.M)
      page = before + after.replace(old[0], f"{lines}\n", 1)
  return re.sub(r"^\d+ findings of .*$", counted, page, flags=re.M)


def write_pictures(findings):
  """Writes a picture for each claim that has numbers, and removes all others."""
  DRAWN.mkdir(parents=True, exist_ok=True)
  for file in DRAWN.iterdir():
    file.unlink()
  for finding, verdict in findings:
    if verdict.drawn:
      path = DRAWN / f"{slug(finding.claim)}.png"
      path.write_bytes(figures_claims.png(verdict.drawn))


def main():
  found, findings = study(), judged()
  every, counted = list(tables(found, findings)), count(findings)
  for page in pages():
    page.write_text(written(page.read_text(), every, counted))
  for name, text in claims_pages(findings).items():
    (PAGES / f"{name}.md").write_text(text)
  write_pictures(findings)
  shown = [*accuracy.curves(found), *accuracy.sweeps(found)]
  figures = {x.name: x.figure for x in shown}
  for picture, name in PICTURES.items():
    figures[name].savefig(FOLDER / f"study-{picture}.png", dpi=110)


if __name__ == "__main__":
  main()
