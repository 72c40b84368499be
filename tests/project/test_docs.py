"""Every page's code runs, its links lead somewhere, and its tables are the records'."""

import ast
import inspect
import itertools
import re
import socket
import sys
from unittest import mock

import jax
import pytest

from benchmarks.pages import records
from gradcomp import codecs
from gradcomp._src.checks import see
from gradcomp.codecs import Codec, PowerSGD
from gradcomp.contrib import Eden
from tests.project import architecture_page
from tests.support import laws, pages
from tests.support.installs import run

README = pages.ROOT / "README.md"
FOLDER = pages.ROOT / "docs"
MAP = FOLDER / "README.md"
MODELS = pages.ROOT / "benchmarks" / "models"
PAGES = [README, *sorted(FOLDER.rglob("*.md")), *sorted(MODELS.glob("*.md"))]
ROOMS = pages.ROOT / "gradcomp" / "_src"
HOSTS = FOLDER / "operate" / "many-hosts.md"
# How tables of the study begin, which test_study_results.py compares.
STUDIED = (
  "| codec | accuracy | points | seeds | steps to f32 - 0.2 | bytes / f32 |",
  "| paper | holds | does not | cannot tell | not tested |",
  "| claim | it says | verdict |",
)
# What a page can be in: Python is run, and nothing else is.
LANGUAGES = {"python", "pycon", "console", "text"}


def name(page):
  return str(page.relative_to(pages.ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=name)


def run_alone(page, folder, *arguments, then="pass"):
  """Returns the output of a page, run as a program where warnings are errors.

  ``then`` is code that looks at its ``names``.
  """
  names = f"names = pages.run(pages.ROOT / {str(page)!r})"
  code = f"from tests.support import pages\n{names}\n{then}\n"
  return run(
    "-W", "error", "-c", code, *arguments, cwd=folder, PYTHONPATH=str(pages.ROOT)
  )


def test_the_front_page_runs_as_a_newcomer_pastes_it(tmp_path):
  """Its loss falls, and the table that it prints is the wire's: words, and a total."""
  untrained = "names['loss_fn']({'w': 0 * names['params']['w']}, names['batch'])"
  losses = f"print('losses', {untrained}, names['loss'])"
  said = run_alone(README, tmp_path, then=losses)
  before, after = map(float, re.search(r"^losses (\S+) (\S+)$", said, re.M).groups())
  assert after < 0.1 * before
  for stage in ("all-to-all", "all-gather"):
    assert re.search(rf"^{stage} +u32 .* 116,480 ", said, re.M), said
  assert "Sends 0.127 x the bytes of a plain f32 mean." in said
  assert "# 0.127 x the bytes of f32" in README.read_text()


@pytest.mark.slow
def test_the_script_for_many_hosts_runs_on_one(tmp_path):
  """With two, and again from its checkpoint, it runs in test_many_hosts.py."""
  with socket.socket() as reserved:  # as there: nobody else gets the port, gRPC does
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("127.0.0.1", 0))
    arguments = (f"127.0.0.1:{reserved.getsockname()[1]}", "1", "0", "checkpoints")
    said = run_alone(HOSTS, tmp_path, *arguments)
  assert "step 40: loss" in said


@pytest.mark.slow
def test_the_front_page_survives_a_larger_number(tmp_path):
  """Steps that nobody waits for make XLA's threads wait for one another."""
  page = README.read_text()
  longer = tmp_path / "longer.md"
  longer.write_text(page.replace("range(20)", "range(300)"))
  assert "range(300)" in longer.read_text()
  said = run_alone(longer, tmp_path, then="print('loss', float(names['loss']))")
  assert float(re.search(r"^loss (\S+)$", said, re.M)[1]) < 0.01


QUICKSTART = FOLDER / "start" / "quickstart.md"
TELEMETRY = FOLDER / "operate" / "telemetry.md"
# Pages that compile several train steps.
TRAINING = {"low-precision", "extending", "recipes", "scanned"}
OTHERS = [x for x in PAGES if x not in (README, QUICKSTART, TELEMETRY, HOSTS)]


