"""The computation of a worker in an exchange, as counts."""

from fractions import Fraction
from typing import NamedTuple


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
