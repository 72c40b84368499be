"""The exchanges of users by their short forms, and the choice of "auto"."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from gradcomp._src import checks
from gradcomp._src.exchange.hierarchical import Hierarchical
from gradcomp._src.exchange.layout import Layout
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.exchange.schedules import AllGather, AllReduce, Local, Ring, TwoShot

ExchangeName = Literal[
  "auto", "all_gather", "two_shot", "psum", "ring", "hierarchical", "local"
]

# For up to this many bytes from all workers together, a second stage costs more in
# latency than it saves: two messages of 64 KiB take 1 ms at 1 Gbit/s, a stage about
# 0.1 ms.
_TINY_MESSAGE = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Auto(checks.Checked):
  """Picks the exchange of each message, by codec, sizes and workers.

  The first rule that fits decides. A payload has c bytes.

  1. ``psum``, if only plain float32 is sent: dense leaves, and factors of low rank.
  2. ``psum``, if the backend can add the numbers; ``two_shot``, if they are codes whose
     packed sums take fewer bytes.
  3. ``all_gather``, which encodes once and sends ``(N-1) c`` bytes: for up to two
     workers, where the bytes are equal, for tiny messages, and for codecs that do not
     let owners add. For sparse codecs, as long as it sends less than a plain mean:
     owners would drop entries that other workers chose.
  4. ``two_shot``. A worker sends ``2 (N-1)/N c`` bytes, and the mean is encoded twice.

  ``ring`` and ``hierarchical`` are never picked: ``ring`` sends as much as ``two_shot``
  and encodes N times, and ``hierarchical`` needs to know which links are fast.

  Attributes:
    feedback: the option of :class:`TwoShot`, where it is picked.
  """

  feedback: bool = checks.field(True, checks.FLAG)

  papers: ClassVar[tuple[str, ...]] = ("grubic2018synchronous",)
  name: ClassVar[str] = "auto"
  owners: ClassVar[bool] = False  # unknown until it has picked
  of_leaves: ClassVar[bool] = True
  sends: ClassVar[bool] = True


_SHORT_FORMS: dict[str, Callable[[], Any]] = {
  kind.name: kind
  for kind in (Auto, AllGather, TwoShot, AllReduce, Ring, Hierarchical, Local)
}


def as_exchange(given: Any) -> Auto | Exchange:
  """Returns the exchange of a short form, or an exchange itself; else ValueError."""
  if isinstance(given, str) and given in _SHORT_FORMS:
    return _SHORT_FORMS[given]()
  if not isinstance(given, type) and isinstance(given, Auto | Exchange):
    return given
  raise ValueError(
    f"`exchange` must be one of {tuple(_SHORT_FORMS)}, or an exchange like "
    f"gradcomp.exchange.TwoShot(), got {given!r}."
  )


Choice = tuple[Exchange, str]  # an exchange, and the reason for it


def choose(exchange: Auto | Exchange, layout: Layout, workers: int) -> Choice:
  """Returns the exchange that ``Auto()`` picks; any other exchange as it is."""
  if not isinstance(exchange, Auto):
    return exchange, "asked for"
  coded = [codec.facts for codec in layout.codecs if not codec.facts.plain]
  if not coded:
    return AllReduce(), "all that is sent is plain float32, which is added as it is"
  if not any("reduced" in facts.refusals for facts in coded):
    if not all(facts.exact for facts in coded):
      return AllReduce(), "all workers send the same elements, whose values are added"
    pairs = zip(layout.codecs, layout.rows, strict=True)
    if all(codec.sums.reduces_shorter(rows, workers) for codec, rows in pairs):
      return AllReduce(), "sums of codes are exact, and integers send less"
    owned = TwoShot(feedback=exchange.feedback)
    return owned, "sums of codes are exact, and packed they send less"
  few = workers * layout.nbytes < 8 * layout.elements
  if few and any(facts.drops for facts in coded):
    return AllGather(), "it adds up what all workers chose, in one encoding"
  return reencoding(exchange, layout, workers)


def reencoding(exchange: Auto | Exchange, layout: Layout, workers: int) -> Choice:
  """Returns the exchange that rules 3 and 4 of :class:`Auto` pick."""
  if workers <= 2:
    return AllGather(), "up to two workers it sends no more, and encodes once"
  if workers * layout.nbytes <= _TINY_MESSAGE:
    return AllGather(), "the message is tiny, and a second stage takes longer"
  if any("owned" in codec.facts.refusals for codec in layout.codecs):
    return AllGather(), "a codec of the message allows no second encoding"
  return TwoShot(feedback=exchange.feedback), "it sends 2/N of all_gather's bytes"
