"""Verdicts on kernels, one of all processes: else they would run other programs."""

import collections
import json
import math
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import NamedTuple

from gradcomp._src.mesh import run_store


class Verdict(NamedTuple):
  """A comparison of a kernel with XLA's code. By default nothing was tried.

  Attributes:
    failure: the first difference from the reference, a sentence; "" if there is none.
    kernel: the seconds of one encoding by the kernel, of the slowest process; 0 if it
      was not timed.
    reference: the same of XLA's code; infinite if it was not timed.
    able: False if a GPU is older than Hopper, and cannot run the kernel.
  """

  failure: str = ""
  kernel: float = 0.0
  reference: float = math.inf
  able: bool = True

  @property
  def for_kernel(self) -> bool:
    """Returns True if programs take the kernel."""
    return not self.failure and self.able and self.kernel <= self.reference


# The agreed verdicts, by the kernel and the processes, and how often one failed.
_agreed: dict[tuple[str, tuple[int, ...]], Verdict] = {}
_failed: collections.Counter[tuple[str, tuple[int, ...]]] = collections.Counter()


def of_all(verdicts: Iterable[Verdict]) -> Verdict:
  """Returns one verdict of several: a step takes as long as its slowest worker."""
  failures, kernels, references, able = zip(*verdicts, strict=True)
  failure = next(filter(None, failures), "")
  return Verdict(failure, max(kernels), max(references), all(able))


def agreed(
  kernel: str, own: Callable[[], Verdict], processes: tuple[int, ...]
) -> Verdict:
  """Returns the verdict of all processes on a kernel, with the first one's failure.

  It blocks until all have tried it: all trace the same programs, in the same order.
  RuntimeError on all of them if one cannot try it.
  """
  key = kernel, processes
  if key in _agreed:
    return _agreed[key]
  # A process that tries again reads no error of the last time.
  name = sha256(repr((key, _failed[key])).encode()).hexdigest()
  folder = f"gradcomp/kernels/{name}/"
  try:
    text = json.dumps(own())
  except Exception as error:
    _failed[key] += 1
    run_store.publish(folder, json.dumps(str(error)[:500]))
    raise
  texts = run_store.meet(folder, text, processes, f"{kernel} must be tried")
  found = {process: json.loads(text) for process, text in sorted(texts.items())}
  for process, value in found.items():
    if isinstance(value, str):
      _failed[key] += 1
      raise RuntimeError(f"Process {process} did not try {kernel}: {value}")
  _agreed[key] = of_all(Verdict(*found[process]) for process in processes)
  return _agreed[key]
