"""Marks analysis-only traces (explain, allow_frozen) by binding a reserved axis name.

JAX caches traces with their bound axes. So it never takes the result of such a trace
for that of another one.
"""

from gradcomp._src.mesh.axes import AxisName, bound_size

# Where explain traces update, these are bound: (between, inside), or only the first.
# They replace the axes that a transformation takes from the types of gradients.
EXPLAINED = ("gradcomp_between", "gradcomp_inside")

# Bound where allow_frozen finds the gradients that an optimizer reads.
FOLLOWED = "gradcomp_followed"


def is_explained() -> bool:
  """Returns True in a trace of explain."""
  return bound_size(EXPLAINED[0]) is not None


def is_followed() -> bool:
  """Returns True in a trace of allow_frozen: transformations return their inputs."""
  return bound_size(FOLLOWED) is not None


def or_explained(axis_name: AxisName | None) -> AxisName | None:
  """Returns the axes; in a trace of explain, its axes if none are named."""
  if axis_name is not None or not is_explained():
    return axis_name
  return EXPLAINED if bound_size(EXPLAINED) else EXPLAINED[0]
