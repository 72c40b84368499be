"""The size of messages by ``message_bytes="auto"``, and the order of their leaves."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jax.tree_util import KeyPath

from gradcomp._src.checks import static_integer

MessageBytes = int | Literal["auto"] | None

_NUMBER = re.compile("[0-9]+")

# A message takes time beside that of its bytes: two collectives, and the kernels of its
# codecs, 20 to 50 us on a GPU. 4 MiB take 340 us at 100 Gbit/s. They are 8 M elements
# at 4 bits; PyTorch's DDP sends 6.6 M at once, 25 MB.
_LEAST = 4 * 2**20
# Each of N owners receives a share, which starts anew. That takes about 10 us, like
# 128 KiB at 100 Gbit/s.
_LEAST_SHARE = 128 * 2**10
# All messages but the last can travel under the backward pass. More of them would hide
# another 16th at most, but each takes its time to trace and to compile.
_MOST = 16


def as_message_bytes(value: Any) -> MessageBytes:
  """Returns the option ``message_bytes``; ValueError for values that it cannot have."""
  if value is None:
    return None
  if isinstance(value, str) and value == "auto":
    return "auto"
  rule = 'a number of bytes, 0 or more, "auto", or None for one message'
  return static_integer("message_bytes", rule, value, least=0)


def automatic_bytes(payload: int, workers: int) -> int:
  """Returns the largest of 4 MiB, 128 KiB a worker, and a 16th of the payload."""
  return max(_LEAST, _LEAST_SHARE * workers, -(-payload // _MOST))


def cut(
  message_bytes: MessageBytes,
  sizes: Mapping[int, int],
  paths: Sequence[KeyPath],
  workers: int,
) -> list[list[int]]:
  """Cuts leaves, by their numbers and bytes, into messages: the numbers in each."""
  if message_bytes is None:
    return [list(sizes)]
  if message_bytes != "auto":  # a leaf that is larger has a message of its own
    return _pieces(sizes, lambda filled, size: filled + size > message_bytes)
  payload = sum(sizes.values())
  least = automatic_bytes(payload, workers)
  if payload <= least:
    return [list(sizes)]
  own = {i: sizes[i] for i in _last_first(paths) if i in sizes}
  pieces = _pieces(own, lambda filled, _: filled >= least)
  # The backward pass of less than a quarter is too short for a message to hide in.
  if len(pieces) > 1 and 4 * sum(sizes[i] for i in pieces[-1]) < least:
    pieces[-2:] = [pieces[-2] + pieces[-1]]
  return [sorted(piece) for piece in reversed(pieces)]


def _pieces(
  sizes: Mapping[int, int], full: Callable[[int, int], bool]
) -> list[list[int]]:
  """Cuts leaves where ``full(bytes so far, bytes of the next leaf)``."""
  pieces: list[list[int]] = []
  filled = 0
  for i, size in sizes.items():
    if not pieces or full(filled, size):
      pieces.append([])
      filled = 0
    pieces[-1].append(i)
    filled += size
  return pieces


def _last_first(paths: Sequence[KeyPath]) -> list[int]:
  """Orders leaves by the backward pass, as far as a tree shows it: the last first.

  Names that differ in numbers have the order of these: "layer_10" comes after
  "layer_9", whether they are keys of a dict or fields.
  """
  first: dict[Any, int] = {}  # the first leaf below each node, and each kind of name
  for i, path in enumerate(paths):
    for depth, step in enumerate(path):
      first.setdefault(path[: depth + 1], i)
      first.setdefault((path[:depth], _text(step)), i)

  def rank(i: int) -> list[tuple[int, list[int], int]]:
    path, steps = paths[i], []
    for depth, step in enumerate(path):
      own = first[path[: depth + 1]]
      text = _text(step)
      group = own if text is None else first[path[:depth], text]
      steps.append((group, [int(x) for x in _NUMBER.findall(_name(step))], own))
    return steps

  return sorted(range(len(paths)), key=rank, reverse=True)


def _name(step: Any) -> str:
  """Returns the name of a step in a path; "" if it has none, but a number."""
  name = getattr(step, "key", getattr(step, "name", None))
  return name if isinstance(name, str) else ""


def _text(step: Any) -> str | None:
  """Returns a name without the values of its numbers, or None."""
  return _NUMBER.sub("0", _name(step)) or None
