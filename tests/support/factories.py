"""All public names, with the codecs and the functions that make a transformation."""

import dataclasses
import inspect

import optax

import gradcomp


def names():
  """The public names of gradcomp and its namespaces, with what they name."""
  spaces = [gradcomp, *(getattr(gradcomp, name) for name in gradcomp.__all__)]
  spaces = [space for space in spaces if hasattr(space, "__all__")]
  return {name: getattr(space, name) for space in spaces for name in space.__all__}


def codecs():
  """The public types of codecs, a policy among them."""
  public = vars(gradcomp.codecs).values()
  return [x for x in public if hasattr(x, "bind") and dataclasses.is_dataclass(x)]


def found():
  """The functions that return a transformation, by name."""
  returned = lambda f: inspect.get_annotations(f).get("return")
  makes = lambda x: inspect.isclass(x) and issubclass(x, optax.GradientTransformation)
  functions = {x: f for x, f in names().items() if inspect.isfunction(f)}
  return {x: f for x, f in functions.items() if makes(returned(f))}
