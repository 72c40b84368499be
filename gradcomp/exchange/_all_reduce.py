"""``psum``: the backend adds, where sums of plain values or integers are exact."""

from typing import cast

from gradcomp.exchange._collectives import (
  Workers,
  final_stage,
  pmean,
  psum,
  totals,
)
from gradcomp.exchange._contribution import Contribution, Leaves, Total
from gradcomp.sums import ReducibleSum


def all_reduce(own: Contribution, workers: Workers) -> Total:
  """The sum of all workers' terms: codes in integers that hold it, or values."""
  sums = cast(list[ReducibleSum], own.sums)  # as check_exchange has made sure
  terms = [
    total.terms(rows, workers.size) for total, rows in zip(sums, own.rows, strict=True)
  ]
  name = final_stage(own.layout.elements, workers)
  results = totals(terms, workers.axis_name, name)
  decoders = [
    total.reduced(result, own.leaf_rows(i), own.agreed[i], workers.scale)
    for i, (total, result) in enumerate(zip(sums, results, strict=True))
  ]
  return Total(decoders, [None] * len(decoders), own.residuals)


def all_reduce_plain(leaves: Leaves, workers: Workers) -> Leaves:
  """The plain mean of leaves, or their sum, in their own dtype."""
  reduce = psum if workers.scale == 1 else pmean
  return reduce(leaves, workers.axis_name)
