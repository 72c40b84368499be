"""All public names, and the functions among them that make a transformation."""

import inspect

import optax

import gradcomp


def names():
  """The public names of gradcomp and its namespaces, with what they name."""
  spaces = [gradcomp, *(getattr(gradcomp, name) for name in gradcomp.__all__)]
  spaces = [space for space in spaces if hasattr(space, "__all__")]
  return {name: getattr(space, name) for space in spaces for name in space.__all__}


def found():
  """The functions that return a transformation, by name."""
  returned = lambda f: inspect.get_annotations(f).get("return")
  makes = lambda x: inspect.isclass(x) and issubclass(x, optax.GradientTransformation)
  functions = {x: f for x, f in names().items() if inspect.isfunction(f)}
  return {x: f for x, f in functions.items() if makes(returned(f))}
