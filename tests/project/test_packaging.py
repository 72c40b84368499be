"""The wheel holds the whole library, and modules import no more than they may."""

import ast
import functools
import importlib.metadata
import inspect
import re
import shlex
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import gradcomp
from gradcomp._src.kernels import quantize
from tests.support import installs, pages
from tests.support.pages import ROOT

# Records are many, and no folder of code. An archive of the source has no kernels/.
NAMES = ("gradcomp", "kernels", "benchmarks", "tests", "examples", "docs")
FOLDERS = [ROOT / name for name in NAMES if (ROOT / name).exists()]

# The files of the library, by the name that each has in the wheel.
SOURCES = {
  f"{name}/{path.relative_to(folder).as_posix()}": path
  for name, folder in (
    ("gradcomp", ROOT / "gradcomp"),
    ("gradcomp/_src/kernels", ROOT / "kernels"),
  )
  for path in folder.rglob("*.py")  # follows no link
}
SRC = "gradcomp/_src/"
BLOCKS = {block.language: block.text for block in pages.read(ROOT / "README.md")[0]}
LOSSES = 'print("losses", loss_fn({"w": 0 * params["w"]}, batch), loss)'  # first, last


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
  return zipfile.ZipFile(installs.wheel(ROOT, tmp_path_factory.mktemp("wheels")))


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
  folder = tmp_path_factory.mktemp("site")
  wheel.extractall(folder)
  return str(folder)


def test_the_front_page_runs_as_a_newcomer_pastes_it(site):
  place = {"cwd": ROOT, "PYTHONPATH": site}
  said = installs.run("-W", "error", "-c", BLOCKS["python"] + LOSSES, **place)
  before, after = map(float, re.search(r"^losses (\S+) (\S+)$", said, re.M).groups())
  assert after < 0.1 * before
  sent = re.findall(r"^(all-to-all|all-gather) +u32 .* 116,480 ", said, re.M)
  assert len(sent) == 2, said
  assert "Sends 0.127 x the bytes of a plain f32 mean." in said
  assert "# 0.127 x f32" in BLOCKS["python"]
  line = re.search(r"^python (-m gradcomp plan .*)$", BLOCKS["console"], re.M)[1]
  assert "QSGD-4" in installs.run(*shlex.split(line, comments=True), **place)


def test_the_wheel_holds_every_file_and_is_small(wheel):
  assert Path(wheel.filename).stat().st_size <= 604 << 10  # may fall, to 450 KiB
  names = set(wheel.namelist())
  info = {name for name in names if name.split("/")[0].endswith(".dist-info")}
  data = [f"{SRC}cost/planner/{name}.json" for name in ("accuracy", "speeds")]
  data += [f"{SRC}report/papers.bib", f"{SRC}kernels/gpu/table.json"]
  assert names - info == {*SOURCES, *data, "gradcomp/py.typed"}
  assert any(name.endswith("/LICENSE") for name in info)


def test_the_wheel_and_the_conda_recipe_need_three_distributions(site):
  (found,) = importlib.metadata.distributions(path=[site])
  always = [Requirement(line) for line in found.requires if "extra ==" not in line]
  assert sorted(x.name for x in always) == ["jax", "numpy", "optax"]
  recipe = yaml.safe_load((ROOT / ".github" / "conda" / "recipe.yaml").read_text())
  declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
  python = f">={recipe['context']['python_min']}"
  assert python == declared["project"]["requires-python"]
  needed = lambda lines: {Requirement(x) for x in lines if not x.startswith("python ")}
  assert needed(recipe["requirements"]["run"]) == set(always)
  built = needed(recipe["requirements"]["host"]) - {Requirement("pip")}
  assert built == needed(declared["build-system"]["requires"])


def test_the_wheel_imports_alone(site, tmp_path):
  """Where nothing of the extras is installed and JAX has not started."""
  code = f"""
import importlib, pkgutil, sys

class Absent:
  names = {{"chex", "flax", "matplotlib", "sklearn", "tensorflow_datasets", "tqdm"}}
  def find_spec(self, name, path=None, target=None):
    if name.partition(".")[0] in self.names:
      raise ModuleNotFoundError(f"{{name}} is not installed", name=name)

sys.meta_path.insert(0, Absent())
import gradcomp
from gradcomp._src.kernels import quantize
assert "gradcomp.testing" not in sys.modules
gradcomp.testing.check_codec  # which comes late
modules = [info.name for info in pkgutil.walk_packages(gradcomp.__path__, "gradcomp.")]
assert "gradcomp._src.kernels.quantize" in modules
for name in modules:
  assert importlib.import_module(name).__file__.startswith({site!r}), name

import jax
jax.config.update("jax_num_cpu_devices", 3)  # an error once a back-end is there
assert jax.device_count() == 3
"""
  installs.run("-W", "error", "-c", code, cwd=tmp_path, PYTHONPATH=site)


def test_the_tests_run_on_this_tree_and_import_no_file_twice():
  for module in (gradcomp, quantize):
    assert Path(module.__file__).is_relative_to(ROOT)
  modules = {id(module): module for module in sys.modules.values()}.values()
  files = [Path(getattr(x, "__file__", None) or "").resolve() for x in modules]
  ours = [file for file in files if file in SOURCES.values()]
  assert len(ours) == len(set(ours))
  assert "kernels" not in sys.modules


