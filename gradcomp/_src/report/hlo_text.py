"""A reader of HLO text: a module's computations, and the instructions of each."""

# Not XLA's own parser, which jaxlib has as a private hlo_module_from_text: not every
# JAX has one, and it is as old as jaxlib, while libtpu and plugins write newer text. It
# is the oracle of our tests. A text is read as compiled.as_text() prints it, with one
# instruction a line. All else is refused, so that a text that was cut or mended by hand
# loses no collective in silence.

import functools
import itertools
import re
from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple

_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"'
_NESTED = re.compile(rf"{_STRING}|'[^']*'|[()\[\]{{}},\"']")
_NEEDLESS = re.compile(  # numbers of elements, and blanks beside signs; not in strings
  rf"({_STRING}|'[^']*')|/\*.*?\*/ ?|(?<=[,{{\[(=:])\s+|\s+(?=[,}}\])=<{{])"
)
_NAME = re.compile(r"%?([\w.\-]+)")
# An array in the text of a type: its dtype, its sizes, and the bits of a packed one.
ARRAY = re.compile(r"\b([a-z]\w*)\[([^\]]*)\](?:\{[^{}]*?E\((\d+)\)[^{}]*\})?")
_TABLE = re.compile(  # of source lines, between a header and the first computation
  rf"FileNames|FunctionNames|FileLocations|StackFrames|\d+ (?:{_STRING}|\{{[^{{}}]*\}})"
)
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{")
_END = re.compile(rf"\}}(?:, execution_thread={_STRING})?")
_INSTRUCTION = re.compile(r"(ROOT )?%?([\w.\-]+) = (.*)")
_CALL = re.compile(r"(.+?) ([a-z][\w\-]*)\((.*)\)")  # a type, an opcode and arguments
_ATTRIBUTE = re.compile(r"([\w.\-]+)=(.+)")
_SCOPE = re.compile(rf"\bop_name=({_STRING})")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_CALLING = frozenset(
  "calls to_apply body condition true_computation false_computation "
  "branch_computations called_computations".split()
)


class Instruction(NamedTuple):
  """One instruction; texts lack comments, and blanks beside commas and brackets."""

  name: str  # without the percent sign
  type: str  # with layouts: "(f32[8]{0},u32[])"
  opcode: str  # such as "all-gather-start"
  base: str  # the opcode; a start has the opcode of its whole
  # Those between its parentheses: "%x" or "f32[8] %x"; of a constant or a parameter its
  # value or number.
  arguments: tuple[str, ...]
  operands: tuple[str, ...]  # the names of the instructions that it reads
  attributes: dict[str, str]  # by their names: {"replica_groups": "{{0,1}}"}
  # The names of the computations that it calls, by the attribute that has them.
  calls: dict[str, tuple[str, ...]]
  op_name: str  # the names of jax.named_scope around it, and of JAX's primitive
  backend_config: str  # of the compiler's back end, JSON or not
  hints: str  # what the program's maker hands to the compiler
  is_root: bool  # the result of its computation

  @property
  def called(self) -> list[str]:
    """The names of all computations that it calls."""
    return [*itertools.chain(*self.calls.values())]

  @property
  def chains(self) -> list[str]:
    """The number of an asynchronous collective that several fusions of a TPU have."""
    return re.findall(r'\bchain_id="?(\w+)', self.hints)

  @property
  def meeting(self) -> str | None:
    """The name under which a send and a receive meet."""
    match = re.search(r'rendezvous="([^"]*)"', self.hints)
    return match[1] if match else self.attributes.get("channel_id")


class Computation(tuple[Instruction, ...]):
  """The instructions of a computation, and all of its module, by their names."""

  name: str
  named: dict[str, Instruction]
  others: Mapping[str, "Computation"]

  @functools.cached_property
  def readers(self) -> dict[str, list[int]]:
    """The numbers of the instructions that read each value."""
    found: dict[str, list[int]] = {x.name: [] for x in self}
    for number, x in enumerate(self):
      for name in dict.fromkeys(x.operands):
        found.setdefault(name, []).append(number)
    return found

  @property
  def root(self) -> Instruction:
    """The result: the last instruction where the text marks none."""
    return next((x for x in self if x.is_root), self[-1])

  def called(self, x: Instruction) -> "list[Computation]":
    """Returns the computations that an instruction calls."""
    return [self.others[name] for name in x.called]

  def behind(self, name: str, views: Container[str]) -> Instruction | None:
    """Returns the source of a value, before instructions with these opcodes."""
    found = self.named.get(name)
    while found is not None and found.opcode in views and found.operands:
      found = self.named.get(found.operands[0])
    return found


class Module(NamedTuple):
  """The program of a text."""

  attributes: dict[str, str]  # of the header; with "is_scheduled" texts have order
  computations: dict[str, Computation]  # by name, in the order of the text
  entry: str  # the name of the one where the program begins


def read_module(text: str) -> Module:
  """Returns the module of HLO text; ValueError unless it is exactly one."""
  lines = iter([line for line in map(str.strip, text.splitlines()) if line])
  header = next((line for line in lines if line.startswith("HloModule ")), "")
  computations: dict[str, Computation] = {}
  entries: list[str] = []
  for line in lines:
    if _TABLE.fullmatch(line):
      continue
    if not (head := _HEAD.fullmatch(line)):
      raise unreadable("one HloModule with one ENTRY", line)
    is_entry, name = head.groups()
    if name in computations:
      raise unreadable("one computation of a name", name)
    entries += [name] * bool(is_entry)
    found: dict[str, Instruction] = {}
    for line in lines:
      if found and _END.fullmatch(line):
        break
      x = _instruction(line)
      if x.name in found:
        raise unreadable("one instruction of a name", x.name)
      found[x.name] = x
    else:
      raise unreadable("instructions in computations that end", name)
    computations[name] = body = Computation(found.values())
    body.name, body.named, body.others = name, found, computations
  if not header or len(entries) != 1:  # a text without ENTRY may have lost its end
    raise unreadable("one HloModule with one ENTRY", text[:40].strip())
  for x in itertools.chain(*computations.values()):
    if missing := set(x.called) - computations.keys():
      raise unreadable("every computation that it calls", missing.pop())
  _, *attributes = _parts(_NEEDLESS.sub(r"\1", header))
  return Module(_attributes(attributes), computations, entries[0])


def integers(text: str) -> list[int]:
  """Returns the numbers in a text."""
  return [int(x) for x in re.findall(r"\d+", text)]


def unreadable(rule: str, got: str) -> ValueError:
  """Returns the error for a text that breaks a rule."""
  return ValueError(
    f"`program` must be optimized HLO with {rule}, got {got[:60]!r}; pass "
    "jax.jit(step).lower(...).compile(), and report it to gradcomp if you did."
  )


def _instruction(line: str) -> Instruction:
  """Returns the instruction of a line."""
  match = _INSTRUCTION.fullmatch(line)
  call, *attributes = _parts(_NEEDLESS.sub(r"\1", match[3])) if match else [""]
  made = _CALL.fullmatch(call)
  if match is None or made is None:
    raise unreadable("one instruction a line, as compiled.as_text()", line)
  (root, name, _), (type_, opcode, inside) = match.groups(), made.groups()
  arguments = (inside,) if opcode == "constant" else tuple(_parts(inside))
  known = _attributes(attributes)
  read = () if opcode in ("constant", "parameter") else arguments
  operands = tuple(x.split()[-1].removeprefix("%") for x in read)
  if not all(map(_NAME.fullmatch, operands)):
    raise unreadable("each instruction by itself", line)
  scope = _SCOPE.search(known.get("metadata", ""))
  return Instruction(
    name=name,
    type=type_,
    opcode=opcode,
    base=opcode.removesuffix("-start"),
    arguments=arguments,
    operands=operands,
    attributes=known,
    calls={x: tuple(_NAME.findall(known[x])) for x in known if x in _CALLING},
    op_name=scope[1][1:-1] if scope else "",
    backend_config=known.get("backend_config", ""),
    hints=known.get("frontend_attributes", ""),
    is_root=root is not None,
  )


def _attributes(parts: list[str]) -> dict[str, str]:
  """Returns the values of "name=value" by their names."""
  found = [_ATTRIBUTE.fullmatch(part) for part in parts]
  if None in found:
    raise unreadable("a name and a value of each attribute", ", ".join(parts))
  return {match[1]: match[2] for match in found if match}


def _parts(text: str) -> Iterator[str]:
  """Yields the parts between commas outside of brackets."""
  closing: list[str] = []
  start = 0
  for match in _NESTED.finditer(text):
    if match[0] in _CLOSING:
      closing.append(_CLOSING[match[0]])
    elif match[0] in ")]}\"'" and (not closing or match[0] != closing.pop()):
      raise unreadable("brackets and strings that close", text)
    elif match[0] == "," and not closing:
      yield text[start : match.start()]
      start = match.end()
  if closing:
    raise unreadable("brackets and strings that close", text)
  if text:
    yield text[start:]
