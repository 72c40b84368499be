"""Joint facts about the sums of several codecs that share messages."""

import dataclasses

from gradcomp._src.codecs.sums.sum import SumFacts, Way


@dataclasses.dataclass(frozen=True)
class Several:
  """Joins the facts about the sums of several codecs, without adding."""

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
