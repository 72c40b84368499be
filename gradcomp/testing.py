"""The conformance kit for codecs and transformations."""

from gradcomp._src import public as _public
from gradcomp._src.testing import laws, modes
from gradcomp._src.testing.broken import BrokenLaw
from gradcomp._src.testing.check import CheckOptions, check_codec, check_transformation
from gradcomp._src.testing.kernels import KernelReport, KernelTrial, compare_kernels
from gradcomp._src.testing.trial import Trial, trial

__all__ = ["BrokenLaw", "CheckOptions", "KernelReport", "KernelTrial", "Trial"]
__all__ += ["check_codec", "check_transformation", "compare_kernels", "laws", "modes"]
__all__ += ["trial"]

_public.publish(globals())
