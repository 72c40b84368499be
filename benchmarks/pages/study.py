"""The tables, pages and pictures in docs/results/ that the records of the study make.

``python -m benchmarks.pages.study`` writes what the tree has of them: each table behind
its heading, the pages of docs/results/claims/ whole, a picture for each claim that has
numbers, and those pictures of the report that the pages show. All other tables, behind
marks, are built with the site. Those of trainings whose scripts are gone are made of
their records: differences to float32 are seed by seed, with intervals of 95 %.
"""

import functools
import re
import statistics
import tomllib
from pathlib import Path

from scipy import stats

from benchmarks.common.tables import table
from benchmarks.pages.records import FOLDER as DOCS
from benchmarks.pages.records import NAMES, TABLES, TYPES, load, named
from benchmarks.pages.records import RECORDS as RESULTS
from benchmarks.study import analysis, items, records, report
from benchmarks.study.analysis import spread
from benchmarks.study.figures import claims, results
from benchmarks.study.figures.results import slug
from benchmarks.study.judges.verdicts import EQUAL, WORDS, rule
from benchmarks.study.queue import status
from benchmarks.study.tasks import TEXTS

FOLDER = DOCS / "results"
RECORDS = RESULTS / "study" / "papers"
EVIDENCE = RECORDS.with_name("evidence")
HEADLINE = "lenet on fashion-mnist/14, N = 8, batch 128, 2 epochs"
PAGES = FOLDER / "claims"
DRAWN = PAGES / "pictures"
_NAMES = tomllib.loads(Path(__file__).with_name("study.toml").read_text())
PAPERS, PICTURES, _SAFE = _NAMES["papers"], _NAMES["pictures"], _NAMES["safe"]
_PERCENT = 1.0  # of perplexity, that is safe
_TYPES = ("f32", *TYPES.values(), "p")


@functools.cache
def study():
  """The study with the records of the evidence queue."""
  return analysis.grouped(records.read(RECORDS, EVIDENCE))


def linked():
  """The study without the times of one process, whose emulated devices have no link."""
  found = study()
  return found._replace(cells=[x for x in found.cells if x.setting.link])


def short(text):
  """Returns a text without what nearly all runs have."""
  usual = r" on fashion-mnist/14|, N = 8, batch 128, 2 epochs|, batch 128| \(5 seeds\)"
  return re.sub(usual, "", text)


def judged():
  """All findings with short verdicts, by the records of the evidence queue, too."""
  found = []
  for finding, x in report.judge(linked()):
    drawn = ((word, bar._replace(label=short(bar.label))) for word, bar in x.drawn)
    numbers = tuple(map(short, x.numbers))
    found.append((finding, x._replace(numbers=numbers, drawn=tuple(drawn))))
  return found


def by_page(findings):
  """Returns the findings of each page."""
  page = lambda finding: "ours" if finding.ours else finding.paper.split()[0].lower()
  return {x: [y for y in findings if page(y[0]) == x] for x in PAPERS}


def claims_pages(findings):
  """Returns the text of each page of claims."""
  shown = {x.claim: f"pictures/{slug(x.claim)}.png" for x, y in findings if y.drawn}
  made = {}
  for name, own in by_page(findings).items():
    given = {"title": f"Claims: {PAPERS[name][0]}", "about": PAPERS[name][1]}
    given["count"] = f"{len(own)} claims: {report.counted(own)}."
    made[name] = report.filled_in("claims.md", judged=own, pictures=shown, **given)
  return made


def trainings():
  """Returns a table for each group, or for all of one way by workers, and headings."""
  found = study()
  sweeps = results.by_workers(found)
  named = {
    x.name: table(*results.ends(x))
    for x in found.groups
    if x.named("") not in sweeps and x.name != HEADLINE
  }
  named |= {x: table(*results.ends_by_workers(y)) for x, y in sweeps.items()}
  return "\n\n".join(f"### {name}\n\n{lines}" for name, lines in named.items())


@named("study, steps on links")
def steps():
  """How many times as fast steps are as float32's, a row for each cell."""
  found = linked()
  codecs = list(dict.fromkeys(x for cell in found.cells for x in cell.times))[1:]
  yield "network", "hosts", "link", "f32, ms", "communication", *codecs
  for cell in found.cells:
    x = cell.setting
    gains = (f"{cell.gain(name):.2f}" if name in cell.times else "" for name in codecs)
    step = f"{1e3 * cell.times['f32']['step']:.0f}"
    yield x.network, str(x.hosts), x.link, step, f"{cell.share:.0%}", *gains


@named("study, scaling")
def scaling():
  """How many times as fast workers are as one in float32 (Grubic 12 to 15)."""
  counts = [f"N = {workers}" for workers in (2, 4, 8)]
  yield "steps", "codec", *counts
  for shown in results.scalings(study()):
    for codec, *cells in shown.rows:
      found = dict(zip(shown.header[1:], cells, strict=True))
      if "N = 1" in found:
        yield shown.caption, codec, *(found.get(x, "") for x in counts)


@named("study, launches")
def launches():
  """How far each launch of the queue is, with hours of CPU time."""
  counts = ("done", "to do", "seeds", "timed")
  yield "launch", "done", "to do", "whole seeds", "to time", "hours", "hours to do"
  for name, row in status.rows(items.items(), records.read(EVIDENCE)).items():
    hours = (f"{row[x]:.1f}" for x in ("h done", "h to do"))
    yield name, *(str(row[x]) for x in counts), *hours


