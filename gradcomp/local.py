"""Local steps: workers train for some steps between two exchanges."""

from gradcomp._src.local_steps.transform import local_params, local_steps
from gradcomp._src.public import publish

__all__ = [
  "local_params",
  "local_steps",
]

publish(globals())
