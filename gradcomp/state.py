"""State types of the transformations."""

from gradcomp._src.core.state import CompressState, LocalStepsState, ScanState
from gradcomp._src.parallel.zero.transform import ZeroState

__all__ = ["CompressState", "LocalStepsState", "ScanState", "ZeroState"]
