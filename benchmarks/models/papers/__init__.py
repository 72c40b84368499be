"""The five papers' printed numbers, beside what their models give."""

from benchmarks.models.papers import dettmers, fang, grubic, han, wen
from benchmarks.models.papers.number import Number as Number


def numbers() -> list[Number]:
  """Recomputes every number, paper by paper."""
  return [
    row for paper in (dettmers, wen, fang, grubic, han) for row in paper.numbers()
  ]