@pytest.fixture
def run_here(tmp_path, monkeypatch):
  """Runs a page in this process, on the eight devices of all tests."""
  monkeypatch.chdir(tmp_path)
  mesh, filtering = jax.sharding.get_mesh(), jax.config.jax_traceback_filtering
  yield pages.run
  jax.set_mesh(mesh)
  jax.config.update("jax_traceback_filtering", filtering)


@pytest.mark.parametrize(
  "page",
  [
    pytest.param(page, marks=pytest.mark.slow if page.stem in TRAINING else ())
    for page in OTHERS
  ],
  ids=name,
)
def test_the_blocks_of_a_page_run(page, run_here):
  """One after the other, in one namespace."""
  run_here(page)


def test_the_quickstart_trains_in_each_way(run_here, capsys):
  """The program of the examples, one call, and plain jit; the loss was 1 or more."""
  names = run_here(QUICKSTART)
  last = re.findall(r"^step 19: loss (\S+)$", capsys.readouterr().out, re.M)
  losses = (names["metrics"]["loss"], names["loss"], names["auto_loss"], *last)
  assert max(map(float, losses)) < 0.1
  assert last


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
  writer = entered(loggers["tensorboardX"].SummaryWriter)
  assert writer.add_scalar.call_args_list == [
    mock.call(*x, step) for x in record.items()
  ]
  entered(loggers["wandb"].init).log.assert_called_once_with(record, step=step)
  loggers["mlflow"].start_run.assert_called_once()
  loggers["mlflow"].log_metrics.assert_called_once_with(record, step=step)


def test_the_quickstart_shows_the_example():
  example = (pages.ROOT / "examples" / "quickstart.py").read_text()
  assert pages.read(QUICKSTART)[0][0].text == example


def carries(loop):
  """Whether what a call returns, several things, goes to the next call of a range."""
  if not (isinstance(loop, ast.For) and "range(" in ast.unparse(loop.iter)):
    return False
  calls = [x for x in ast.walk(loop) if isinstance(x, ast.Assign)]
  calls = [x for x in calls if isinstance(x.value, ast.Call)]
  tuples = [x.targets[0] for x in calls if isinstance(x.targets[0], ast.Tuple)]
  names = lambda trees: {
    x.id for tree in trees for x in ast.walk(tree) if isinstance(x, ast.Name)
  }
  return bool(names(tuples) & names(x.value for x in calls))


@every_page
def test_loops_wait_for_their_steps(page):
  """Emulated devices that are sent hundreds of steps ahead are stuck."""
  for block in pages.read(page)[0]:
    if block.language == "python":
      for loop in ast.walk(ast.parse(block.text)):
        if carries(loop):
          said = ast.unparse(loop)
          waits = ("block_until_ready(", "assert_allclose(", "float(")
          assert any(x in said for x in waits), f"{name(page)}:{block.line}: {said}"


@every_page
def test_every_block_says_its_language(page):
  for block in pages.read(page)[0]:
    assert block.language in LANGUAGES, f"{name(page)}:{block.line - 1}: {block}"


def anchors(page):
  """What GitHub makes of the headings of a page."""
  found = set()
  for _, line in pages.read(page)[1]:
    if heading := re.fullmatch(r"#+ +(.*)", line):
      text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading[1]).lower()
      found.add(re.sub(r"[^\w\- ]", "", text.strip()).replace(" ", "-"))
  return found


def links(page):
  """The relative targets of a page, and their lines."""
  prose = pages.read(page)[1]
  text = "\n".join(re.sub(r"`[^`]*`", "", line) for _, line in prose)
  for link in re.finditer(r"\]\(([^)\s]+)\)", text):  # a link's words may be broken
    if not re.match(r"\w+:", link[1]):
      yield link[1], prose[text.count("\n", 0, link.start())][0]


@every_page
def test_links_lead_somewhere(page):
  """To a file of this repository and, behind a #, to one of its headings."""
  wrong = []
  for target, line in links(page):
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    there = file.is_relative_to(pages.ROOT) and file.exists()
    if not there or (anchor and anchor not in anchors(file)):
      wrong.append(f"{name(page)}:{line}: {target}")
  assert not wrong


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
  assert set(sections) <= anchors(TROUBLES)
  for name, text in sections.items():
    assert re.findall(r"^See http.*$", text, re.M) == [see(name).strip()]


