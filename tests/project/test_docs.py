"""Pages run, are on the map, and have the tables of the records; lint follows links."""

import ast
import inspect
import itertools
import re
import subprocess
import sys
from unittest import mock

import jax
import pytest

from benchmarks.pages import records
from gradcomp import codecs
from gradcomp._src.checks import see
from gradcomp._src.transforms.low_rank import PowerSGD
from gradcomp.codecs import Codec
from gradcomp.contrib import Eden
from tests.project import architecture_page
from tests.support import laws, pages

README = pages.ROOT / "README.md"
FOLDER = pages.ROOT / "docs"
MAP = FOLDER / "README.md"
MODELS = sorted((pages.ROOT / "benchmarks" / "models").glob("*.md"))
PAGES = [README, *sorted(FOLDER.rglob("*.md")), *MODELS]
ROOMS = pages.ROOT / "gradcomp" / "_src"
QUICKSTART = FOLDER / "start" / "quickstart.md"
TELEMETRY = FOLDER / "operate" / "telemetry.md"
HOSTS = FOLDER / "operate" / "many-hosts.md"
# How tables of the study begin, which benchmarks/study/test_pages.py compares.
STUDIED = (
  "| codec | accuracy | points | seeds | steps to f32 - 0.2 | bytes / f32 |",
  "| paper | holds | does not | not seen here | cannot tell | not tested |",
  "| claim | it says | its setting? | verdict |",
)

name = lambda page: str(page.relative_to(pages.ROOT))
# The files that differ from the last commit but one, as far as Git knows them.
DIFFER = f"git -C '{pages.ROOT}' diff --name-only HEAD^ 2>&1"
CHANGED = {*subprocess.getoutput(DIFFER).split()}
CHANGED_ROOMS = {(*file.split("/"), "", "")[2] for file in CHANGED if "_src/" in file}


def slow(page):
  """The mark of a page that runs in its turn, and where it or its imports changed."""
  code = "".join(block.text for block in pages.read(page)[0])
  named = " ".join(re.findall(r"\bgradcomp(?:\.| import )([\w, ]+)", code))
  rooms = CHANGED_ROOMS.intersection(re.findall(r"\w+", named))
  return pytest.mark.slow(now=name(page) in CHANGED or bool(rooms))


@pytest.fixture
def run_here(tmp_path, monkeypatch):
  """Runs a page in this process, on the eight devices of all tests."""
  monkeypatch.chdir(tmp_path)
  mesh, filtering = jax.sharding.get_mesh(), jax.config.jax_traceback_filtering
  yield pages.run
  jax.set_mesh(mesh)
  jax.config.update("jax_traceback_filtering", filtering)


# Users begin with the first; others have tests of their own, as in test_many_hosts.py.
FIRST = {"how-to-choose", "extending"}
OTHERS = [
  pytest.param(page, marks=() if page.stem in FIRST else slow(page), id=name(page))
  for page in PAGES
  if page not in (README, QUICKSTART, TELEMETRY, HOSTS)
]


@pytest.mark.parametrize("page", OTHERS)
def test_the_blocks_of_a_page_run_in_one_namespace(page, run_here):
  run_here(page)


def test_the_quickstart_trains_in_each_way(run_here, capsys):
  """The program of the examples, one call, and plain jit; the loss was 1 or more."""
  names = run_here(QUICKSTART)
  last = re.findall(r"^step 19: loss (\S+)$", capsys.readouterr().out, re.M)
  losses = (names["metrics"]["loss"], names["loss"], names["auto_loss"], *last)
  assert last and max(map(float, losses)) < 0.1
  example = (pages.ROOT / "examples" / "quickstart.py").read_text()
  assert pages.read(QUICKSTART)[0][0].text == example


@slow(TELEMETRY)
def test_each_logger_gets_the_scalars_of_the_step(run_here, monkeypatch):
  """By the call of its package, in whose place something records the calls."""
  pytest.importorskip("matplotlib")
  loggers = {name: mock.MagicMock() for name in ("tensorboardX", "wandb", "mlflow")}
  for module, logger in loggers.items():
    monkeypatch.setitem(sys.modules, module, logger)
  names = run_here(TELEMETRY)
  record, step = names["record"], names["i"]
  assert all(type(value) is float for value in record.values())
  entered = lambda context: context.return_value.__enter__.return_value
  calls = entered(loggers["tensorboardX"].SummaryWriter).add_scalar.call_args_list
  assert calls == [mock.call(*x, step) for x in record.items()]
  entered(loggers["wandb"].init).log.assert_called_once_with(record, step=step)
  loggers["mlflow"].start_run.assert_called_once()
  loggers["mlflow"].log_metrics.assert_called_once_with(record, step=step)


