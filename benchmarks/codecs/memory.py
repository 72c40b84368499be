"""Reads from compiled programs how much memory an update needs while it runs.

  python -m benchmarks.codecs.memory

Compiles the update of one float32 leaf for four workers, with every codec, exchange and
feedback that go together, and the update of 16 such leaves, with and without error
feedback. The state is donated, as `gradcomp.make_train_step` does. Nothing runs. In
multiples of the gradient's bytes:

  payloads   What a worker puts into the collectives, and what it gets from them: the
             operands and results that the compiled program has.
  temporary  What the program holds beyond its arguments and results, by XLA's own
             analysis (`compiled.memory_analysis()`). Payloads are part of it.
  excess     The temporary memory that is no payload. At most 1.5 is the goal.

What --output has already of other codecs and columns stays, unless it was read for
another size or version.
"""

import contextlib
import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import gradcomp
from benchmarks.common import cli, shapes, tables
from benchmarks.links.methods import EXCHANGES, GROUPED
from gradcomp import ErrorFeedback, MomentumFeedback, codecs
from gradcomp._src.core.feedback import Feedback

WORKERS = 4
SHAPE = (1024, 1024)
SEVERAL = 16  # leaves
LIMIT = 1.5  # gradients beside the payloads
CODECS: dict[str, codecs.Codec] = {
  "float32": codecs.Dense(),
  "bfloat16": codecs.Dense(dtype=jnp.bfloat16),
  "QSGD, 4 bits": codecs.QSGD(bits=4),
  "QSGD, fitted levels": codecs.QSGD(bits=4, levels="nonuniform"),
  "QSGD, shared scales": codecs.QSGD(bits=4, share_scale=True),
  "1-bit SGD": codecs.OneBit(),
  "1-bit SGD, per column": codecs.OneBit(per_column=True),
  "TernGrad": codecs.Ternary(),
  "8 bits, dynamic tree": codecs.EightBit(),
  "APS (5, 2)": codecs.FloatCast(),
  "APS (5, 2), Kahan": codecs.FloatCast(accumulate="kahan"),
  "TopK, 0.1 %": codecs.TopK(density=0.001),
  "RandomK, 1 %": codecs.RandomK(density=0.01),
}
FEEDBACKS: dict[str | None, Feedback | None] = {
  None: None,
  "error": ErrorFeedback(),
  "momentum": MomentumFeedback(),
  "error, bfloat16": ErrorFeedback(residual_dtype="bfloat16"),
  "error, int8": ErrorFeedback(residual_dtype="int8"),
}
# The feedback and the leaves of each column.
COLUMNS: dict[str, tuple[str | None, int]] = {
  **{name or "none": (name, 1) for name in FEEDBACKS},
  f"{SEVERAL} leaves": (None, SEVERAL),
  f"error, {SEVERAL} leaves": ("error", SEVERAL),
}


class Case(NamedTuple):
  """One way to exchange a gradient."""

  codec: str
  exchange: str
  feedback: str | None
  leaves: int = 1


class Memory(NamedTuple):
  """What an update needs, in gradients."""

  payloads: float
  temporary: float

  @property
  def excess(self) -> float:
    """What is temporary, and no payload."""
    return self.temporary - self.payloads


def cases() -> list[Case]:
  found = []
  for codec, exchange, column in itertools.product(CODECS, EXCHANGES, COLUMNS.values()):
    case = Case(codec, exchange, *column)
    with contextlib.suppress(ValueError):
      transformation(case)
      found.append(case)
  return found


def transformation(case: Case) -> Any:
  """Builds a case's transformation; ValueError where its parts do not go together."""
  way: Any = {"axis_name": "data", "feedback": FEEDBACKS[case.feedback]}
  way["exchange"] = GROUPED if case.exchange == GROUPED.name else case.exchange
  return gradcomp.compress(CODECS[case.codec], **way)


def measure(case: Case, shape: tuple[int, ...] = SHAPE) -> Memory:
  own, whole = (
    [jax.ShapeDtypeStruct((count * shape[0], *shape[1:]), jnp.float32)] * case.leaves
    for count in (1, WORKERS)
  )
  given = transformation(case), own, whole, jax.P("data")
  step, args = shapes.exchange(jax.make_mesh((WORKERS,), ("data",)), *given)
  program = step.lower(*args).compile()
  results = lambda x: x.workers if x.kind == "all-gather" else 1
  sent = gradcomp.wire_report(program).collectives
  payloads = sum((1 + results(x)) * x.bytes_in for x in sent)
  gradient = 4 * math.prod(shape) * case.leaves
  temporary = program.memory_analysis().temp_size_in_bytes
  return Memory(payloads / gradient, temporary / gradient)


def markdown(found: dict[Case, Memory]) -> str:
  """Returns a line for each codec and exchange, and what exceeds the goal in bold."""
  lines = []
  for codec, exchange in dict.fromkeys(case[:2] for case in found):
    row = [found.get(Case(codec, exchange, *column)) for column in COLUMNS.values()]
    payloads = max(memory.payloads for memory in row if memory)
    cells = [_cell(memory) if memory else "" for memory in row]
    lines.append([codec, f"`{exchange}`", f"{payloads:.2f}", *cells])
  return f"{tables.table(['codec', 'exchange', 'payloads', *COLUMNS], lines)}\n"


def _cell(memory: Memory) -> str:
  text = f"{memory.temporary:.2f} ({memory.excess:+.2f})"
  return text if memory.excess <= LIMIT else f"**{text}**"


def main() -> None:
  options = cli.options(
    __doc__,
    "one codec and a small leaf",
    "folder of the two files",
    codecs=cli.Option([*CODECS], ["bfloat16"], choices=CODECS),
    columns=cli.Option([*COLUMNS], choices=COLUMNS),
  )
  jax.config.update("jax_num_cpu_devices", WORKERS)
  shape = (64, 64) if options.quick else SHAPE
  found = {}
  columns = [COLUMNS[name] for name in options.columns]
  for case in cases():
    if case.codec in options.codecs and (case.feedback, case.leaves) in columns:
      found[case] = measure(case, shape)
      print(*case, _cell(found[case]), sep=", ", flush=True)
  print(markdown(found))
  about = {"jax": jax.__version__, "workers": WORKERS, "shape": list(shape)}
  known = read(cli.rows_of(options.output, "memory", about)) | found
  found = {case: known[case] for case in cases() if case in known}
  rows = [case._asdict() | memory._asdict() for case, memory in found.items()]
  cli.write(options.output, "memory", {**about, "rows": rows}, markdown(found))


def read(rows: Iterable[dict[str, Any]]) -> dict[Case, Memory]:
  """Returns what rows of the record say."""
  of = lambda kind, row: kind(*map(row.get, kind._fields))
  return {of(Case, row): of(Memory, row) for row in rows}


if __name__ == "__main__":
  main()
