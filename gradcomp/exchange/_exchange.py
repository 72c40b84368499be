"""What the transformation asks of an exchange."""

from typing import ClassVar, Protocol, runtime_checkable

from gradcomp.exchange._collectives import Workers
from gradcomp.exchange._contribution import Contribution, Total
from gradcomp.sums import Way
from gradcomp.workers import AxisName


@runtime_checkable
class Exchange(Protocol):
  """A schedule, which says who sends which rows to whom, and who adds them.

  It is a frozen dataclass, whose fields are its options. It never asks what is added:
  that a :class:`gradcomp.sums.Sum` knows.
  """

  name: ClassVar[str]
  """The short form, which users may give in its place."""

  way: ClassVar[Way]
  """How sums come about, which some codecs' sums refuse."""

  owners: ClassVar[bool]
  """True if each of N workers owns an Nth of the rows, whose sums it sends to all."""

  of_leaves: ClassVar[bool]
  """True if what is encoded first are the leaves of one worker, and not sums."""

  sends: ClassVar[bool]
  """True if workers exchange anything."""

  @property
  def keeps(self) -> bool:
    """True if owners keep what their encodings of means lost."""

  def check_axes(self, axis_name: AxisName | None) -> None:
    """Raises ValueError for axes over which it cannot run."""

  def run(self, own: Contribution, workers: Workers) -> Total:
    """Returns the mean, or the sum, of all workers' leaves."""


class WithoutOwners:
  """A base of exchanges in which no worker owns rows, and any axes will do."""

  owners: ClassVar[bool] = False
  sends: ClassVar[bool] = True
  keeps: ClassVar[bool] = False

  def check_axes(self, axis_name: AxisName | None) -> None:
    """Any will do."""
