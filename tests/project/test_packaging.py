"""The wheel holds the whole library, and modules import no more than they may."""

import ast
import email
import functools
import importlib
import inspect
import re
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import gradcomp
from gradcomp._src.kernels.quantize import qsgd
from tests.support import installs
from tests.support.pages import ROOT

# Records are many, and no folder of code. An archive of the source has no kernels/.
NAMES = ("gradcomp", "kernels", "benchmarks", "tests", "examples", "docs")
FOLDERS = [ROOT / name for name in NAMES if (ROOT / name).exists()]

DEFINITION = ast.FunctionDef | ast.ClassDef

COLLECTIVES = (
  *("all_gather", "all_to_all", "pbroadcast", "pmax", "pmean", "pmin", "ppermute"),
  *("pshuffle", "psum", "pswapaxes", "ragged_all_to_all", "unreduced_psum"),
)


@functools.cache
def sources():
  """The files of the library, by the name that each has in the wheel."""
  folders = {"gradcomp": ROOT / "gradcomp", "gradcomp/_src/kernels": ROOT / "kernels"}
  return {
    f"{name}/{path.relative_to(folder).as_posix()}": path
    for name, folder in folders.items()
    for path in folder.rglob("*.py")  # follows no link
  }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
  return installs.wheel(ROOT, tmp_path_factory.mktemp("wheels"))


def test_the_wheel_holds_every_file(wheel):
  names = set(zipfile.ZipFile(wheel).namelist())
  info = {name for name in names if name.split("/")[0].endswith(".dist-info")}
  data = {"gradcomp/py.typed"}
  data |= {f"gradcomp/_src/cost/planner/{name}.json" for name in ("accuracy", "speeds")}
  assert names - info == {*sources(), *data}
  assert any(name.endswith("/LICENSE") for name in info)


def test_the_wheel_needs_three_distributions(wheel):
  archive = zipfile.ZipFile(wheel)
  (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
  required = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist")
  always = [line for line in required if "extra ==" not in line]
  names = sorted(re.match(r"[\w.-]+", line).group() for line in always)
  assert names == ["jax", "numpy", "optax"]


def test_the_conda_recipe_needs_what_the_package_needs():
  recipe = yaml.safe_load((ROOT / ".github" / "conda" / "recipe.yaml").read_text())
  declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
  project, build = declared["project"], declared["build-system"]
  python = f">={recipe['context']['python_min']}"
  assert python == project["requires-python"]
  needed = lambda lines: {Requirement(x) for x in lines if not x.startswith("python ")}
  assert needed(recipe["requirements"]["run"]) == needed(project["dependencies"])
  built = needed(recipe["requirements"]["host"]) - {Requirement("pip")}
  assert built == needed(build["requires"])


def test_the_wheel_imports_alone(wheel, tmp_path):
  """Every module, where nothing of the extras is installed and JAX has not started."""
  target, elsewhere = tmp_path / "target", tmp_path / "elsewhere"
  zipfile.ZipFile(wheel).extractall(target)
  elsewhere.mkdir()
  code = f"""
import importlib, pkgutil, sys

class Absent:
  names = {{"chex", "flax", "matplotlib", "sklearn", "tensorflow_datasets", "tqdm"}}
  def find_spec(self, name, path=None, target=None):
    if name.partition(".")[0] in self.names:
      raise ModuleNotFoundError(f"{{name}} is not installed", name=name)

sys.meta_path.insert(0, Absent())
import gradcomp
from gradcomp._src.kernels.quantize import qsgd
assert "gradcomp.testing" not in sys.modules
modules = [info.name for info in pkgutil.walk_packages(gradcomp.__path__, "gradcomp.")]
assert "gradcomp._src.kernels.quantize.qsgd" in modules
for name in modules:
  assert importlib.import_module(name).__file__.startswith({str(target)!r}), name

import jax
jax.config.update("jax_num_cpu_devices", 3)  # an error once a back-end is there
assert jax.device_count() == 3
"""
  installs.run("-W", "error", "-c", code, cwd=elsewhere, PYTHONPATH=str(target))


def test_the_tests_run_on_this_tree():
  """An environment that came with a copied tree would test the tree it was made for."""
  for module in (gradcomp, qsgd):
    assert Path(module.__file__).is_relative_to(ROOT)


def test_no_file_is_imported_twice():
  """Neither by the name of kernels/ nor by that of the link to it."""
  modules = {id(module): module for module in sys.modules.values()}.values()
  files = [
    Path(getattr(module, "__file__", None) or "").resolve() for module in modules
  ]
  ours = [file for file in files if file in sources().values()]
  assert len(ours) == len(set(ours))
  assert "kernels" not in sys.modules


def imported_modules(path):
  """The full names of the modules that a file imports, and of all it imports from them.

  What is imported from a package may be a module.
  """
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      module = "." * node.level + (node.module or "")
      yield module
      yield from (f"{module}.{alias.name}" for alias in node.names)


def test_no_test_module_is_imported():
  """What several test modules need is in support files, which have no tests."""
  files = sorted((ROOT / "tests").rglob("*.py"))
  imported = {name for path in files for name in imported_modules(path)}
  assert {"tests.support", "tests.support.assertions"} <= imported
  assert not [name for name in imported if name.split(".")[-1].startswith("test_")]
  support = [path for path in files if not path.stem.startswith("test_")]
  assert not [path.name for path in support if "def test_" in path.read_text()]


def jax_names(path):
  """The full names that a file imports from JAX or reads off what it imported."""
  tree = ast.parse(path.read_text())
  imported = {}
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom):
      for alias in node.names:
        imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    elif isinstance(node, ast.Import):
      for alias in node.names:
        first = alias.name.partition(".")[0]
        imported[alias.asname or first] = alias.name if alias.asname else first
        imported[alias.name] = alias.name
  names = set(imported.values())
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute):
      first, _, rest = ast.unparse(node).partition(".")
      names.add(f"{imported.get(first, first)}.{rest}")
  return {name for name in names if name.startswith("jax.")}


