"""Splits keyword arguments into those of a function and the fields of its options."""

import dataclasses


def with_options(kind, given):
  """The arguments of a function that takes ``options``, an instance of a dataclass."""
  fields = {field.name for field in dataclasses.fields(kind)}
  rest = {name: value for name, value in given.items() if name not in fields}
  own = {name: value for name, value in given.items() if name in fields}
  return rest | {"options": kind(**own)}
