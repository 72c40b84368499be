"""A parser of optimized HLO text for the collectives of a program."""

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from gradcomp._src.report.collectives import (
  SHARE_SENT,
  SIZES,
  Collective,
  Shapes,
  connected,
)

# "ENTRY %main (x: f32[8]) -> f32[8] {" or in short "ENTRY main {".
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
# "ROOT %name = type opcode(rest": in no type does a word touch a parenthesis.
_INSTRUCTION = re.compile(r"(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
# "body=%region_0" or "branch_computations={%a, %b}".
_CALLED = re.compile(
  r"\b(calls|to_apply|body|condition|true_computation|false_computation"
  r"|branch_computations|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_NAME = re.compile(r"[\w.\-]+")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")  # f32[8,128]; <=8 is a bound
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


class Groups(NamedTuple):
  """The groups of devices that exchange with each other.

  ``workers`` is the size of the largest group. ``members`` are the devices of each, or
  None if they are unknown.
  """

  workers: int
  members: tuple[tuple[int, ...], ...] | None


class Program(NamedTuple):
  """The collectives of a program with their groups, and the number of its devices."""

  collectives: tuple[tuple[Collective, Groups], ...]
  devices: int


def parse_program(text: str) -> Program:
  """Returns the collectives of optimized HLO, including called computations.

  Raises:
    ValueError: the text is not optimized HLO, or some of its bytes would be missed.
  """
  computations, entry, devices = _parse(text)

  def walk(
    name: str, times: int, loop: bool, branch: bool
  ) -> Iterator[tuple[Collective, Groups]]:
    if name not in computations:
      raise _unreadable("every computation that it calls", name)
    types = {name: type_ for name, type_, _, _ in computations[name]}
    for _, _, opcode, rest in computations[name]:
      kind = opcode.removesuffix("-start")
      plain = _STRING.sub("", rest)
      if kind in SHARE_SENT:
        op_name = re.search(rf"op_name=({_STRING.pattern})", rest)
        groups = _groups(kind, plain, devices)
        collective = Collective(
          kind=kind,
          operands=_operands(kind, plain, types),
          workers=groups.workers,
          times=times,
          in_loop=loop,
          in_branch=branch,
          scope=op_name[1][1:-1] if op_name else "",
        )
        yield collective, groups
      elif not opcode.endswith(("-update", "-done")):  # these repeat a -start's calls
        trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', rest)
        inner_loop = loop or (opcode == "while" and not trips)
        inner_branch = branch or opcode == "conditional"
        for attribute, called in _CALLED.findall(plain):
          runs = int(trips[1]) + (attribute == "condition") if trips else 1
          for callee in _NAME.findall(called):
            yield from walk(callee, times * runs, inner_loop, inner_branch)

  return Program(tuple(walk(entry, 1, False, False)), devices)


def _parse(text: str) -> tuple[dict[str, list[tuple[str, ...]]], str, int]:
  """Returns computations as groups of ``_INSTRUCTION``, the entry, and the devices."""
  computations: dict[str, list[tuple[str, ...]]] = {}
  body: list[tuple[str, ...]] = []
  entries = []
  for line in text.splitlines():
    line = re.sub(r"/\*.*?\*/", "", line).strip()  # /*index=5*/
    if match := _INSTRUCTION.match(line):
      body.append(match.groups())
    elif match := _COMPUTATION.match(line):
      body = computations.setdefault(match[2], [])
      entries += [match[2]] if match[1] else []
  header = re.findall(r"^HloModule .*$", text, re.MULTILINE)
  if len(header) != 1 or len(entries) != 1:
    raise _unreadable("one HloModule with one ENTRY", text[:40])
  counts = re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", header[0])
  return computations, entries[0], math.prod(map(int, counts))


def _operands(kind: str, rest: str, types: dict[str, str]) -> Shapes:
  """Returns dtype and shape of each operand."""
  # Not from the type of the instruction: the type of a -start holds results, too.
  text = re.sub(r"\{[^{}]*\}", "", rest).partition(")")[0]  # no {1,0:T(8,128)}
  arrays = _ARRAY.findall(text)
  if not arrays:  # names without types, as XLA prints them today
    found = [types.get(name, "undefined[]") for name in _NAME.findall(text)]
    arrays = _ARRAY.findall(" ".join(found))
  if unknown := {dtype for dtype, _ in arrays} - SIZES.keys():
    raise _unreadable("known dtypes", f"{', '.join(unknown)} in {kind}({text})")
  if kind == "ragged-all-to-all":
    arrays = arrays[:1]  # then come the output's buffer, offsets and sizes
  return tuple((dtype, tuple(map(int, re.findall(r"\d+", s)))) for dtype, s in arrays)


def _groups(kind: str, rest: str, devices: int) -> Groups:
  """Returns the replica groups, in XLA's four notations, or as pairs."""
  match = re.search(r"source_target_pairs=\{([{},\d]*)\}", rest)
  if kind == "collective-permute" and match:
    pairs = re.findall(r"(\d+),(\d+)", match[1])
    return _listed(connected([(int(a), int(b)) for a, b in pairs]))
  if "replica_groups=" not in rest or "replica_groups={}" in rest:
    return _listed([range(devices)])
  if match := re.search(r"replica_groups=\{([{},\d]*)\}", rest):  # {{0,1},{2,3}}
    groups = match[1].split("},")
    return _listed([map(int, re.findall(r"\d+", group)) for group in groups])
  # [2,4]<=[8], or [2,4]<=[4,2]T(1,0): the devices in order, reshaped and transposed.
  iota = r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
  if match := re.search(iota, rest):
    numbers = _laid_out(match[2], match[3])
    return _listed(numbers.reshape(_integers(match[1])).tolist())
  # mesh['a'=2,'b'=8] {'a','b':(1)4}: all of the axis a and 4 of the 8 of b.
  if match := re.search(r"replica_groups=mesh\[(.*?)\](.*?) \{(.*?)\}", rest):
    sizes = {axis: int(n) for axis, n in re.findall(r"'([^']*)'=(\d+)", match[1])}
    parts = [
      (axis, int(before or 1), int(size or sizes.get(axis, 0)))
      for axis, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", match[3])
    ]
    if all(axis in sizes and size for axis, _, size in parts):
      return _along(sizes, match[2], parts)
  raise _unreadable("known replica groups", f"{kind}({rest}")


def _along(
  sizes: dict[str, int], order: str, parts: list[tuple[str, int, int]]
) -> Groups:
  """Returns groups along parts of the axes of a mesh in the text.

  ``sizes`` are the axes of the mesh, and ``order`` the text behind them, such as ``,
  device_ids=([2,4]T(1,0))``. A part has its axis, the product of the parts before, and
  its size.
  """
  workers = math.prod(size for _, _, size in parts)
  match = re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", order)
  unknown = "device_ids" in order and not match
  if unknown or len({axis for axis, _, _ in parts}) < len(parts):
    return Groups(workers, None)
  shape: list[int] = []
  inside: list[int] = []
  for axis, size in sizes.items():
    own = [(before, part) for name, before, part in parts if name == axis]
    before, part = own[0] if own else (1, 1)
    inside.append(len(shape) + 1)
    shape += [before, part, size // (before * part)]
  numbers = np.arange(math.prod(sizes.values()))
  if match:
    numbers = _laid_out(match[1], match[2])
  cells = np.moveaxis(numbers.reshape(shape), inside, range(-len(inside), 0))
  return _listed(cells.reshape(-1, workers).tolist())


def _laid_out(shape: str, order: str | None) -> np.ndarray:
  """Returns device numbers, ``arange`` in a shape that is then transposed."""
  sizes = _integers(shape)
  numbers = np.arange(math.prod(sizes)).reshape(sizes)
  return numbers.transpose(_integers(order)) if order else numbers


def _integers(text: str) -> list[int]:
  return [int(x) for x in text.split(",")]


def _listed(groups: Iterable[Iterable[int]]) -> Groups:
  """Returns groups from an iterable of the devices of each."""
  members = tuple(tuple(group) for group in groups)
  return Groups(max(map(len, members), default=1), members)


def _unreadable(rule: str, got: str) -> ValueError:
  """Returns the error for a text that breaks a rule."""
  return ValueError(
    f"`program` must be optimized HLO with {rule}, got {got!r}; pass "
    "jax.jit(step).lower(...).compile(), and report it to gradcomp if you did."
  )