TABLES["study, trainings"] = trainings


def trained(rows, metric, **columns):
  """A table of arms: means, what they are above float32's, and how rows are written."""
  full, unit = rows["f32"]["ends"], " %" if metric == "perplexity" else ""
  yield "", metric, "above f32", *(x.replace("_", " ") for x in columns)
  for name, row in rows.items():
    ends = row["ends"]
    more = [100 * (x / full[k] - 1) if unit else x - full[k] for k, x in ends.items()]
    above = "" if name == "f32" else f"{spread(more)}{unit}"
    cells = (text.format(row[column]) for column, text in columns.items())
    yield name, f"{statistics.fmean(ends.values()):.2f}", above, *cells


def codecs(name, number):
  arm = lambda x: x | {"ends": dict(enumerate(x["accuracy_percent"]))}
  rows = {x["codec"]: arm(x) for x in load(f"{name}.json")[number]["rows"]}
  return trained(rows, "accuracy", bytes_a_step="{:,}", ratio="{:.3f}")


for name, given in NAMES["trained"].items():
  named(name, **given)(codecs)


@named("sparse words", "redsync_study", "perplexity", "language-long")
@named("sparse digits", "redsync_study", "accuracy", "digits-long")
@named("sharded optimizers", "parallel_study", "perplexity", bits="{:.2f}")
def runs(file, metric, part="", **columns):
  """The same of runs by seeds."""
  rows, found = {}, load(f"{file}.json")
  for name, row in (found[part] if part else found)["rows"].items():
    ends = {seed: x["points"][-1][metric] for seed, x in row["runs"].items()}
    rows[name] = row | {"ends": ends, "seeds": len(ends)}
  return trained(rows, metric, seeds="{}", **columns, bytes_a_step="{:,}")


def types(arms):
  """The means of types of 8 bits, with what they are above float32's in brackets."""
  cells = [f"{statistics.fmean(arms['f32']):.2f}"]
  for name in TYPES.values():
    more = spread([a - b for a, b in zip(arms[name], arms["f32"], strict=True)])
    cells.append(f"{statistics.fmean(arms[name]):.2f} ({more})")
  return [*cells, f"{stats.friedmanchisquare(*arms.values()).pvalue:.3f}"]


@named("sharded layers")
def sharded_layers():
  yield "units", "sent", *_TYPES
  sent = {"data": "gradients", "model": "activations and errors"}
  for x in load("model_parallel.json")["types"]:
    yield x["unit"], sent[x["way"]], *types(x["accuracy_percent"])


@named("sharded nets")
def sharded_nets():
  yield "net", *_TYPES
  for name, x in load("model_parallel_nets.json")["accuracy_percent"].items():
    yield name, *types(x)


def safe(group, codec):
  """Says how a codec ends in a training: nothing where no two seeds have it.

  It is safe in a training that ends as float32's: by the whole interval of 95 % over
  seeds, with at most ``EQUAL`` points less accuracy of images, or at most ``_PERCENT``
  more perplexity of a text. It loses where the whole interval is beyond that, and else
  the seeds cannot tell.
  """
  of_text = group.setting.network in TEXTS
  found = group.perplexity(codec) if of_text else group.difference(codec)
  if not found:
    return ""
  told = rule({"at_most": _PERCENT} if of_text else {"at_least": -EQUAL})(found)
  said = f"{'open: ' if told is None else ''}{found}{' %' if of_text else ''}"
  return "safe" if told else said


def pages():
  """The pages that have the tables."""
  return [*sorted(FOLDER.glob("*.md")), FOLDER.with_name("start") / "how-to-choose.md"]


def tables(found, findings):
  """Yields the tables of a study and its findings that the tree has, by headings."""
  (group,) = (x for x in found.groups if x.name == HEADLINE)
  yield f"### {HEADLINE}", table(*results.ends(group))
  groups = {group.name: group for group in found.groups}
  columns = {
    x: groups[name] for x, name in _SAFE["trainings"].items() if name in groups
  }
  rows = [
    [name, *(safe(group, codec) for group in columns.values())]
    for name, codec in _SAFE["codecs"].items()
  ]
  yield "## What does it cost in accuracy?", table(["", *columns], rows)
  papers = by_page(findings)
  rows = [
    [f"[{PAPERS[name][0]}](claims/{name}.md)", *map(str, report.counts(own))]
    for name, own in papers.items()
  ]
  yield "# What the papers say", table(["paper", *WORDS], rows)
  for name, own in papers.items():
    rows = []
    for x, y in own:
      claim = x.claim.removesuffix(".")
      # The address of its section, as GitHub makes it of a heading.
      anchor = re.sub(r"[^\w\- ]", "", claim.lower()).replace(" ", "-")
      link = f"[{claim}](claims/{name}.md#{anchor})"
      rows.append([link, x.said, "" if x.ours else x.place, y.verdict])
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
      path.write_bytes(claims.png(verdict.drawn))


def main():
  found, findings = study(), judged()
  every, counted = list(tables(found, findings)), count(findings)
  for page in pages():
    page.write_text(written(page.read_text(), every, counted))
  for name, text in claims_pages(findings).items():
    (PAGES / f"{name}.md").write_text(text)
  write_pictures(findings)
  shown = [*results.curves(found), *results.sweeps(found)]
  figures = {x.name: x.figure for x in shown}
  for picture, name in PICTURES.items():
    figures[name].savefig(FOLDER / f"study-{picture}.png", dpi=110)


if __name__ == "__main__":
  main()
