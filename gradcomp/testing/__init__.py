"""A conformance kit: tests codecs and transformations by the laws of this library.

``import gradcomp`` does not import it.
"""

from gradcomp.testing import laws as laws
from gradcomp.testing import modes as modes
from gradcomp.testing._broken import BrokenLaw as BrokenLaw
from gradcomp.testing._check import check_codec as check_codec
from gradcomp.testing._check import check_transformation as check_transformation
from gradcomp.testing._trial import Trial as Trial
from gradcomp.testing._trial import trial as trial
