"""Each setting of a codec, by its name."""

from gradcomp.codecs import PowerSGD
from tests.support import laws
from tests.support.cases.codec import CASES, Case

SETTINGS = {laws.name(case.codec): case for case in CASES}
SETTINGS |= {
  laws.name(codec): Case(codec, None, "row")
  for codec in (
    PowerSGD(rank=2, min_rate=1),
    PowerSGD(rank=2, min_rate=1, alternate=True) if hasattr(PowerSGD, "alternate") else PowerSGD(rank=1, min_rate=1),
  )
}
