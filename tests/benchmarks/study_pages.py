"""The tables in docs/results/ that the committed records of the study make.

``python -m tests.benchmarks.study_pages`` writes them anew, each behind its heading,
and those pictures of the report that the pages show.
"""

import re

from benchmarks.common.tables import table
from benchmarks.study import analysis, records, report
from benchmarks.study.figures import accuracy
from tests.support.pages import ROOT

FOLDER = ROOT / "docs" / "results"
RECORDS = ROOT / "benchmarks" / "results" / "study" / "papers"
EVIDENCE = RECORDS.with_name("evidence")
CLAIMS = "# What the papers say"
STEPS = "## Steps on links"
_LENET = "lenet-on-fashion-mnist-14-n-8-batch-128"
_MLP = "mlp-on-fashion-mnist-14-n-8-batch-128"
# The pictures of the page, and what the report calls them.
PICTURES = {
  "qsgd": f"curve-qsgd-{_LENET}-2-epochs",
  "onebit": f"curve-1-bit-sgd-{_LENET}-2-epochs",
  "onebit-longer": f"curve-1-bit-sgd-{_LENET}-5-99-epochs",
  "terngrad": f"curve-terngrad-{_MLP}-2-epochs",
  "sparse": f"curve-sparse-{_MLP}-2-epochs",
  "workers": "workers-lenet-on-fashion-mnist-14-batch-64-0-999-epochs-rate-0-01-weight-"
  "decay-0-0005-polynomial",
}


def study():
  return analysis.grouped(records.read(RECORDS))


def judged():
  """All findings with their verdicts, by the records of the evidence queue, too."""
  return report.judge(analysis.grouped(records.read(RECORDS, EVIDENCE)))


def short(text):
  """Returns a text without what nearly all runs have."""
  return re.sub(
    r" on fashion-mnist/14|, N = 8, batch 128, 2 epochs|, batch 128", "", text
  )


def steps(found):
  """Returns how many times as fast steps are as float32's, a row for each cell."""
  codecs = list(dict.fromkeys(x for cell in found.cells for x in cell.times))[1:]
  header = ["network", "hosts", "link", "f32, ms", "communication", *codecs]
  rows = []
  for cell in found.cells:
    x = cell.setting
    gains = [f"{cell.gain(name):.2f}" if name in cell.times else "" for name in codecs]
    step = f"{1e3 * cell.times['f32']['step']:.0f}"
    rows.append([x.network, str(x.hosts), x.link, step, f"{cell.share:.0%}", *gains])
  return header, rows


def tables(found, findings):
  """Yields the tables of a study and its findings, behind their headings."""
  sweeps = accuracy.by_workers(found)
  for group in found.groups:
    if group.name_for_any_workers not in sweeps:
      yield f"### {group.name}", table(*accuracy.ends(group))
  for title, groups in sweeps.items():
    yield f"### {title}", table(*accuracy.ends_by_workers(groups))
  yield STEPS, table(*steps(found))
  header, rows = report.claims(findings)
  yield CLAIMS, short(table(header, rows))


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
  return re.sub(r"^\d+ findings; .*$", counted, page, flags=re.M)


def main():
  found, findings = study(), judged()
  every, counted = list(tables(found, findings)), count(findings)
  for page in FOLDER.glob("*.md"):
    page.write_text(written(page.read_text(), every, counted))
  shown = [*accuracy.curves(found), *accuracy.sweeps(found)]
  figures = {x.name: x.figure for x in shown}
  for picture, name in PICTURES.items():
    figures[name].savefig(FOLDER / f"study-{picture}.png", dpi=110)


if __name__ == "__main__":
  main()
