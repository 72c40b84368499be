"""What can be said of the sums of several codecs together."""

import dataclasses

from gradcomp.sums._sum import SumFacts, Way


@dataclasses.dataclass(frozen=True)
class Several:
  """The sums of codecs that share a message.

  It answers for all of them. What is added, each adds by itself.

  Attributes:
    parts: the sum of each codec.
  """

  parts: tuple[SumFacts, ...]

  @property
  def refusals(self) -> dict[Way, str]:
    found: dict[Way, str] = {}
    for part in reversed(self.parts):
      found |= part.refusals
    return found

  @property
  def drops(self) -> bool:
    return any(part.drops for part in self.parts)

  @property
  def mixes(self) -> bool:
    return all(part.mixes for part in self.parts)

  def check(self, workers: int) -> None:
    for part in self.parts:
      part.check(workers)
