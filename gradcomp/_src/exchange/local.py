"""``local``: sends nothing; each worker decodes its own leaves."""

import dataclasses
from typing import ClassVar

from gradcomp._src.codecs.sums.sum import Way
from gradcomp._src.exchange.collectives import Workers
from gradcomp._src.exchange.contribution import Contribution, Total
from gradcomp._src.exchange.protocol import CODED_ONCE, WithoutOwners, Work


@dataclasses.dataclass(frozen=True)
class Local(WithoutOwners):
  """Decodes each worker's own payload: only the codec's noise is added.

  Outputs differ between workers, and under Explicit axes they stay unreduced.
  """

  name: ClassVar[str] = "local"
  way: ClassVar[Way] = "gathered"
  of_leaves: ClassVar[bool] = True
  sends: ClassVar[bool] = False

  def run(self, own: Contribution, workers: Workers | None = None) -> Total:
    if own.plain:
      return Total(own.leaves, own.nothing, own.residuals, encoded=False)
    decoders = own.decoders
    means = own.means(lambda: decoders, own.rows[0])
    return Total(means, own.nothing, own.residuals)

  def work(self, sizes: tuple[int, ...], *, plain: bool) -> Work:
    return Work() if plain else CODED_ONCE
