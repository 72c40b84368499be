"""Tells traces that nobody compiles from others, by an axis that only they bind.

JAX knows the bound axes of each trace that it keeps. So it never takes the result of
such a trace for that of another one.
"""

from gradcomp._src.mesh.axes import AxisName, bound_size

# Where explain traces update, these are bound: (between, inside), or the first alone.
# They stand for the axes that a transformation takes from the types of gradients.
EXPLAINED = ("gradcomp_between", "gradcomp_inside")

# Where allow_frozen looks which gradients are read, this is bound.
FOLLOWED = "gradcomp_followed"


def is_explained() -> bool:
  """Returns True where explain traces, and nothing runs."""
  return bound_size(EXPLAINED[0]) is not None


def is_followed() -> bool:
  """Returns True where transformations give gradients back as they are."""
  return bound_size(FOLLOWED) is not None


def or_explained(axis_name: AxisName | None) -> AxisName | None:
  """Returns the axes; where none are named, those of explain if it traces."""
  if axis_name is not None or not is_explained():
    return axis_name
  return EXPLAINED if bound_size(EXPLAINED) else EXPLAINED[0]
