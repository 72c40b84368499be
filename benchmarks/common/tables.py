"""Formats what the tables of results have in common."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def show(rows: Mapping[Any, Mapping[Any, Any]]) -> None:
  import pandas as pd  # which the tables of pages do not need

  found = pd.DataFrame.from_dict(rows, orient="index")
  print(found.to_string(float_format="{:,.4g}".format, na_rep=""))


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
  """Writes a table in Markdown.

  >>> print(table(["a", "b"], [["1", "2"]]))
  | a | b |
  | --- | --- |
  | 1 | 2 |
  """
  every = [header, ["---"] * len(header), *lines]
  return "\n".join(f"| {' | '.join(cells)} |" for cells in every)


def page(module: str, name: str, **given: Any) -> str:
  """Fills a template of a page, which is in a folder beside the file of a module."""
  path = Path(module).with_name("templates") / f"{name}.md"
  return path.read_text().removesuffix("\n").format(**given)