@functools.cache
def imports(path):
  """What a file imports: its own name of each module or part of one, and the full."""
  found = []
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      found += [(x.asname or x.name, x.name) for x in node.names]
    elif isinstance(node, ast.ImportFrom):
      module = "." * node.level + (node.module or "")
      found.append((module, module))
      found += [(x.asname or x.name, f"{module}.{x.name}") for x in node.names]
  return found


@functools.cache
def jax_names(path):
  """The full names that a file imports from JAX or reads off what it imported."""
  full = dict(imports(path))
  names = {name for _, name in imports(path)}
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Attribute):
      first, _, rest = ast.unparse(node).partition(".")
      names.add(f"{full.get(first, first)}.{rest}")
  return {name for name in names if name.startswith("jax.")}


def test_what_few_files_may_use_of_jax():
  """Collectives, Pallas, and private names, which may go, have files of their own."""
  names = "all_gather|all_to_all|pbroadcast|pmax|pmean|pmin|ppermute|pshuffle|psum"
  names += "|pswapaxes|ragged_all_to_all|unreduced_psum"
  texts = {x.removeprefix(SRC): "\n".join(jax_names(y)) for x, y in SOURCES.items()}
  using = lambda name: {x for x, y in texts.items() if re.search(f"^{name}$", y, re.M)}
  assert using(rf"jax\.lax\.(.*\.)?({names})[^.]*") == {"exchange/collectives.py"}
  assert all(x.startswith("kernels/") for x in using(".*pallas.*"))
  assert using(r"jax\._src.*") == {"mesh/trees.py", "mesh/agreement.py"}


def test_no_test_module_is_imported():
  """What several test modules need is in support files, which have no tests."""
  files = sorted((ROOT / "tests").rglob("*.py"))
  imported = {name for path in files for _, name in imports(path)}
  assert {"tests.support", "tests.support.assertions"} <= imported
  assert not [name for name in imported if name.split(".")[-1].startswith("test_")]
  support = [path for path in files if not path.stem.startswith("test_")]
  assert not [path.name for path in support if "def test_" in path.read_text()]


# What asks for the kind of a codec, or compares the name of an exchange.
KIND = re.compile(
  r"isinstance\((self\.)?\w*codec,|(get|has)attr\(\w*codec, \""
  r"|codec [!=]= \w+\(|\.(fitted|by_column|reuses|alternates)\b"
)
NAME = re.compile(r"(exchange|schedule)(\.name)? [!=]= |\.name [!=]= \"")


def test_no_code_asks_for_the_kind_of_a_codec_or_the_name_of_an_exchange():
  texts = {file: path.read_text() for file, path in SOURCES.items()}
  kernels = f"{SRC}kernels/"
  assert not [x for x in texts if KIND.search(texts[x]) and not x.startswith(kernels)]
  assert not [file for file, text in texts.items() if NAME.search(text)]


# From the lowest to the highest: a room imports from those before it alone.
ROOMS = (
  *("public", "version", "checks", "mesh", "kernels", "floats"),
  *("codecs", "exchange", "core", "report", "checkpoint", "telemetry", "transforms"),
  *("local_steps", "optimizers", "parallel", "training", "cost", "testing"),
)


def test_rooms_import_one_way():
  for file, path in SOURCES.items():
    if file.startswith(SRC) and file != f"{SRC}__init__.py":
      room = file.removesuffix(".py").split("/")[2]
      parts = [(*name.split("."), "", "") for _, name in imports(path)]
      found = {x[2] for x in parts if x[:2] == ("gradcomp", "_src") and x[2]}
      above = found - set(ROOMS[: ROOMS.index(room) + 1])
      assert not above, f"{file} imports from {above}"
      assert "TYPE_CHECKING" not in path.read_text(), f"{file} imports in a circle"


def test_public_modules_hold_no_code_of_their_own():
  for file, path in SOURCES.items():
    if file.startswith(SRC):
      ours = {x for _, x in imports(path) if x.split(".")[0] == "gradcomp"}
      assert all(name.startswith("gradcomp._src") for name in ours), file
    elif not file.startswith(("gradcomp/__main__.py", "gradcomp/contrib/")):
      names = re.findall(r"^(?:def|class) (\w+)", path.read_text(), re.M)
      assert {*names} <= {"__getattr__", "__dir__"}, file


def test_folders_are_read_at_a_glance():
  written = {"results", "_build", "generated"}  # by programs
  for top in FOLDERS:
    for folder in (top, *(path for path in top.rglob("*") if path.is_dir())):
      entries = [x for x in folder.iterdir() if not x.name.startswith((".", "__p"))]
      most = 21 if folder in (ROOT / "gradcomp", ROOT / "gradcomp/_src") else 26
      assert len(entries) <= most or written.intersection(folder.parts), folder


def test_public_names_have_public_homes():
  """Pickles and pages name where users find a name, and not where its file lies."""
  for module in (gradcomp, *vars(gradcomp).values()):
    for name in getattr(module, "__all__", ()):
      value = getattr(module, name)
      if inspect.isclass(value) or inspect.isfunction(value):
        assert getattr(importlib.import_module(value.__module__), name) is value
        assert "_src" not in value.__module__, name
