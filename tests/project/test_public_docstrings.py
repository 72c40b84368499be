"""The docstring of every public function says what goes in and what comes out.

Recipes have a test of their own: they take the options of ``compress``.
"""

import dataclasses
import inspect
import re

import pytest

import gradcomp
import gradcomp.testing

NAMES = [getattr(gradcomp, name) for name in gradcomp.__all__]
NAMESPACES = [gradcomp, *filter(inspect.ismodule, NAMES)]
MODULES = [
  *(space for space in NAMESPACES if hasattr(space, "__all__")),
  gradcomp.testing.modes,
]
PUBLIC = {
  f"{module.__name__}.{name}": value
  for module in MODULES
  for name in getattr(module, "__all__", None) or vars(module)
  if not name.startswith("_")
  and (inspect.isclass(value := getattr(module, name)) or inspect.isroutine(value))
  and (hasattr(module, "__all__") or value.__module__ == module.__name__)
}
FUNCTIONS = {
  name: value
  for name, value in PUBLIC.items()
  if not inspect.isclass(value) and "__signature__" not in vars(value)
}
OPTIONS = {
  name: value
  for name, value in PUBLIC.items()
  if dataclasses.is_dataclass(value) and name.endswith("Options")
}
STATES = [getattr(gradcomp.state, name) for name in gradcomp.state.__all__]


def section(docstring, title):
  """The text of a section, "" if there is none."""
  found = re.search(rf"^{title}:\n((?:  .*\n?|\n)*)", docstring, re.MULTILINE)
  return found[1] if found else ""


def entries(docstring, title):
  """The names that a section explains, in their order."""
  lines = re.findall(r"^  (\S.*?): ", section(docstring, title), re.MULTILINE)
  return [name.lstrip("*") for line in lines for name in line.split(", ")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_explains_its_arguments_and_its_result(name):
  docstring = inspect.getdoc(FUNCTIONS[name])
  signature = inspect.signature(FUNCTIONS[name])
  assert entries(docstring, "Args") == list(signature.parameters)
  if signature.return_annotation not in (None, "None"):
    # A first line that begins with "Returns" may say all, as in Google's style.
    assert section(docstring, "Returns") or docstring.startswith("Returns ")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_raises_says_so(name):
  function = inspect.unwrap(FUNCTIONS[name])
  if re.search(r"^ +raise ", inspect.getsource(function), re.MULTILINE):
    assert section(inspect.getdoc(function), "Raises")


@pytest.mark.parametrize("name", OPTIONS)
def test_options_explain_their_fields(name):
  fields = [field.name for field in dataclasses.fields(OPTIONS[name])]
  assert entries(inspect.getdoc(OPTIONS[name]), "Attributes") == fields


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_axis_is_the_first_keyword(name):
  parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
  keywords = [x.name for x in parameters if x.kind is x.KEYWORD_ONLY]
  if any(x.name == "axis_name" for x in parameters):
    assert keywords[0] == "axis_name"


@pytest.mark.parametrize("state", STATES)
def test_states_explain_their_fields(state):
  """Where ``help`` would say that each is an alias for a number."""
  assert entries(inspect.getdoc(state), "Attributes") == [*state._fields]
