"""Local steps: workers train for some steps between two exchanges."""

from gradcomp._src import public as _public
from gradcomp._src.local_steps.options import LocalOptions
from gradcomp._src.local_steps.transform import local_params, local_steps

__all__ = [
  "LocalOptions",
  "local_params",
  "local_steps",
]

_public.publish(globals())
