"""Cuts programs to their collectives and products, for tests.

  python -m benchmarks.compilers --tables overlap --dump FOLDER
  python -m benchmarks.compilers.cut FOLDER [--output FOLDER]

writes tests/report/hlo/scheduled/. They have the order of the programs, and the
types, flops and cycles of what is left.
"""

import pathlib
import re

from benchmarks.common import cli
from gradcomp._src.report import collectives, hlo_text
from gradcomp._src.report.overlap_report import work_of

FOLDER = cli.ROOT / "tests" / "report" / "hlo" / "scheduled"
# What is written, by the names of the programs' files.
FILES = {
  "v5e_a_message_a_layer": "v5e",
  "v5p_a_message_a_layer_xla_tpu_enable_async_all_to_all": "v5p_async",
  "tpu7x_a_message_a_layer": "tpu7x",
  "2_slices_of_v5e_a_message_a_layer": "two_slices",
  "H100_a_message_a_layer": "h100",
}
_HEADER = ("is_scheduled", "replica_count", "num_partitions")
# What is left of attributes.
_KEPT = {
  "metadata": r'(?<!\w)op_name="[^"]*"',
  "backend_config": r'"estimated_cycles":"\d+"|"is_sync":\w+',
}


def cut(text: str) -> str:
  """Returns a text with less in it, that has the same collectives and products."""
  module = hlo_text.read_module(text)
  known, entry = {}, module.computations[module.entry]
  kept = [x for x in entry if x.opcode == "after-all" or _matters(known, entry, x)]
  called: set[str] = set()
  names = {y for x in kept for y in x.called}
  while new := names - called:
    called |= new
    names = {y for name in new for x in module.computations[name] for y in x.called}
  header = ", ".join(
    f"{key}={module.attributes[key]}" for key in _HEADER if key in module.attributes
  )
  parts = [f"HloModule cut, {header}"]
  for name, body in module.computations.items():
    if name in called:
      parts.append("\n".join([f"%{name} {{", *map(_line, body), "}"]))
  own = {x.name for x in kept}
  read = dict.fromkeys(y for x in kept for y in x.operands if y not in own)
  given = enumerate(entry.named[name] for name in read)
  lines = [f"  %{x.name} = {x.type} parameter({i})" for i, x in given]
  parts.append("\n".join([f"ENTRY %{module.entry} {{", *lines, *map(_line, kept), "}"]))
  return "\n\n".join(parts) + "\n"


def _matters(known: dict, body: hlo_text.Computation, x: hlo_text.Instruction) -> bool:
  """Returns whether an instruction is a collective, a part of one, or a product."""
  kind = x.opcode.partition("-start")[0].partition("-done")[0].partition("-update")[0]
  if kind in collectives.SHARE_SENT or kind in ("send", "recv", "call", "async"):
    return True
  if x.attributes.get("custom_call_target", "").startswith('"AsyncCollective'):
    return True
  work = work_of(body, x, known)
  return bool(work and work.flops) or any(
    _matters(known, callee, y) for callee in body.called(x) for y in callee
  )


def _line(x: hlo_text.Instruction) -> str:
  """Returns an instruction with less in its configuration and metadata."""
  attributes = {}
  for key, value in x.attributes.items():
    if key in _KEPT:
      found = re.findall(_KEPT[key], value)
      attributes |= {key: f"{{{','.join(found)}}}"} if found else {}
    elif key not in ("output_to_operand_aliasing", "sharding"):
      attributes[key] = value
  said = "".join(f", {key}={value}" for key, value in attributes.items())
  root = "ROOT " * x.is_root
  return f"  {root}%{x.name} = {x.type} {x.opcode}({', '.join(x.arguments)}){said}"


def main() -> None:
  parser = cli.parser(__doc__, output=FOLDER)
  parser.add_argument("programs", type=pathlib.Path, help="folder with whole programs")
  options = parser.parse_args()
  folder = options.output or FOLDER
  folder.mkdir(parents=True, exist_ok=True)
  for source, file in FILES.items():
    text = (options.programs / f"{source}.hlo").read_text()
    small = cut(text)
    (folder / f"{file}.hlo").write_text(small)
    print(f"{file}: {len(small):,} of {len(text):,} bytes", flush=True)


if __name__ == "__main__":
  main()
