"""Methods that are not proven yet."""

from gradcomp._src import public as _public
from gradcomp._src.core.feedback import EF21
from gradcomp.contrib._dion import dion
from gradcomp.contrib._eden import Eden
from gradcomp.contrib._keras import keras

__all__ = ["EF21", "Eden", "dion", "keras"]

_public.publish(vars())
