"""A reader of HLO text: a module's computations, and the instructions of each."""

# Not XLA's own parser, which jaxlib has as a private hlo_module_from_text: not every
# JAX has one, and it is as old as jaxlib, while libtpu and plugins write newer text. It
# is the oracle of our tests. As for XLA, line breaks and blanks mean nothing here: an
# instruction goes on while a comma follows an attribute. What is not in this grammar is
# refused, so that a text that was cut or mended by hand loses no collective in silence.

import re
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"'
_COMMENT = re.compile(rf"({_STRING})|//[^\n]*|/\*.*?\*/", re.DOTALL)
_NESTED = re.compile(rf"{_STRING}|'[^'\n]*'|[()\[\]{{}},]", re.DOTALL)
_ATOM = re.compile(rf"{_STRING}|[^\s()\[\]{{}},\"]+", re.DOTALL)
# A value goes on behind blanks in "[2,4] <= [8]", "mesh['a'=8] {'a'}", "f32[8] {0}".
_GOES_ON = re.compile(r"\s+(?=[\[(<]|T\(|\{\s*['\d:}])")
_BLANK = re.compile(r"\s*")
_NEEDLESS = re.compile(  # blanks beside signs, outside of strings
  rf"({_STRING}|'[^'\n]*')|(?<=[,{{\[(=:])\s+|\s+(?=[,}}\])=<{{])", re.DOTALL
)
_NAME = re.compile(r"%?([\w.\-]+)")
_NAMES = re.compile(r"\{\s*(?:%?[\w.\-]+\s*(?:,\s*%?[\w.\-]+\s*)*)?\}")
_ROOT = re.compile(r"ROOT\s+(?=%?[\w.\-]+\s*=)")
_OPCODE = re.compile(r"([a-z][\w\-]*)\s*(?=\()")
_ENTRY = re.compile(r"ENTRY(?=[\s{(%])")
_ARROW = re.compile(r"->\s*\w*")  # in front of the brackets of a result's type
_LAYOUT = re.compile(r"\s*(?=\{\s*[\d:}])")  # {1,0}, {:T(128)}, {}, and no body
_THREAD = re.compile(rf",\s*execution_thread\s*=\s*{_STRING}")  # of a computation
_COMMA, _EQUALS, _OPEN, _CLOSE = map(re.compile, (",", "=", r"\{", r"\}"))
_TABLES = re.compile(  # of source lines, between a header and the first computation
  r"(?:FileNames|FunctionNames|FileLocations|StackFrames)"
  rf"(?:\s+\d+\s+(?:{_STRING}|\{{[^{{}}]*\}}))*",
  re.DOTALL,
)
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
  if not (match := re.search(r"^\s*HloModule\b", text, re.MULTILINE)):
    raise unreadable("one HloModule with one ENTRY", text[:40])
  plain = _COMMENT.sub(lambda found: found[1] or " ", text[match.end() :])
  return _Reader(plain).module()


def unreadable(rule: str, got: str) -> ValueError:
  """Returns the error for a text that breaks a rule."""
  return ValueError(
    f"`program` must be optimized HLO with {rule}, got {got!r}; pass "
    "jax.jit(step).lower(...).compile(), and report it to gradcomp if you did."
  )


