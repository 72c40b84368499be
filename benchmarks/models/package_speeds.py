"""Makes the speeds that gradcomp.cost.plan takes where nobody gives it any.

  python -m benchmarks.models.package_speeds [--quick]
    [--output gradcomp/_src/cost/planner/speeds.json]

It reads a file of codecs/speed.py with one setting of malloc, and the largest arrays in
it. Each time counts as a multiple of the copy beside it, of 0.34 ns an element. Codecs
that are in no such file are measured here: 2 bits in buckets of 128, and sparse ones.
Of these, one payload counts as a 32nd of what 32 more take, because writing a sum takes
the same time for any number of payloads. That is part of encoding here.

Speeds of a TPU v5e are the estimated cycles of `make aot`, see benchmarks/compilers. A
byte that moves without an estimate counts as one of `x + 1`. `--estimates` reads these
alone, and keeps the others. `--gpu` measures all candidates on the GPU of this machine,
and keeps the others.
"""

import dataclasses
import json
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.codecs.speed import NAMES as TITLES
from benchmarks.common import cli, quiet, timing
from benchmarks.compilers import record as compiled
from benchmarks.compilers.codecs import CODECS, OPERATIONS
from benchmarks.models.fit_links import codec_speed
from gradcomp import codecs, cost
from gradcomp._src.cost.measure import updates
from gradcomp._src.cost.planner.candidates import CANDIDATES

PACKAGED = cli.ROOT / "gradcomp" / "_src" / "cost" / "planner" / "speeds.json"
FILE = "codec_speed_jax0.10.2_malloc.json"
_COPY = 0.34e-9  # seconds an element, the median of the file
_FEW, _MANY = 4, 36  # payloads

# Hertz of a v5e: 197 TFLOPs in bfloat16 are those of four units of 128 x 128, which
# multiply and add (docs.cloud.google.com/tpu/docs/v5e).
CLOCK = 197e12 / (4 * 128 * 128 * 2)

# Candidates of gradcomp.cost.plan that codecs/speed.py times, by their names there.
NAMES = {x.name: TITLES[x.codec] for x in CANDIDATES if x.codec in TITLES}


def in_copies(codec: codecs.QSGD, size: int, repeats: int) -> cost.CodecSpeed:
  """Measures a codec on a matrix of normal numbers, between copies of as many."""
  copies, speeds = [], []
  for _ in range(3):
    copies.append(timing.interleaved(timing.copies(size), repeats)["copy"] / size)
    speeds.append(cost.CodecSpeed.measure(codec, size, repeats=repeats))
  scale = _COPY / statistics.median(copies)
  median = lambda name: scale * statistics.median(getattr(x, name) for x in speeds)
  fields = dataclasses.fields(cost.CodecSpeed)
  return cost.CodecSpeed(**{field.name: median(field.name) for field in fields})


def measured(codec: codecs.TopK, size: int, repeats: int) -> cost.CodecSpeed:
  """Measures a sparse codec on a vector of normal numbers."""
  x = jax.random.normal(jax.random.key(0), (size,))
  bound: Any = codec.bind(codecs.Leaf(x.shape))
  memory = bound.init(codecs.Leaf(x.shape), None)
  context = codecs.Context(memory=memory, step=jnp.int32(0))
  encode = jax.jit(lambda x: bound.encode_leaf(x, context).rows)
  forget, keep = updates(codec, x.shape)
  rows = encode(x)
  total = jax.jit(lambda rows: bound.sums.gathered(rows, None, 1.0)(0, rows.shape[1]))
  few, many = (jnp.stack([rows] * count) for count in (_FEW, _MANY))
  calls = timing.copies(size) | {
    "encode": lambda: encode(x),
    "update": forget,
    "update and residual": keep,
    "few": lambda: total(few),
    "many": lambda: total(many),
  }
  seconds = timing.interleaved(calls, repeats)
  times = {name: _COPY / seconds["copy"] * value for name, value in seconds.items()}
  add = max(0.0, times["many"] - times["few"]) / (_MANY - _FEW)
  written = max(0.0, times["few"] - _FEW * add)
  return cost.CodecSpeed(
    encode=times["encode"] + written,
    decode=written,
    add=add,
    keep=max(0.0, times["update and residual"] - times["update"]),
  )


def estimated() -> Iterator[tuple[str, cost.CodecSpeed]]:
  """Yields the speeds of the candidates for which v5e's compiler has made programs."""
  rows = compiled.read(compiled.FOLDER / "codecs.jsonl")
  titles = {codec: title for title, codec in CODECS.items()}
  for candidate in CANDIDATES:
    names = [f"{titles.get(candidate.codec)}, {x}, 4096 x 4096" for x in OPERATIONS]
    found = [rows["v5e", name] for name in names if ("v5e", name) in rows]
    if len(found) == len(OPERATIONS):
      encode, keep, decode, add = map(seconds, found)
      more = max(0.0, keep - encode)
      speed = cost.CodecSpeed(encode=encode, decode=decode, add=add, keep=more)
      yield candidate.name, speed


def seconds(row: Mapping[str, Any]) -> float:
  """Returns the seconds an element of a row, at least."""
  moved = sum(row["moved"].values()) / row["leaf_bytes"] * row["unit"]
  cycles = sum(row["cycles"].values()) + moved
  return cycles / CLOCK / (row["leaf_bytes"] / 4)


def rounded(speed: cost.CodecSpeed) -> Mapping[str, float]:
  return {key: float(f"{x:.3g}") for key, x in dataclasses.asdict(speed).items()}


def main() -> None:
  parser = cli.parser(__doc__, quick="small arrays", output="JSON file to write")
  parser.add_argument("--estimates", action="store_true", help="of compilers alone")
  parser.add_argument("--gpu", action="store_true", help="of this machine, alone")
  options = parser.parse_args()
  found = json.loads(PACKAGED.read_text())
  if options.gpu:
    if jax.default_backend() != "gpu":
      cli.skip("there is no GPU here")
    name = jax.devices()[0].device_kind.removeprefix("NVIDIA ").split()[0]  # "H100"
    size = 1 << (20 if options.quick else 28)  # at which launches cost little
    speed = lambda x: rounded(cost.CodecSpeed.measure(x.codec, size, repeats=11))
    found[name] = {x.name: speed(x) for x in CANDIDATES}
  else:
    if not options.estimates:
      found["cpu"] = timed(options.quick)
    found["TPU v5e"] = {name: rounded(speed) for name, speed in estimated()}
  print(json.dumps(found, indent=1))
  cli.write_json(options.output, found)


def timed(quick: bool) -> dict[str, Mapping[str, float]]:
  """Returns the speeds on this machine's CPU, and those of the file."""
  size, repeats = (1 << 16, 1) if quick else (1 << 24, 9)
  quiet.keep(unless=quick)
  rows = json.loads((cli.RESULTS / "codecs" / FILE).read_text())
  speeds: dict[str, Mapping[str, float]] = {}
  for x in CANDIDATES:
    if x.name in NAMES:
      times = rows[f"{NAMES[x.name]}, {1 << 24}"]["seconds"]
      found = codec_speed(times, _COPY / times["copy"])
    else:
      measure = measured if isinstance(x.codec, codecs.TopK) else in_copies
      found = measure(x.codec, size, repeats)
    speeds[x.name] = rounded(found)
  return speeds


if __name__ == "__main__":
  main()
