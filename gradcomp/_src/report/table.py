"""Text tables for printed reports."""

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
  """Returns one line a row, with the columns of ``right`` flush right.

  Example:
    >>> aligned([["leaf", "bytes"], ["w", "8"]], right={1})
    ['leaf  bytes', 'w         8']
  """
  columns = []
  for i, column in enumerate(zip(*rows, strict=True)):
    width = max(map(len, column))
    columns.append([x.rjust(width) if i in right else x.ljust(width) for x in column])
  return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