def test_every_page_is_on_the_map():
  """It links to every page of docs/, and the front page to it.

  The page of results links to those of benchmarks/: the site includes the map by a
  parser whose links must stay in the site.
  """
  assert "docs/README.md" in {target for target, _ in links(README)}
  assert not [target for target, _ in links(MAP) if target.startswith("..")]
  maps = MAP, FOLDER / "results" / "README.md"
  shown = {(x.parent / target).resolve() for x in maps for target, _ in links(x)} | {
    MAP
  }
  assert not set(PAGES[1:]) - shown


@every_page
def test_tables_are_those_of_the_records(page):
  """``python -m benchmarks.pages.records`` writes them; the site has more."""
  assert records.written(page.read_text()) == page.read_text()


RESULTS = [x for x in PAGES if x.parent.name == "results"]


@pytest.mark.parametrize("page", RESULTS, ids=name)
def test_a_page_of_results_is_short(page):
  """At most 3,000 words and one table of the records; findings are all of them."""
  text = page.read_text()
  assert page.stem == "findings" or len(text.split()) <= 3000
  assert sum(bool(lines) for _, lines in records.MARK.findall(text)) <= 1


@pytest.mark.parametrize("page", RESULTS, ids=name)
def test_tables_of_results_have_a_record_or_say_that_they_have_none(page):
  """Before a table stand a mark, a heading of the study, or words that say so."""
  parts = re.split(r"\n\n+", page.read_text())
  for before, part in itertools.pairwise(parts):
    if part.startswith("|"):
      header = part.partition("\n")[0]
      marked = before.startswith("<!-- records: ")
      studied = header.startswith(STUDIED)
      said = re.search(r"No record of these|Listed by hand", before)
      assert marked or studied or said, f"{name(page)}: {header}"


def test_the_table_of_codecs_has_the_papers_that_they_declare():
  """A codec of the library is one of the cases, from which its laws and hashes come."""
  kinds = {type(codec) for codec in laws.CODECS} | {Codec, PowerSGD}  # averages twice
  public = {x for x in vars(codecs).values() if inspect.isclass(x)}
  assert {x for x in public if issubclass(x, Codec)} == kinds
  text = (FOLDER / "methods" / "codecs.md").read_text()
  rows = re.findall(r"^\| `(?:gradcomp\.|compress\().*\| (.*) \|$", text, re.M)
  named = {name.lower() for row in rows for name in row.split(", ")}
  for codec in (*laws.CODECS, PowerSGD, Eden):
    for bibtex, _ in getattr(codec, "citations", ()):
      author, year = re.match(r"@\w+{([a-z]+)(\d{4})", bibtex).groups()
      assert f"{author} {year}" in named, codec


def test_every_record_is_named_by_a_page():
  """By its file, a file beside it of the same name, or the folder of its lines."""
  text = "\n".join(page.read_text() for page in PAGES)
  for file in records.RECORDS.rglob("*.*"):
    if file.suffix == ".jsonl":
      name = rf"results/(\w+/)?{file.parent.name}\b"
    else:
      name = rf"/{re.escape(file.stem)}\.(md|json|png|csv)\b"
    assert re.search(name, text), name


def test_a_record_is_summarised():
  """To what a page or a judge reads, in at most 300 kB."""
  sizes = {x.name: x.stat().st_size for x in records.RECORDS.rglob("*.json*")}
  assert not {name for name, size in sizes.items() if size > 300_000}


def test_the_tree_has_all_folders():
  """``python -m tests.project.architecture_page`` writes it."""
  page = architecture_page.PAGE.read_text()
  assert architecture_page.written(page) == page


def test_the_way_of_a_gradient_names_what_is_there():
  text = (FOLDER / "inside" / "one-update.md").read_text()
  steps = re.findall(r"^\| `(\S+\.py)`: `(\w+)` \|", text, re.M)
  assert len(steps) == len(re.findall(r"^\| `", text, re.M))
  for file, definition in steps:
    code = (ROOMS / file).read_text()
    assert re.search(rf"^ *(def|class) {definition}\b", code, re.M), (file, definition)
