"""The conformance kit for codecs and transformations."""

from gradcomp._src import public as _public
from gradcomp._src.testing import laws, modes
from gradcomp._src.testing.broken import BrokenLaw
from gradcomp._src.testing.check import CheckOptions, check_codec, check_transformation
from gradcomp._src.testing.leaves import Trial, trial

__all__ = ["BrokenLaw", "CheckOptions", "Trial", "check_codec"]
__all__ += ["check_transformation", "laws", "modes", "trial"]

_public.publish(globals())
