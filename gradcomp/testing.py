"""The conformance kit for codecs and transformations."""

from gradcomp._src import public as _public
from gradcomp._src.testing import laws, modes
from gradcomp._src.testing.check import CheckOptions, check_codec, check_transformation
from gradcomp._src.testing.kit import BrokenLaw

__all__ = ["BrokenLaw", "CheckOptions", "check_codec", "check_transformation", "laws"]
__all__ += ["modes"]

_public.publish(globals())
