"""Names that users may rely on: few flat ones, others one namespace down, explained."""

import builtins
import collections
import dataclasses
import inspect
import pathlib
import re

import gradcomp
import gradcomp.testing

FLAT = """
__version__ aps blocktop citation compress defer_reduction dense eight_bit explain
global_norm init_state loss_scaling_cast make_train_step mean_over natural onebit_sgd
overlap_report policy powersgd qsgd randomk redsync reshard_state skip_nonfinite
state_specs terngrad topk value_and_grad wire_report CompressOptions ErrorFeedback
MomentumFeedback PerWorker TrainOptions TrainStep
"""
NAMESPACES = """
checkpoint codecs contrib cost exchange floats kernels local optimizers parallel state
telemetry testing wrappers
"""
SPACES = [gradcomp, *(getattr(gradcomp, name) for name in NAMESPACES.split())]
PUBLIC = {
  f"{space.__name__}.{name}": value
  for space in (*SPACES, gradcomp.testing.modes)
  for name in getattr(space, "__all__", None) or vars(space)
  if not name.startswith("_")
  and (inspect.isclass(value := getattr(space, name)) or inspect.isroutine(value))
  if hasattr(space, "__all__") or value.__module__ == space.__name__
}


def test_there_are_these_names_and_nothing_else_looks_public():
  assert len(FLAT.split()) <= 35
  assert sorted(gradcomp.__all__) == sorted((FLAT + NAMESPACES).split())
  for space in SPACES:
    names = {name for name in dir(space) if not name.startswith("_")}
    assert names <= set(getattr(space, "__all__", ())), space.__name__


def test_a_name_is_in_one_place_and_hides_no_builtin():
  counted = collections.Counter(map(id, PUBLIC.values()))
  assert not [name for name, value in PUBLIC.items() if counted[id(value)] > 1]
  for space in SPACES:
    assert not {*space.__all__} & {*dir(builtins)}, space.__name__


def test_every_file_of_contrib_is_imported_and_its_names_are_public():
  folder = pathlib.Path(gradcomp.contrib.__file__).parent
  files = {path.stem for path in folder.glob("_*.py")} - {"__init__"}
  assert files and files <= set(vars(gradcomp.contrib))
  each = [getattr(gradcomp.contrib, name) for name in gradcomp.contrib.__all__]
  assert {value.__module__ for value in each} == {"gradcomp.contrib"}


def section(docstring, title):
  """The text of a section, "" if there is none."""
  found = re.search(rf"^{title}:\n((?:  .*\n?|\n)*)", docstring, re.MULTILINE)
  return found[1] if found else ""


def entries(docstring, title):
  """The names that a section explains, in their order."""
  lines = re.findall(r"^  (\S.*?): ", section(docstring, title), re.MULTILINE)
  return [name.lstrip("*") for line in lines for name in line.split(", ")]


def test_functions_explain_their_arguments_their_result_and_their_errors():
  for name, function in PUBLIC.items():
    docstring = inspect.getdoc(function)
    assert docstring, name
    if inspect.isclass(function):
      continue
    signature = inspect.signature(function)
    parameters = signature.parameters
    assert entries(docstring, "Args") == list(parameters), name
    if signature.return_annotation not in (None, "None"):
      # A first line that begins with "Returns" may say all, as in Google's style.
      assert section(docstring, "Returns") or docstring.startswith("Returns "), name
    source = inspect.getsource(inspect.unwrap(function))
    if re.search(r"^ +raise ", source, re.MULTILINE):
      assert section(docstring, "Raises"), name
    keywords = [x.name for x in parameters.values() if x.kind is x.KEYWORD_ONLY]
    if "__signature__" not in vars(function):  # shared options follow a function's own
      assert "axis_name" not in parameters or keywords[0] == "axis_name", name


def test_options_and_states_explain_their_fields():
  states = [getattr(gradcomp.state, name) for name in gradcomp.state.__all__]
  fields = {state: [*state._fields] for state in states}
  for name, value in PUBLIC.items():
    if dataclasses.is_dataclass(value) and name.endswith("Options"):
      fields[value] = [field.name for field in dataclasses.fields(value)]
  for value, names in fields.items():
    assert entries(inspect.getdoc(value), "Attributes") == names, value
