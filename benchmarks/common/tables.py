"""Formats what the tables of results have in common."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def spread(values: Sequence[float], sign: str = "", digits: int = 2) -> str:
  """Returns the mean of values and, if there are several, their standard deviation.

  Example:
    >>> spread([1.0, 2.0, 3.0], "+"), spread([1.5], digits=1)
    ('+2.00 ± 1.00', '1.5')
  """
  mean = f"{statistics.fmean(values):{sign}.{digits}f}"
  return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def show(rows: Mapping[Any, Mapping[Any, Any]]) -> None:
  """Prints a line for each row."""
  import pandas as pd  # which the tables of pages do not need

  found = pd.DataFrame.from_dict(rows, orient="index")
  print(found.to_string(float_format="{:,.4g}".format, na_rep=""))


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
  """Writes a table in Markdown.

  Example:
    >>> print(table(["a", "b"], [["1", "2"]]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
  """
  every = [header, ["---"] * len(header), *lines]
  return "\n".join(f"| {' | '.join(cells)} |" for cells in every)
