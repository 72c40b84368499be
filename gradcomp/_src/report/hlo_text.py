"""A reader of HLO text: a module's computations, and the instructions of each."""

# Not XLA's own parser, which jaxlib has as a private hlo_module_from_text: not every
# JAX has one, and it is as old as jaxlib, while libtpu and plugins write newer text. It
# is the oracle of our tests. A text is read as compiled.as_text() prints it, with one
# instruction a line. All else is refused, so that a text that was cut or mended by hand
# loses no collective in silence.

import re
from collections.abc import Iterator
from typing import NamedTuple

_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"'
_COMMENT = re.compile(rf"({_STRING})|/\*.*?\*/ ?")  # the numbers of a tuple's elements
_NESTED = re.compile(rf"{_STRING}|'[^']*'|[()\[\]{{}},\"']")
_NEEDLESS = re.compile(  # blanks beside signs, outside of strings
  rf"({_STRING}|'[^']*')|(?<=[,{{\[(=:])\s+|\s+(?=[,}}\])=<{{])"
)
_NAME = re.compile(r"%?([\w.\-]+)")
_TABLE = re.compile(  # of source lines, between a header and the first computation
  rf"FileNames|FunctionNames|FileLocations|StackFrames|\d+ (?:{_STRING}|\{{[^{{}}]*\}})"
)
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{")
_END = re.compile(rf"\}}(?:, execution_thread={_STRING})?")
_INSTRUCTION = re.compile(r"(ROOT )?%?([\w.\-]+) = (.*)")
_CALL = re.compile(r"(.+?) ([a-z][\w\-]*)\((.*)\)")  # a type, an opcode and arguments
_ATTRIBUTE = re.compile(r"([\w.\-]+)=(.+)")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_CALLING = frozenset(
  "calls to_apply body condition true_computation false_computation "
  "branch_computations called_computations".split()
)


class Instruction(NamedTuple):
  """One instruction of a computation.

  Attributes:
    name: without the percent sign.
    type: as the text has it, with layouts: ``"(f32[8]{0}, u32[])"``.
    opcode: such as ``"all-gather-start"``.
    arguments: the texts between its parentheses: ``"%x"`` or ``"f32[8] %x"``, and of a
      constant or a parameter its value or number.
    attributes: the text of each, by its name: ``{"replica_groups": "{{0,1}}"}``.
    is_root: whether it is the result of its computation.

  The texts have no comments, and no blanks beside commas, brackets and equals signs.
  """

  name: str
  type: str
  opcode: str
  arguments: tuple[str, ...]
  attributes: dict[str, str]
  is_root: bool

  @property
  def operands(self) -> tuple[str, ...]:
    """The names of the instructions that it reads."""
    if self.opcode in ("constant", "parameter"):
      return ()
    return tuple(x.split()[-1].removeprefix("%") for x in self.arguments)

  @property
  def calls(self) -> dict[str, tuple[str, ...]]:
    """The names of the computations that it calls, by the attribute that has them."""
    found = {key: self.attributes[key] for key in self.attributes if key in _CALLING}
    return {key: tuple(_NAME.findall(names)) for key, names in found.items()}

  @property
  def backend_config(self) -> str:
    """The text of the configuration for the compiler's back end, JSON or not."""
    return self.attributes.get("backend_config", "")

  @property
  def op_name(self) -> str:
    """The names of ``jax.named_scope`` around it, and of JAX's primitive."""
    match = re.search(rf"\bop_name=({_STRING})", self.attributes.get("metadata", ""))
    return match[1][1:-1] if match else ""


class Module(NamedTuple):
  """The program of a text.

  Attributes:
    attributes: those of the header, by name.
    computations: the instructions of each, by its name, in the order of the text; where
      ``is_scheduled`` is ``"true"`` in ``attributes``, they run in it.
    entry: the name of the computation where the program begins.
  """

  attributes: dict[str, str]
  computations: dict[str, tuple[Instruction, ...]]
  entry: str

  @property
  def replicas(self) -> int:
    """The number of replicas, each of them ``partitions`` devices."""
    return int(self.attributes.get("replica_count", 1))

  @property
  def partitions(self) -> int:
    """The number of partitions of a replica."""
    return int(self.attributes.get("num_partitions", 1))


def read_module(text: str) -> Module:
  """Returns the module of HLO text; ValueError unless it is exactly one."""
  lines = iter([line for line in map(str.strip, text.splitlines()) if line])
  header = next((line for line in lines if line.startswith("HloModule ")), "")
  computations: dict[str, tuple[Instruction, ...]] = {}
  entries: list[str] = []
  for line in lines:
    if _TABLE.fullmatch(line):
      continue
    if not (head := _HEAD.fullmatch(line)):
      raise unreadable("one HloModule with one ENTRY", line)
    is_entry, name = head.groups()
    if name in computations:
      raise unreadable("one computation of a name", name)
    computations[name] = tuple(_instructions(name, lines))
    entries += [name] * bool(is_entry)
  if not header or len(entries) != 1:  # a text without ENTRY may have lost its end
    raise unreadable("one HloModule with one ENTRY", text[:40].strip())
  _, *attributes = _parts(_plain(header))
  return Module(_attributes(attributes), computations, entries[0])


def unreadable(rule: str, got: str) -> ValueError:
  """Returns the error for a text that breaks a rule."""
  return ValueError(
    f"`program` must be optimized HLO with {rule}, got {got[:60]!r}; pass "
    "jax.jit(step).lower(...).compile(), and report it to gradcomp if you did."
  )


def _instructions(computation: str, lines: Iterator[str]) -> Iterator[Instruction]:
  """Yields the instructions of a computation, up to the brace that closes it."""
  names = set[str]()
  for line in lines:
    if _END.fullmatch(line):
      return
    match = _INSTRUCTION.fullmatch(line)
    call, *attributes = _parts(_plain(match[3])) if match else [""]
    made = _CALL.fullmatch(call)
    if match is None or made is None:
      raise unreadable("one instruction a line, as compiled.as_text()", line)
    (root, name, _), (type_, opcode, inside) = match.groups(), made.groups()
    arguments = (inside,) if opcode == "constant" else tuple(_parts(inside))
    known = _attributes(attributes)
    found = Instruction(name, type_, opcode, arguments, known, root is not None)
    if not all(map(_NAME.fullmatch, found.operands)):
      raise unreadable("each instruction by itself", line)
    if name in names:
      raise unreadable("one instruction of a name", name)
    names.add(name)
    yield found
  raise unreadable("instructions in computations that end", computation)


def _attributes(parts: list[str]) -> dict[str, str]:
  """Returns the values of "name=value" by their names."""
  found = [_ATTRIBUTE.fullmatch(part) for part in parts]
  if None in found:
    raise unreadable("a name and a value of each attribute", ", ".join(parts))
  return {match[1]: match[2] for match in found if match}


def _plain(text: str) -> str:
  """Returns a text without comments and needless blanks."""
  return _NEEDLESS.sub(r"\1", _COMMENT.sub(r"\1", text))


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
