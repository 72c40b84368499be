"""Methods that are not proven yet.

A method enters with one file in this folder and its names here, one test that calls
``gradcomp.testing.check_codec`` or ``check_transformation``, and a docstring that names
its paper.
"""

from gradcomp._src import public as _public
from gradcomp._src.core.feedback import EF21
from gradcomp.contrib._dion import dion
from gradcomp.contrib._eden import Eden

__all__ = ["EF21", "Eden", "dion"]

_public.publish(vars())