def test_only_the_exchange_calls_collectives():
  callers = {
    file
    for file, path in sources().items()
    for name in jax_names(path)
    if name.startswith("jax.lax.") and name.split(".")[-1].startswith(COLLECTIVES)
  }
  assert callers == {"gradcomp/_src/exchange/collectives.py"}


# What asks for the kind of a codec, or compares the name of an exchange.
KIND = re.compile(
  r"isinstance\((self\.)?\w*codec,|(get|has)attr\(\w*codec, \""
  r"|codec [!=]= \w+\(|\.(fitted|by_column|reuses|alternates)\b"
)
NAME = re.compile(r"(exchange|schedule)(\.name)? [!=]= |\.name [!=]= \"")


def test_no_code_asks_for_the_kind_of_a_codec():
  """A codec says what it needs and remembers, and its sum how payloads add up."""
  found = {
    file: len(KIND.findall(path.read_text()))
    for file, path in sources().items()
    if not file.startswith("gradcomp/_src/kernels/")
  }
  asking = {file: count for file, count in found.items() if count}
  assert not asking


def test_no_exchange_is_known_by_its_name():
  """Short forms become objects in one place, which looks them up."""
  named = [
    file
    for file, path in sources().items()
    if file.startswith("gradcomp/") and NAME.search(path.read_text())
  ]
  assert not named


def rooms_imported(path):
  """The rooms that a file imports from, by their names."""
  for name in imported_modules(path):
    first, src, room, *_ = (*name.split("."), "", "", "")
    if (first, src) == ("gradcomp", "_src") and room:
      yield room


# From the lowest to the highest: a room imports from those before it alone.
ROOMS = (
  *(
    "public",
    "version",
    "checks",
    "bibliography",
    "mesh",
    "kernels",
    "floats",
    "codecs",
    "exchange",
  ),
  *("core", "report", "checkpoint", "telemetry", "transforms", "local_steps"),
  *("optimizers", "parallel", "training", "cost", "testing"),
)


def test_rooms_import_one_way():
  """So each can be read without those above it."""
  for file, path in sources().items():
    if file.startswith("gradcomp/_src/") and file != "gradcomp/_src/__init__.py":
      room = file.removesuffix(".py").split("/")[2]
      found = set(rooms_imported(path))
      above = found - set(ROOMS[: ROOMS.index(room) + 1])
      assert not above, f"{file} imports from {above}"


def test_public_modules_hold_no_code_of_their_own():
  """They name what is public, and rooms import none of them."""
  for file, path in sources().items():
    if file.startswith("gradcomp/_src/"):
      modules = set(imported_modules(path))
      ours = {name for name in modules if name.split(".")[0] == "gradcomp"}
      assert all(name.startswith("gradcomp._src") for name in ours), file
    elif not file.startswith(("gradcomp/__main__.py", "gradcomp/contrib/")):
      body = ast.parse(path.read_text()).body
      names = {node.name for node in body if isinstance(node, DEFINITION)}
      assert names <= {"__getattr__", "__dir__"}, file


def entries(folder):
  return [
    path.name
    for path in folder.iterdir()
    if path.name != "__pycache__" and not path.name.startswith(".")
  ]


def test_folders_are_read_at_a_glance():
  for folder in (ROOT / "gradcomp", ROOT / "gradcomp/_src"):
    assert len(entries(folder)) <= 21, folder
  for top in FOLDERS:
    folders = (top, *(path for path in top.rglob("*") if path.is_dir()))
    written = {"results", "_build", "generated"}  # by programs
    for folder in (path for path in folders if not written.intersection(path.parts)):
      assert len(entries(folder)) <= 25, (folder, len(entries(folder)))


def test_only_kernels_import_pallas():
  users = {
    file
    for file, path in sources().items()
    if any("pallas" in name for name in jax_names(path))
  }
  assert all(user.startswith("gradcomp/_src/kernels/") for user in users), users


def test_private_names_of_jax_stand_in_files_of_their_own():
  """Each of which has the reason, and goes on where the name has gone."""
  private = lambda path: any(name.startswith("jax._src") for name in jax_names(path))
  users = {file for file, path in sources().items() if private(path)}
  own = "mesh/jit_trees.py", "mesh/run_store.py", "kernels/gpu/backends.py"
  assert users == {f"gradcomp/_src/{file}" for file in own}


def test_public_names_have_public_homes():
  """Pickles and pages name where users find a name, and not where its file lies."""
  for module in (gradcomp, *vars(gradcomp).values()):
    for name in getattr(module, "__all__", ()):
      value = getattr(module, name)
      if inspect.isclass(value) or inspect.isfunction(value):
        home = importlib.import_module(value.__module__)
        assert getattr(home, name) is value
        assert "_src" not in value.__module__ or module is gradcomp.cost, name


@pytest.mark.parametrize(
  "line",
  [
    "from jax import lax\nlax.psum(x, 'i')",
    "import jax\ny = jax.lax.psum(x, 'i').sum()",
    "import jax.lax as l\nl.psum(x, 'i')",
    "from jax.lax import psum as add",
    "import jax.numpy as jnp, jax.lax\njax.lax.psum",
  ],
)
def test_the_check_sees_every_spelling(line, tmp_path):
  path = tmp_path / "module.py"
  path.write_text(line)
  assert "jax.lax.psum" in jax_names(path)
