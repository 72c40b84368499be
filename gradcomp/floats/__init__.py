"""Arithmetic in floating-point formats of few bits, each result rounded correctly."""

from gradcomp.floats._all_reduce import all_reduce as all_reduce
from gradcomp.floats._all_reduce import round_off_error as round_off_error
from gradcomp.floats._arithmetic import add as add
from gradcomp.floats._arithmetic import multiply as multiply
from gradcomp.floats._arithmetic import rounded_sum as rounded_sum
from gradcomp.floats._matmul import matmul as matmul
from gradcomp.floats._rounding import from_code as from_code
from gradcomp.floats._rounding import round_to as round_to
from gradcomp.floats._rounding import to_code as to_code
from gradcomp.floats._sums import kahan_step as kahan_step
from gradcomp.floats._sums import sum as sum
from gradcomp.kernels.float_codes import FloatRounding as FloatRounding
from gradcomp.kernels.float_formats import FloatFormat as FloatFormat
