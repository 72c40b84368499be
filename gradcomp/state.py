"""State types of the transformations."""

from gradcomp._src.core.residual_storage import Int8Residual
from gradcomp._src.core.state import (
  CompressState,
  FragmentState,
  LocalStepsState,
  OwnedRows,
  ScanState,
)
from gradcomp._src.parallel.zero.transform import ZeroState
from gradcomp._src.transforms.skip import SkipNonfiniteState
from gradcomp._src.transforms.switch import SwitchState

__all__ = ["CompressState", "FragmentState", "Int8Residual", "LocalStepsState"]
__all__ += ["OwnedRows", "ScanState", "SkipNonfiniteState", "SwitchState", "ZeroState"]
