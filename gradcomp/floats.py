"""Arithmetic in floating-point formats of few bits."""

from gradcomp._src.floats.all_reduce import all_reduce, round_off_error
from gradcomp._src.floats.arithmetic import add, multiply, rounded_sum
from gradcomp._src.floats.matmul import matmul
from gradcomp._src.floats.rounding import from_code, round_to, to_code
from gradcomp._src.floats.sums import kahan_step, sum
from gradcomp._src.kernels.common.float_codes import FloatRounding
from gradcomp._src.kernels.common.float_formats import FloatFormat

__all__ = ["FloatFormat", "FloatRounding", "add", "all_reduce", "from_code"]
__all__ += ["kahan_step", "matmul", "multiply", "round_off_error", "round_to"]
__all__ += ["rounded_sum", "sum", "to_code"]