def test_loops_wait_for_their_steps_and_blocks_fit_and_say_their_language():
  """Emulated devices that are sent hundreds of steps ahead are stuck."""
  waits = ("block_until_ready(", "assert_allclose(", "float(")
  for page in PAGES:
    for block in pages.read(page)[0]:
      where = f"{name(page)}:{block.line}"
      assert block.language in {"python", "pycon", "console", "text"}, where
      lines = [x for x in block.text.splitlines() if not x.startswith("See http")]
      assert max(map(len, lines)) <= 88, f"{where}: {max(lines, key=len)}"
      if block.language == "python":
        for loop in ast.walk(ast.parse(block.text)):
          said = ast.unparse(loop) if isinstance(loop, ast.For) else ""
          if "range(" in said and re.search(r"\w, .* = \w.*\(", said):  # steps
            assert any(x in said for x in waits), f"{where}: {said}"


links = lambda page: re.findall(r"\]\((?!\w+:)([^)\s#]+)[^)\s]*\)", page.read_text())
TROUBLES = FOLDER / "operate" / "troubleshooting.md"
SECTION = re.compile(r"^### (.*?)$(.*?)(?=^##)", re.M | re.S)


def test_errors_name_their_sections_of_the_page():
  """One a section. The page shows each with its address, and raises it."""
  errors = TROUBLES.read_text().partition("## Messages of JAX")[0] + "##"
  tops = (ROOMS, pages.ROOT / "kernels")
  files = {file.resolve() for top in tops for file in top.rglob("*.py")}
  code = "\n".join(file.read_text() for file in files)
  named = re.findall(r"""\bsee\(['"]([\w-]+)['"]\)""", code)
  identity = lambda x: re.sub(r"[^a-z0-9]+", "-", x.lower()).strip("-")  # docutils'
  sections = {identity(name): text for name, text in SECTION.findall(errors)}
  assert sorted(named) == sorted(sections) and len(named) == 12
  for name, text in sections.items():
    assert re.findall(r"^See http.*$", text, re.M) == [see(name).strip()]


def test_every_page_is_on_the_map():
  """Its links stay in the site; the page of results links to those of benchmarks/."""
  assert "docs/README.md" in links(README)
  assert not [target for target in links(MAP) if target.startswith("..")]
  maps = MAP, FOLDER / "results" / "README.md"
  shown = {(x.parent / target).resolve() for x in maps for target in links(x)}
  assert not set(PAGES[1:]) - {*shown, MAP}


def test_tables_are_those_of_the_records():
  """``python -m benchmarks.pages.records`` writes those that a mark names."""
  for page in PAGES:
    text = page.read_text()
    assert records.written(text) == text, name(page)
    for before, part in itertools.pairwise(re.split(r"\n\n+", text)):
      if page.parent.name == "results" and part.startswith("|"):
        header = part.partition("\n")[0]
        said = re.search(r"^<!-- records: |No record of these|Listed by hand", before)
        assert said or header.startswith(STUDIED), f"{name(page)}: {header}"


def test_every_record_is_named_by_a_page():
  """By its file, one beside it, or the folder of its lines; it has 300 kB at most."""
  text = "\n".join(page.read_text() for page in PAGES)
  for file in records.RECORDS.rglob("*.*"):
    lines = file.suffix == ".jsonl"
    named = rf"/{re.escape(file.stem)}\.(md|json|png|csv)\b"
    named = rf"results/(\w+/)?{file.parent.name}\b" if lines else named
    assert re.search(named, text), file
    assert ".json" not in file.suffix or file.stat().st_size <= 300_000, file


def test_the_table_of_codecs_has_the_papers_that_they_declare():
  """A codec of the library is one of the cases, from which its laws and hashes come."""
  kinds = {type(codec) for codec in laws.CODECS} | {Codec}
  public = {x for x in vars(codecs).values() if inspect.isclass(x)}
  assert {x for x in public if issubclass(x, Codec)} == kinds
  text = (FOLDER / "methods" / "codecs.md").read_text()
  rows = re.findall(r"^\| `(?:gradcomp\.|compress\().*\| (.*) \|$", text, re.M)
  named = {name.lower() for row in rows for name in row.split(", ")}
  for codec in (*laws.CODECS, PowerSGD, Eden):
    for paper in getattr(codec, "papers", ()):
      author, year = re.match(r"([a-z]+)(\d{4})", paper).groups()
      assert f"{author} {year}" in named, codec


def test_the_tree_and_the_way_of_a_gradient_name_what_is_there():
  """``python -m tests.project.architecture_page`` writes the tree."""
  page = architecture_page.PAGE.read_text()
  assert architecture_page.written(page) == page
  text = (FOLDER / "inside" / "one-update.md").read_text()
  steps = re.findall(r"^\| `(\S+\.py)`: `(\w+)` \|", text, re.M)
  assert len(steps) == len(re.findall(r"^\| `", text, re.M))
  for file, definition in steps:
    code = (ROOMS / file).read_text()
    assert re.search(rf"^ *(def|class) {definition}\b", code, re.M), (file, definition)
