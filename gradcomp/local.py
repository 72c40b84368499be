"""Local steps: workers train for some steps between two exchanges."""

from gradcomp._src.local_steps.options import LocalOptions
from gradcomp._src.local_steps.transform import local_params, local_steps
from gradcomp._src.public import publish

__all__ = [
  "LocalOptions",
  "local_params",
  "local_steps",
]

publish(globals())
