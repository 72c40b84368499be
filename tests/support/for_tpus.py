"""Programs as they are lowered for TPUs: what they hold, and their bits on a CPU."""

import math
import re

import jax
from jax.export import DisabledSafetyCheck, export

from tests.support.lowering import all_kernels

_TENSOR = re.compile(r"tensor<((?:\d+x)+)(?:f|ui|i|bf)(\d+)>")


def lowered(function, *args):
  """The program of a function for TPUs, which ``.call`` runs on a CPU."""
  here = [DisabledSafetyCheck.platform()]
  with all_kernels():
    return export(jax.jit(function), platforms=["tpu"], disabled_checks=here)(*args)


def narrow(program, least):
  """The shapes of at least so many bytes with fewer than 128 numbers in their rows."""
  found = set()
  for sizes, bits in _TENSOR.findall(program.mlir_module()):
    shape = tuple(map(int, sizes[:-1].split("x")))
    if shape[-1] < 128 and math.prod(shape) * int(bits) // 8 >= least:
      found.add(shape)
  return found
