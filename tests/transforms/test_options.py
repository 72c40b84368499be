"""Recipes take the options of ``compress``, each by its name, and refuse all others."""

import inspect
import re
import typing

import jax.numpy as jnp
import optax
import pytest

import gradcomp
from gradcomp._src.parallel import wires
from gradcomp._src.transforms.low_rank import PowerSGD
from gradcomp._src.transforms.options import ExchangeOptions
from tests.support import factories
from tests.support.assertions import assert_equal, says
from tests.support.cases.recipe import NEEDED, RECIPES, make

OPTIONS = {
  name: parameter
  for name, parameter in inspect.signature(gradcomp.compress).parameters.items()
  if parameter.kind is parameter.KEYWORD_ONLY
}
# RedSync has a feedback of its own.
OWN = {"redsync": {"feedback"}}

every_recipe = pytest.mark.parametrize("name", RECIPES)


def test_the_options_are_those_of_compress():
  """Names and types, which mypy reads in one place and ``help`` in the other."""
  expected = {name: parameter.annotation for name, parameter in OPTIONS.items()}
  assert typing.get_type_hints(gradcomp.CompressOptions) == expected
  listed = [line.split(":")[0] for line in gradcomp.CompressOptions.__doc__.split("\n")]
  assert [line.strip() for line in listed if line[4:].strip() in OPTIONS] == [*OPTIONS]


def test_the_options_of_collectives_are_those_of_a_wire():
  """Names and types; the help of each shows the defaults of those that it takes."""
  shared = inspect.signature(wires.wire).parameters
  expected = {name: parameter.annotation for name, parameter in shared.items()}
  hints = typing.get_type_hints(wires.CollectiveOptions)
  assert hints == expected
  for name in "all_gather psum_scatter all_to_all ppermute psum sum_gradients".split():
    function = getattr(gradcomp.parallel, name)
    (kind,) = typing.get_args(typing.get_type_hints(function)["given"])
    shown = inspect.signature(function).parameters
    assert shared.keys() & shown.keys() == typing.get_type_hints(kind).keys(), name
    for option in shared.keys() & shown.keys():
      assert shown[option].default == shared[option].default, (name, option)


@every_recipe
def test_signatures_name_every_option(name):
  """As ``help`` shows them: a recipe's own arguments first, and compress's defaults."""
  parameters = inspect.signature(RECIPES[name]).parameters
  own = OWN.get(name, set())
  assert parameters.keys() >= OPTIONS.keys()
  shared = [option for option in OPTIONS if option not in own]
  assert [*parameters][-len(shared) :] == shared
  assert all(parameters[option].default == OPTIONS[option].default for option in shared)
  hint = typing.get_type_hints(RECIPES[name])["options"]
  (kind,) = typing.get_args(hint)
  assert kind is (ExchangeOptions if own else gradcomp.CompressOptions)
  assert set(kind.__annotations__) == set(shared)


@pytest.mark.parametrize("described", [*RECIPES.values(), *factories.codecs()])
def test_help_explains_every_argument_and_field(described):
  """In the order of the signature, and with the default that it has there."""
  parameters = inspect.signature(described).parameters
  title = "Attributes" if inspect.isclass(described) else "Args"
  text = inspect.getdoc(described) + "\n\n"
  sections = re.findall(rf"^{title}:\n(.*?)\n\n", text, re.M | re.S)
  assert len(sections) == (len(parameters) > 0)
  entries = re.sub(r"\n {4,}", " ", "".join(sections))  # each in one line
  told = dict(re.findall(r"^  (\w+): (.*)", entries, re.M))
  assert [*told] == [*parameters]
  for argument, text in told.items():
    default = parameters[argument].default
    said = f'``"{default}"``' if isinstance(default, str) else repr(default)
    said = "``float32``" if default is jnp.float32 else said
    required = default is inspect.Parameter.empty
    assert text.endswith(" Required." if required else f" Default: {said}."), argument


@every_recipe
def test_arguments_are_fields_of_the_codec(name):
  """Arguments that have a field's name have its type and default."""
  recipe = RECIPES[name]
  text = recipe.__doc__.split("Args:")[0]
  found = re.findall(r"codec\s+:class:`gradcomp\.codecs\.(\w+)`", text)
  codec = getattr(gradcomp.codecs, found[0] if found else "FloatCast")
  codec = PowerSGD if name == "powersgd" else codec  # whose factors are no codec
  fields, given = (inspect.signature(x).parameters for x in (codec, recipe))
  hints, own = typing.get_type_hints(codec), typing.get_type_hints(recipe)
  assert fields.keys() & given.keys()
  for argument in fields.keys() & given.keys():
    assert given[argument].default == fields[argument].default, argument
    assert own[argument] == hints[argument], argument


@every_recipe
def test_every_option_arrives(name):
  """``compress``, or the codec, says what is wrong with it."""
  bad = {"axis_name": (), "exchange": "gossip", "feedback": "none", "key": jnp.ones(2)}
  bad |= {"min_leaf_size": -1, "message_bytes": -1}
  if name not in ("dense", "policy", "powersgd", "randomk"):  # which have no kernels
    bad["implementation"] = "cuda"
  for option, value in bad.items():
    with pytest.raises(ValueError, match=says(f"`{option}`")):
      make(name, **{option: value}).init({"w": jnp.ones(3)})


@every_recipe
def test_unknown_options(name):
  known = ", ".join(inspect.signature(RECIPES[name]).parameters)
  with pytest.raises(TypeError, match=says("`axis`", name, known)):
    make(name, axis="data")


@every_recipe
def test_recipes_can_be_injected(name):
  """inject_hyperparams passes every argument by its name, numbers as arrays."""
  static = inspect.signature(RECIPES[name]).parameters.keys() - OPTIONS.keys()
  params = {"w": jnp.ones(8)}
  inject = optax.inject_hyperparams(RECIPES[name], static_args=static)
  state = inject(**NEEDED.get(name, {}), feedback="auto").init(params)
  assert list(state.hyperparams) == ["key"]
  assert_equal(state.inner_state, make(name).init(params))
