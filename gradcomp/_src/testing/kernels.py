"""Comparison of the kernels with XLA's code on the GPU of this machine."""

import dataclasses
import timeit
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from gradcomp._src.codecs.block_top import BlockTop
from gradcomp._src.codecs.eight_bit import EightBit
from gradcomp._src.codecs.floats.block_float import BlockFloat
from gradcomp._src.codecs.floats.float_cast import FloatCast
from gradcomp._src.codecs.floats.natural import Natural
from gradcomp._src.codecs.joint import encode_leaf
from gradcomp._src.codecs.one_bit import OneBit
from gradcomp._src.codecs.qsgd import QSGD
from gradcomp._src.codecs.sums.records import Context, Encoded, Leaf
from gradcomp._src.codecs.ternary import Ternary
from gradcomp._src.codecs.top_k import TopK
from gradcomp._src.kernels.gpu import self_check
from gradcomp._src.kernels.gpu.dispatch import Implementation
from gradcomp._src.report.collectives import aligned
from gradcomp._src.testing.leaves import KEY
from gradcomp._src.version import __version__

# Every operation that has a kernel, by names for the report.
CODECS: dict[str, Any] = {
  **{f"qsgd, {bits} bits": QSGD(bits=bits) for bits in (2, 4, 8)},
  "1-bit SGD": OneBit(),
  "terngrad": Ternary(),
  "terngrad, base3": Ternary(packing="base3"),
  "8 bits, dynamic tree": EightBit(),
  "8 bits, linear": EightBit(dtype="linear"),
  "float cast, e5m2": FloatCast(exponent_bits=5, mantissa_bits=2),
  "float cast, e4m3": FloatCast(exponent_bits=4, mantissa_bits=3),
  "natural": Natural(),
  "block top": BlockTop(),
  "block float, mxfp8": BlockFloat(),
  "block float, nvfp4": BlockFloat(element="e2m1", scale="e4m3", block_size=16),
  "top k, by threshold": TopK(density=0.01, selection="threshold"),
}


class KernelTrial(NamedTuple):
  """The result of one codec's kernel.

  Attributes:
    name: the operation and its setting.
    failure: the first difference from the reference, or the error; "" for equal bits.
    kernel_ms: milliseconds of an encoding by the kernel; None where it failed.
    xla_ms: milliseconds of the same encoding by XLA's code on the same device.
  """

  name: str
  failure: str
  kernel_ms: float | None
  xla_ms: float | None


@dataclasses.dataclass(frozen=True)
class KernelReport:
  """The kernels of a GPU against their references; ``print`` writes it as a table.

  Attributes:
    versions: gradcomp, JAX, the device, and its driver as JAX names it.
    elements: the size of the gradient that was encoded.
    trials: one for each codec; none without a GPU.
  """

  versions: str
  elements: int
  trials: tuple[KernelTrial, ...]

  def __str__(self) -> str:
    if not self.trials:
      return f"{self.versions}\nThere is no GPU here, and so no kernel to compare."
    rows = [["kernel", "bits", "ms", "XLA ms"]]
    for name, failure, *times in self.trials:
      shown = ("" if x is None else f"{x:.3f}" for x in times)
      rows.append([name, "DIFFER" if failure else "equal", *shown])
    failures = [f"{x.name}: {x.failure}" for x in self.trials if x.failure]
    table = aligned(rows, right={2, 3})
    size = f"Encoding {self.elements:,} elements:"
    return "\n".join([self.versions, size, *table, *failures])


def compare_kernels(*, elements: int = 2**24, interpret: bool = False) -> KernelReport:
  """Compares the bits of each kernel with its reference, and times both.

  The reference runs on the CPU. A report of another GPU is welcome as an issue.

  Args:
    elements: the size of the gradient.
    interpret: whether to interpret the kernels, which any device can do, slowly.

  Returns:
    The versions and a trial of each kernel; without a GPU no trial.

  Example:
    >>> print(compare_kernels())  # doctest: +ELLIPSIS
    gradcomp ...
    There is no GPU here, and so no kernel to compare.
  """
  device = jax.devices()[0]
  ours = f"gradcomp {__version__}, JAX {jax.__version__}, jaxlib {jaxlib.__version__}"
  here = [device.device_kind, *device.client.platform_version.split("\n")]
  versions = ", ".join([ours, *here])
  trials = []
  if interpret or device.platform == "gpu":
    implementation: Implementation = "pallas_interpret" if interpret else "pallas"
    x = self_check.elements(elements)
    trials = [_trial(name, implementation, x, device) for name in CODECS]
  return KernelReport(versions, elements, tuple(trials))


def _trial(
  name: str, implementation: Implementation, x: np.ndarray, device: jax.Device
) -> KernelTrial:
  kernel, reference = (_encoder(CODECS[name], y) for y in (implementation, "xla"))
  failure = self_check.compare(kernel, reference, (x,), device)
  here = jax.device_put(x, device)
  times = [None if failure else _milliseconds(f, here) for f in (kernel, reference)]
  return KernelTrial(name, failure, *times)


def _encoder(codec: Any, implementation: Implementation) -> Callable[[Any], Any]:
  """Returns the encoder of a leaf, with the residual where the kernel writes it."""
  codec = dataclasses.replace(codec, implementation=implementation)
  key = jnp.asarray(KEY) if codec.needs_key else None

  def encode(x: jax.Array) -> Encoded:
    bound = codec.bind(Leaf(x.shape))
    return encode_leaf(bound, True, x, Context(key, agreed=bound.agree(x)))

  return encode


def _milliseconds(function: Callable[[jax.Array], Any], x: jax.Array) -> float:
  """Returns the least time of several runs."""
  jitted = jax.jit(function)
  times = timeit.repeat(lambda: jax.block_until_ready(jitted(x)), number=1, repeat=10)
  return 1e3 * min(times)
