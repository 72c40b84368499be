"""A number of a paper, beside what its model gives: see models/compare.py."""

from typing import Literal, NamedTuple

# Whether a printed number can be right:
#   agrees   the model gives it, within the tolerance
#   wrong    the paper's own inputs give another number
#   open     it depends on what the paper does not print
#   ours     the paper prints none
Verdict = Literal["agrees", "wrong", "open", "ours"]


class Number(NamedTuple):
  """A number of a paper.

  Attributes:
    paper: its first author.
    what: the quantity, with its unit.
    inputs: what it was computed from.
    ours: what the model gives.
    printed: the paper's number, if there is one.
    verdict: whether it can be right.
    tolerance: relative, for those that agree.
    why: the reason of the tolerance or of another verdict.
  """

  paper: str
  what: str
  inputs: str
  ours: float
  printed: float | None = None
  verdict: Verdict = "ours"
  tolerance: float = 0.0
  why: str = ""

  @property
  def difference(self) -> float | None:
    """Ours over the printed number, less 1; None without a printed number."""
    return None if self.printed is None else self.ours / self.printed - 1

  @property
  def missed(self) -> bool:
    """True if the model does not give a number that it should give."""
    return self.verdict == "agrees" and not abs(self.difference) <= self.tolerance


class Paper:
  """Collects the numbers of a paper, in the order in which they are added."""

  def __init__(self, name: str):
    self.name = name
    self.numbers: list[Number] = []

  def agrees(
    self,
    what: str,
    inputs: str,
    ours: float,
    printed: float,
    tolerance: float,
    why: str,
  ) -> None:
    """Adds a number that the model must give within a relative tolerance."""
    row = Number(self.name, what, inputs, ours, printed, "agrees", tolerance, why)
    self.numbers.append(row)

  def wrong(
    self, what: str, inputs: str, ours: float, printed: float, why: str
  ) -> None:
    """Adds a printed number that the paper's own inputs contradict."""
    row = Number(self.name, what, inputs, ours, printed, "wrong", why=why)
    self.numbers.append(row)

  def unknown(
    self, what: str, inputs: str, ours: float, printed: float | None, why: str
  ) -> None:
    """Adds a number that depends on what the paper does not print."""
    row = Number(self.name, what, inputs, ours, printed, "open", why=why)
    self.numbers.append(row)

  def ours(self, what: str, inputs: str, ours: float, why: str = "") -> None:
    """Adds a number that the paper does not print."""
    self.numbers.append(Number(self.name, what, inputs, ours, why=why))
