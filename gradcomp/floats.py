"""Arithmetic in floating-point formats of few bits."""

from gradcomp._src.floats.all_reduce import all_reduce, round_off_error
from gradcomp._src.floats.arithmetic import add, multiply
from gradcomp._src.floats.matmul import matmul
from gradcomp._src.floats.rounding import from_code, round_to, to_code
from gradcomp._src.floats.sums import reduce_sum
from gradcomp._src.kernels.common.float_formats import FloatFormat

__all__ = ["FloatFormat", "add", "all_reduce", "from_code", "matmul", "multiply"]
__all__ += ["reduce_sum", "round_off_error", "round_to", "to_code"]
