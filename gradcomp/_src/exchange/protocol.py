"""The protocol of exchanges, which the transformation relies on."""

from fractions import Fraction
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from gradcomp._src.codecs.sums.sum import Way
from gradcomp._src.exchange.collectives import Workers
from gradcomp._src.exchange.contribution import Contribution, Total
from gradcomp._src.mesh.axes import AxisName


class Work(NamedTuple):
  """The computation of one worker, as parts of the elements of a message.

  Attributes:
    encoded: the elements that it encodes.
    decoded: the elements that it decodes, and writes.
    added: the elements that it decodes from one worker's rows and adds to a sum.
    summed: the float32 elements, or numbers of a codec's own format, that it adds
      without decoding.
  """

  encoded: Fraction = Fraction(0)
  decoded: Fraction = Fraction(0)
  added: Fraction = Fraction(0)
  summed: Fraction = Fraction(0)


CODED_ONCE = Work(encoded=Fraction(1), decoded=Fraction(1))


@runtime_checkable
class Exchange(Protocol):
  """A schedule of sends and additions of rows, a frozen dataclass with its options.

  It does not know the numbers that are added: the sum of the codec does.
  """

  name: ClassVar[str]
  """The short form. Users may give it instead of the exchange."""

  way: ClassVar[Way]
  """The way in which sums come about. The sums of a codec may refuse it."""

  owners: ClassVar[bool]
  """True if each worker owns a share of the rows, and sends their sums to all."""

  of_leaves: ClassVar[bool]
  """True if each worker encodes its leaves before anything is added."""

  sends: ClassVar[bool]
  """True if workers exchange anything."""

  @property
  def keeps(self) -> bool:
    """True if owners keep owner residuals."""

  def check_axes(self, axis_name: AxisName | None) -> None:
    """Raises ValueError if the exchange cannot run over the axes."""

  def run(self, own: Contribution, workers: Workers) -> Total:
    """Returns the mean, or the sum, of all workers' leaves."""

  def work(self, sizes: tuple[int, ...], *, plain: bool) -> Work:
    """Returns a worker's computation, for :mod:`gradcomp.cost`.

    Args:
      sizes: the sizes of the axes.
      plain: whether all leaves are added as they are.
    """


class WithoutOwners:
  """Base class of exchanges that have no owners and run over any axes."""

  owners: ClassVar[bool] = False
  sends: ClassVar[bool] = True
  keeps: ClassVar[bool] = False

  def check_axes(self, axis_name: AxisName | None) -> None:
    """Accepts any axes."""
