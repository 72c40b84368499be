"""Which kernels serve: a table by kind of device, which ``make gpu-check`` writes."""

import functools
import json
import math
import warnings
from importlib import resources
from typing import NamedTuple

import jax

from gradcomp._src import checks

HOPPER = 9.0  # the compute capability that kernels need
BLACKWELL = 10.0  # the one that products of scaled blocks need

SEE = checks.see("runs-the-reference-instead")

# Whatever the filters of warnings say, each text once in a process.
_warn_once = functools.cache(warnings.warn)


class Verdict(NamedTuple):
  """The line of a kernel in the table of a kind of device.

  Attributes:
    least: the least number of elements that takes the kernel; infinite for none.
    record: the version of JAX and the day of the comparison of bits and times.
  """

  least: float = math.inf
  record: str = ""


def kernel_verdicts() -> dict[str, Verdict]:
  """Returns the line of each kernel in the table of this run's devices, by its name.

  A kernel serves arrays of ``least`` elements or more. From there on a record has the
  bits of XLA's code, and times that are no longer. Devices of several kinds share the
  largest ``least``. Without a table there are no lines.

  Example:
    >>> for name, verdict in kernel_verdicts().items():  # none on a CPU
    ...   print(name, verdict.least, verdict.record)
  """
  tables = [_read().get(kind, {}) for x in ("cuda", "tpu") for kind in _kinds(x)]
  names = sorted({name for table in tables for name in table})
  return {name: max(x.get(name, Verdict()) for x in tables) for name in names}


def serves(platform: str, kernel: str, size: int) -> bool:
  """Returns True if programs take a kernel for arrays of a size; may warn once."""
  # Each process of a run knows the devices of all, so that all give one answer.
  if platform == "cuda" and older_than(HOPPER):
    return False
  kinds = _kinds(platform) or {f"a device of {platform} that is not here"}
  if unknown := sorted(kinds - _read().keys()):
    _warn_once(
      f"No table says which kernels are right and fast on {', '.join(unknown)}: XLA "
      'runs the reference instead. `implementation="pallas"` takes a kernel, and '
      "GRADCOMP_CHECK_KERNELS=1 compares its bits first; on a GPU, `make gpu-check` in "
      f"a checkout writes a table.{SEE}",
      RuntimeWarning,
    )
    return False
  return all(size >= _read()[x].get(kernel, Verdict()).least for x in kinds)


@functools.cache
def _read() -> dict[str, dict[str, Verdict]]:
  """Returns the table: lines of kernels by their names, by kinds of device."""
  text = resources.files(__package__).joinpath("table.json").read_text()
  return {
    kind: {name: Verdict(least, of["record"]) for name, least in of["least"].items()}
    for kind, of in json.loads(text).items()
  }


def _kinds(platform: str) -> set[str]:
  """Returns the kinds of device in a run, and of a mesh that a program is made for."""
  kinds = {device.device_kind for device in devices(platform)}
  there = jax.sharding.get_abstract_mesh().abstract_device
  if there and there.platform == {"cuda": "gpu"}.get(platform, platform):
    kinds.add(there.device_kind)
  return kinds


def older_than(least: float) -> str:
  """Returns the compute capability of a GPU that has less; "" for none."""
  each = (float(getattr(x, "compute_capability", least)) for x in devices("cuda"))
  return next((str(found) for found in each if found < least), "")


def devices(platform: str, process: int | None = None) -> list[jax.Device]:
  """Returns the devices of a process, or of all; none if the platform is not here."""
  try:
    return [x for x in jax.devices(platform) if process in (None, x.process_index)]
  except RuntimeError:
    return []
