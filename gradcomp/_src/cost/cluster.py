"""The speeds of a codec, and a cluster of workers with their links."""

import dataclasses
import json
import os
import pathlib
from typing import TYPE_CHECKING

from gradcomp._src.cost.link import Link
from gradcomp._src.cost.rules import above_0, at_least_0, count, instance_of, made_from

if TYPE_CHECKING:  # at run time this would import JAX
  from gradcomp._src.codecs.protocol import LeafCodec


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodecSpeed:
  """The seconds that a codec takes for an element of a leaf.

  Attributes:
    encode: to encode it.
    decode: to decode it, and write it.
    add: to decode it from the payload of one worker, and add it to a sum.
    keep: to add a residual, and to compute the new one, in addition to ``encode``.

  Raises:
    ValueError: one of them is below 0, or not finite.
  """

  encode: float
  decode: float
  add: float
  keep: float = 0.0

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      seconds = at_least_0(field.name, getattr(self, field.name))
      object.__setattr__(self, field.name, seconds)

  @classmethod
  def measure(
    cls, codec: "LeafCodec", elements: int = 1 << 24, *, repeats: int = 5
  ) -> "CodecSpeed":
    """Measures a codec on the first device of this process, in less than 5 s.

    All cores of a CPU work for it: see :meth:`times` for processes that share them.

    Args:
      codec: the codec.
      elements: of a matrix of normal numbers, which is encoded, rounded up to whole
        rows.
      repeats: the number of times, for a median.

    Returns:
      The seconds an element.

    Raises:
      ValueError: a number is below 1.
    """
    from gradcomp._src.cost.measure import measured_speed

    return measured_speed(codec, elements, repeats)

  def times(self, factor: float) -> "CodecSpeed":
    """Returns these seconds, multiplied by ``factor``.

    If ``factor`` processes share the cores on which a single one was measured, each
    takes that many times as long.

    Example:
      >>> CodecSpeed(encode=4e-10, decode=2e-10, add=5e-11).times(2).encode
      8e-10
    """
    factor = above_0("factor", factor)
    fields = dataclasses.asdict(self)
    return CodecSpeed(**{name: factor * value for name, value in fields.items()})

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes the speeds to a file, as JSON."""
    pathlib.Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

  @classmethod
  def load(cls, path: str | os.PathLike[str]) -> "CodecSpeed":
    """Reads the speeds that :meth:`save` wrote.

    Raises:
      ValueError: the file holds something else.
    """
    with made_from(path, "CodecSpeed.save") as content:
      return cls(**content)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
  """Workers that exchange gradients, with one kind of link for all of them.

  Attributes:
    workers: N.
    link: the link of each worker.
    inside: a faster link, which connects the workers of a group; None if all traffic
      takes ``link``.
    group_size: the number of consecutive workers in a group; None without ``inside``.
    add: the seconds of one addition of two elements.

  Raises:
    ValueError: a number is out of its range, the groups do not divide the workers, or
      only one of ``inside`` and ``group_size`` is given.
    TypeError: a link is none.
  """

  workers: int
  link: Link
  inside: Link | None = None
  group_size: int | None = None
  add: float = 0.0

  def __post_init__(self) -> None:
    object.__setattr__(self, "workers", count("workers", self.workers))
    instance_of("link", Link, self.link)
    object.__setattr__(self, "add", at_least_0("add", self.add))
    if (self.inside is None) != (self.group_size is None):
      raise ValueError(
        "`group_size` must be given with `inside`, and only then, got "
        f"group_size={self.group_size!r} and inside={self.inside!r}."
      )
    if self.group_size is not None:
      instance_of("inside", Link, self.inside)
      if self.workers % count("group_size", self.group_size):
        raise ValueError(
          f"`group_size` must divide the {self.workers} workers, got {self.group_size}."
        )

  def link_within(self, span: int) -> Link:
    """Returns the link of traffic that stays in rows of ``span`` consecutive workers.

    Traffic that leaves a group at all is timed as if all of it took the slow link.
    """
    if self.inside is None or self.group_size is None or self.group_size % span:
      return self.link
    return self.inside
