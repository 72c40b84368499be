"""``psum``: the backend adds plain values, or integers with exact sums."""

import dataclasses
from fractions import Fraction
from typing import ClassVar

from gradcomp._src.codecs.sums.sum import RowDecoder, Way
from gradcomp._src.exchange.collectives import Workers, final_stage, pmean, psum, totals
from gradcomp._src.exchange.contribution import Contribution, Total
from gradcomp._src.exchange.protocol import WithoutOwners, Work


@dataclasses.dataclass(frozen=True)
class AllReduce(WithoutOwners):
  """Lets the backend add the numbers that all workers send.

  The numbers are codes, in integers that hold their sums, or plain values. If all
  leaves are plain, the backend adds the leaves themselves, in their own dtype.
  """

  name: ClassVar[str] = "psum"
  way: ClassVar[Way] = "reduced"
  of_leaves: ClassVar[bool] = True

  def run(self, own: Contribution, workers: Workers) -> Total:
    if own.plain:
      reduce = psum if workers.scale == 1 else pmean
      mean = reduce(own.leaves, workers.axis_name)
      return Total(mean, own.nothing, own.residuals, encoded=False)
    terms = [
      total.terms(rows, workers.size)
      for total, rows in zip(own.sums, own.rows, strict=True)
    ]
    name = final_stage(own.layout.elements, workers)
    results = totals(terms, workers.axis_name, name)
    agreed = own.agreed_rows

    def decoders() -> list[RowDecoder]:
      return [
        total.reduced(result, own.leaf_rows(i), agreed[i], workers.scale)
        for i, (total, result) in enumerate(zip(own.sums, results, strict=True))
      ]

    return Total(own.means(decoders, results[0]), own.nothing, own.residuals)

  def work(self, sizes: tuple[int, ...], *, plain: bool) -> Work:
    # Rows are unpacked to the codes that are added, and their sums decoded.
    return Work() if plain else Work(encoded=Fraction(1), decoded=Fraction(2))