class _Reader:
  """A place in a text, and the computations that have been read in front of it."""

  def __init__(self, text: str):
    self.text = text
    self.at = 0
    self.computations: dict[str, tuple[Instruction, ...]] = {}

  def module(self) -> Module:
    """Reads all that stands behind the word HloModule."""
    self.take(_NAME)
    header, entries = self.attributes(), []
    while self.take(_TABLES):
      pass
    while self.next():
      is_entry = self.take(_ENTRY)
      match = self.take(_NAME)
      name = match[1] if match else ""  # XLA can leave it out
      if name == "HloModule":
        raise unreadable("one HloModule with one ENTRY", f"{name} twice")
      if self.next() == "(":
        self.signature()
      name = self.body(name)
      entries += [name] if is_entry else []
    if len(entries) != 1:  # a text without ENTRY may have lost its end
      raise unreadable("one HloModule with one ENTRY", self.text[:40].strip())
    return Module(header, self.computations, entries[0])

  def signature(self) -> None:
    """Passes over "(x: f32[8], ...) -> f32[8]{0}"."""
    self.group()
    self.expect(_ARROW, "-> in a signature")
    self.group()
    if self.take(_LAYOUT):
      self.group()

  def body(self, name: str = "") -> str:
    """Reads the instructions between braces; returns the name of the computation."""
    self.expect(_OPEN, "{ in front of instructions")
    found: dict[str, Instruction] = {}
    while self.next() != "}":
      instruction = self.instruction()
      if instruction.name in found:
        raise unreadable("one instruction of a name", instruction.name)
      found[instruction.name] = instruction
    self.at += 1
    self.take(_THREAD)
    name = name or f"unnamed.{len(self.computations)}"
    if name in self.computations:
      raise unreadable("one computation of a name", name)
    self.computations[name] = tuple(found.values())
    return name

  def instruction(self) -> Instruction:
    """Reads "ROOT %name = type opcode(arguments), attribute=value, ..."."""
    is_root = bool(self.take(_ROOT))
    name = self.expect(_NAME, "instructions in computations that end")[1]
    self.expect(_EQUALS, "= behind the name of each instruction")
    type_ = self.value()
    opcode = self.expect(_OPCODE, "a type and an opcode of each instruction")[1]
    inside = _NEEDLESS.sub(r"\1", self.group())[1:-1]
    arguments = (inside,) if opcode == "constant" else tuple(_split(inside))
    found = Instruction(name, type_, opcode, arguments, self.attributes(), is_root)
    if nested := [x for x in found.operands if not _NAME.fullmatch(x)]:
      raise unreadable("each instruction by itself", ", ".join(nested))
    return found

  def attributes(self) -> dict[str, str]:
    """Reads ", name=value" as long as a comma follows."""
    found: dict[str, str] = {}
    while self.take(_COMMA):
      name = self.expect(_NAME, "names of attributes")[1]
      self.expect(_EQUALS, "= behind the name of each attribute")
      found[name] = self.called() if name in _CALLING else self.value()
    return found

  def called(self) -> str:
    """Reads names of computations, or the computations themselves in their place."""
    if self.next() != "{":
      return self.value()
    if names := self.take(_NAMES):
      return _NEEDLESS.sub(r"\1", names[0])
    if _BLANK.sub("", self.text[self.at : self.at + 200])[1:2] != "{":
      return self.body()
    self.at += 1
    bodies = [self.body()]
    while self.take(_COMMA):
      bodies.append(self.body())
    self.expect(_CLOSE, "} behind computations")
    return ", ".join(bodies)

  def value(self) -> str:
    """Reads a type or the value of an attribute, up to a comma or the next word."""
    self.next()
    start = self.at
    while self.at < len(self.text):
      if self.text[self.at] in _CLOSING:
        self.group()
        continue
      match = _ATOM.match(self.text, self.at) or _GOES_ON.match(self.text, self.at)
      if not match:
        break
      self.at = match.end()
    if start == self.at:
      self.fail("a value behind each =")
    return _NEEDLESS.sub(r"\1", self.text[start : self.at])

  def group(self) -> str:
    """Reads from a bracket to the one that closes it."""
    closing: list[str] = []
    if self.next() in _CLOSING:
      for match in _NESTED.finditer(self.text, self.at):
        if match[0] in _CLOSING:
          closing.append(_CLOSING[match[0]])
        elif match[0] in ")]}" and match[0] != closing.pop():
          break
        if not closing:
          start, self.at = self.at, match.end()
          return self.text[start : self.at]
    self.fail("brackets that close")

  def next(self) -> str:
    """Passes over blanks; returns the next character, or nothing at the end."""
    match = _BLANK.match(self.text, self.at)
    self.at = match.end() if match else self.at
    return self.text[self.at : self.at + 1]

  def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
    """Reads a pattern if it follows."""
    self.next()
    if match := pattern.match(self.text, self.at):
      self.at = match.end()
    return match

  def expect(self, pattern: re.Pattern[str], rule: str) -> re.Match[str]:
    """Reads a pattern, or fails by a rule."""
    return self.take(pattern) or self.fail(rule)

  def fail(self, rule: str) -> NoReturn:
    """Raises the error for the text at this place."""
    raise unreadable(rule, self.text[self.at : self.at + 60])


def _split(text: str) -> Iterator[str]:
  """Yields the parts between commas outside of brackets, with single blanks."""
  depth = start = 0
  for match in _NESTED.finditer(text):
    if match[0] == "," and not depth:
      yield " ".join(text[start : match.start()].split())
      start = match.end()
    elif len(match[0]) == 1 and match[0] != ",":
      depth += 1 if match[0] in _CLOSING else -1
  if text[start:].strip():
    yield " ".join(text[start:].split())
