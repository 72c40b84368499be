"""Arithmetic in floating-point formats of few bits."""

from gradcomp._src.floats.arithmetic import (
  add,
  all_reduce,
  matmul,
  multiply,
  reduce_sum,
  round_off_error,
)
from gradcomp._src.floats.rounding import from_code, round_to, to_code
from gradcomp._src.kernels.common.float_codes import FloatFormat

__all__ = ["FloatFormat", "add", "all_reduce", "from_code", "matmul", "multiply"]
__all__ += ["reduce_sum", "round_off_error", "round_to", "to_code"]
