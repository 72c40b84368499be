"""Which exchange: what can be asked for, and what "auto" takes."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, cast

from gradcomp import sums
from gradcomp.codecs import LeafCodec
from gradcomp.exchange._all_gather import AllGather
from gradcomp.exchange._all_reduce import AllReduce
from gradcomp.exchange._exchange import Exchange
from gradcomp.exchange._hierarchical import Hierarchical
from gradcomp.exchange._local import Local
from gradcomp.exchange._ring import Ring
from gradcomp.exchange._two_shot import TwoShot
from gradcomp.layout import Layout
from gradcomp.sums import ReducibleSum
from gradcomp.workers import AxisName

ExchangeName = Literal[
  "auto", "all_gather", "two_shot", "psum", "ring", "hierarchical", "local"
]

# Below this many bytes from all workers together, a second stage costs more in latency
# than it saves: two messages of 64 KiB take 1 ms at 1 Gbit/s, a stage about 0.1 ms.
_TINY_MESSAGE = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Auto:
  """The exchange that fits a message: see :func:`choose`.

  Attributes:
    feedback: of :class:`TwoShot`, where that is what fits.
  """

  feedback: bool = True

  name: ClassVar[str] = "auto"
  owners: ClassVar[bool] = False  # not before it is known to what it comes
  of_leaves: ClassVar[bool] = True
  sends: ClassVar[bool] = True

  def __post_init__(self) -> None:
    TwoShot(feedback=self.feedback)

  @property
  def keeps(self) -> bool:
    return self.feedback


_SHORT_FORMS: dict[str, Callable[[], Any]] = {
  kind.name: kind
  for kind in (Auto, AllGather, TwoShot, AllReduce, Ring, Hierarchical, Local)
}


def as_exchange(given: Any) -> Auto | Exchange:
  """Returns an exchange as it is, or the one of a short form, with its defaults.

  Raises:
    ValueError: it is neither.

  Example:
    >>> as_exchange("two_shot")
    TwoShot(feedback=True)
  """
  if isinstance(given, str) and given in _SHORT_FORMS:
    return _SHORT_FORMS[given]()
  if not isinstance(given, type) and isinstance(given, Auto | Exchange):
    return given
  raise ValueError(
    f"`exchange` must be one of {tuple(_SHORT_FORMS)}, or an exchange like "
    f"gradcomp.exchange.TwoShot(), got {given!r}."
  )


def check_exchange(
  exchange: Auto | Exchange, codec: LeafCodec, axis_name: AxisName | None
) -> None:
  """Raises ValueError for what the codec's sums or the axes do not allow."""
  if isinstance(exchange, Auto):
    return
  refusal = sums.facts(codec).refusals.get(exchange.way)
  if refusal:
    raise ValueError(f'`exchange` must not be "{exchange.name}" for {refusal}')
  exchange.check_axes(axis_name)


class Choice(NamedTuple):
  """An exchange, and why."""

  exchange: Exchange
  reason: str


def choose(exchange: Auto | Exchange, layout: Layout, workers: int) -> Choice:
  """Returns the exchange behind ``Auto()``; one that was asked for as it is.

  1. Where every leaf is dense float32 there is nothing to encode: ``psum``.
  2. Sums that a backend can add are added by it: ``psum``. Or, of codes, by owners, if
     their packed sums are shorter: ``two_shot``.
  3. Up to two workers, where the bytes are equal, and for messages that are tiny:
     ``all_gather``, which encodes once. A worker sends ``(N-1) c`` bytes by it. Also
     for sparse codecs, whose owners would drop what other workers chose, as long as it
     sends less than a plain mean; and where a codec does not let owners add.
  4. Else ``two_shot``: ``2 (N-1)/N c`` bytes, whatever N is, for a second encoding.

  ``ring`` sends as much as ``two_shot`` and encodes N times; ``hierarchical`` needs to
  know which links are fast. They are for those who ask for them.
  """
  if not isinstance(exchange, Auto):
    return Choice(exchange, "asked for")
  every = [sums.of(codec) for codec in layout.codecs]
  coded = [total for total in every if not total.plain]
  if not coded:
    return Choice(AllReduce(), "all is dense float32, and there is nothing to encode")
  if not any("reduced" in total.refusals for total in coded):
    if not all(total.exact for total in coded):
      return Choice(
        AllReduce(), "all workers send the same elements, whose values are added"
      )
    pairs = zip(cast(list[ReducibleSum], every), layout.rows, strict=True)
    if all(total.reduces_shorter(rows, workers) for total, rows in pairs):
      return Choice(AllReduce(), "sums of codes are exact, and integers send less")
    return Choice(
      TwoShot(feedback=exchange.feedback),
      "sums of codes are exact, and packed they send less",
    )
  if any(total.drops for total in coded):
    if workers * layout.nbytes < 8 * layout.elements:
      return Choice(AllGather(), "it adds up what all workers chose, in one encoding")
  return reencoding(exchange, layout, workers)


def reencoding(exchange: Auto | Exchange, layout: Layout, workers: int) -> Choice:
  """Returns the exchange by the rules 3 and 4."""
  if workers <= 2:
    return Choice(AllGather(), "up to two workers it sends no more, and encodes once")
  if workers * layout.nbytes <= _TINY_MESSAGE:
    return Choice(AllGather(), "the message is tiny, and a second stage takes longer")
  if any("owned" in sums.of(codec).refusals for codec in layout.codecs):
    return Choice(AllGather(), "a codec of the message allows no second encoding")
  return Choice(TwoShot(feedback=exchange.keeps), "it sends 2/N of all_gather's bytes")
