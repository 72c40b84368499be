"""Every page's code runs, its links lead somewhere, and the front page is short."""

import ast
import csv
import json
import re
import socket
import statistics

import jax
import pytest

from tests.support import pages
from tests.support.installs import run

README = pages.ROOT / "README.md"
FOLDER = pages.ROOT / "docs"
PAGES = [README, *sorted(FOLDER.glob("*.md"))]
RESULTS = pages.ROOT / "benchmarks" / "results"
# What a page can be in: Python is run, and nothing else is.
LANGUAGES = {"python", "pycon", "console", "text"}
LONGEST_LINE, LONGEST_README = 120, 120


def name(page):
  return str(page.relative_to(pages.ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=name)


def run_alone(page, folder, *arguments, then="pass"):
  """What a page prints, as a program where warnings are errors; ``then`` looks at its
  ``names``."""
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


def test_the_front_page_trains_in_ten_lines():
  """Six lines for devices and data, and ten behind an empty one."""
  (block,) = [x for x in pages.read(README)[0] if x.language == "python"]
  assert [part.count("\n") for part in block.text.split("\n\n")] == [5, 10]
  assert "0.127 x the bytes of f32" in block.text  # as the test above reads it


@pytest.mark.slow
def test_the_script_for_many_hosts_runs_on_one(tmp_path):
  """With two, and again from its checkpoint, it runs in test_many_hosts.py."""
  with socket.socket() as reserved:  # as there: nobody else gets the port, gRPC does
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("127.0.0.1", 0))
    arguments = (f"127.0.0.1:{reserved.getsockname()[1]}", "1", "0", "checkpoints")
    said = run_alone(FOLDER / "many-hosts.md", tmp_path, *arguments)
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


QUICKSTART = FOLDER / "quickstart.md"
# Pages that compile several train steps.
TRAINING = {"low-precision", "extending", "recipes"}
OTHERS = [x for x in PAGES if x not in (README, QUICKSTART, FOLDER / "many-hosts.md")]


@pytest.fixture
def run_here(tmp_path, monkeypatch):
  """Runs a page in this process, on the eight devices of all tests."""
  monkeypatch.chdir(tmp_path)
  mesh = jax.sharding.get_mesh()
  yield pages.run
  jax.set_mesh(mesh)


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


def test_the_quickstart_trains_in_one_call_and_in_plain_jit(run_here):
  """The loss was 1."""
  names = run_here(QUICKSTART)
  assert max(names["metrics"]["loss"], names["loss"]) < 0.1


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


@every_page
def test_lines_are_short(page):
  """Outside of code and of tables, whose rows cannot be broken."""
  assert not [
    f"{name(page)}:{number}: {len(line)} characters"
    for number, line in pages.read(page)[1]
    if len(line) > LONGEST_LINE and not line.startswith("|")
  ]


def test_the_front_page_is_short():
  assert len(README.read_text().splitlines()) <= LONGEST_README


def anchors(page):
  """What GitHub makes of the headings of a page."""
  found = set()
  for _, line in pages.read(page)[1]:
    if heading := re.fullmatch(r"#+ +(.*)", line):
      text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading[1]).lower()
      found.add(re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-"))
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


def test_every_page_is_on_the_map():
  """The front page links to every page."""
  targets = {target for target, _ in links(README)}
  assert not {name(page) for page in PAGES[1:]} - targets


def test_the_table_of_digits_is_what_was_measured():
  with open(RESULTS / "digits_lenet_3_seeds.csv") as file:
    rows = [row for row in csv.DictReader(file) if row["step"] == "200"]
  text = (FOLDER / "results.md").read_text()
  for label, codec in (
    ("f32", "f32"),
    ("bfloat16", "bf16"),
    ("QSGD, 8 bits", "qsgd-8"),
    ("QSGD, 4 bits", "qsgd-4"),
    ("QSGD, 2 bits", "qsgd-2"),
  ):
    values = [100 * float(x["test_accuracy"]) for x in rows if x["codec"] == codec]
    mean, deviation = statistics.mean(values), statistics.stdev(values)
    assert f"| {label} | {mean:.2f} ± {deviation:.2f} % |" in text


def test_the_table_of_noise_is_what_was_measured():
  """The page has one row for each codec and kind of gradients, and no others."""
  found = json.loads((RESULTS / "noise.json").read_text())["ratios"]
  text = (FOLDER / "results.md").read_text()
  rows = re.findall(r"^\| (?:independent|nearly agree) \|.*", text, re.M)
  assert rows == [
    f"| {kind.removeprefix('are ')} | {codec} | "
    + " | ".join(f"{a:.2f} / {b:.2f}" for a, b in zip(*pair, strict=True))
    + " |"
    for kind, of in found.items()
    for codec, *pair in zip(
      of["gradcomp"], of["gradcomp"].values(), of["Suresh"].values(), strict=True
    )
  ]


def test_the_table_of_cut_optimizers_is_what_was_measured():
  """The page has the rows that the study wrote, and no others."""
  rows = re.findall(r"^\| .*", (RESULTS / "parallel_study.md").read_text(), re.M)
  assert "\n".join(rows) in (FOLDER / "results.md").read_text()


@pytest.mark.parametrize("page", [README, FOLDER / "results.md"], ids=name)
def test_the_picture_is_of_these_times(page, tmp_path, monkeypatch):
  """Its words for those who do not see it hold the times that the script draws."""
  monkeypatch.syspath_prepend(pages.ROOT / "benchmarks")
  import front_picture

  times = front_picture.milliseconds()
  (words,) = re.findall(r"!\[(.*)\]\(.*speed\.png\)", page.read_text())
  numbers = re.findall(r"(?:f32|bf16|bits) (\d+)", words)
  assert numbers == [f"{time:.0f}" for time in times.values()]
  front_picture.draw(times, tmp_path / "speed.png")
  assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
