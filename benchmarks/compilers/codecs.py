"""Cases: each codec's operations on a leaf of 64 MiB, and on leaves of odd shapes.

The cycles of ``x + 1`` on the same leaf, which reads and writes it once, are the unit.

  encode  a leaf to its payload
  keep    the same, and what is left of the leaf
  decode  a payload to the leaf
  add     the payloads of eight workers, for an eighth of a leaf, to their mean
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.compilers import reading
from benchmarks.compilers.targets import TARGETS, Extent
from gradcomp.codecs import (
  QSGD,
  BlockFloat,
  BlockTop,
  Codec,
  Context,
  Dense,
  EightBit,
  FloatCast,
  Leaf,
  Natural,
  OneBit,
  Payload,
  RandomK,
  Ternary,
  TopK,
)

WORKERS = 8  # whose payloads an owner adds
LARGE = (4096, 4096)
ODD = ((1_000_003,), (3001, 777))
OPERATIONS = ("encode", "keep", "decode", "add")

CODECS: dict[str, Codec] = {
  "QSGD 8 bits": QSGD(bits=8),
  "QSGD 4 bits": QSGD(bits=4),
  "QSGD 4 bits, nearest": QSGD(bits=4, rounding="nearest"),
  "QSGD 4 bits, shared scale": QSGD(bits=4, bucket_size=None, share_scale=True),
  "QSGD 2 bits, bucket 128": QSGD(bits=2, bucket_size=128),
  "QSGD 2 bits, fitted": QSGD(bits=2, bucket_size=128, levels="nonuniform"),
  "QSGD 2 bits, rms, rotate 32": QSGD(bits=2, norm="rms", levels="uniform", rotate=32),
  "EightBit": EightBit(),
  "Natural": Natural(),
  "MXFP8": BlockFloat(),
  "NVFP4, stochastic": BlockFloat(
    element="e2m1", scale="e4m3", block_size=16, rounding="stochastic"
  ),
  "Ternary": Ternary(),
  "Ternary, base 3": Ternary(packing="base3"),
  "OneBit": OneBit(),
  "OneBit, columns": OneBit(per_column=True),
  "BlockTop": BlockTop(),
  "FloatCast (5, 2)": FloatCast(exponent_bits=5, mantissa_bits=2),
  "FloatCast (4, 3)": FloatCast(exponent_bits=4, mantissa_bits=3),
  "FloatCast (3, 0), scale 1": FloatCast(exponent_bits=3, mantissa_bits=0, scale=1.0),
  "Dense": Dense(),
  "Dense bfloat16": Dense(dtype=jnp.bfloat16),
  "Dense bfloat16, stochastic": Dense(dtype=jnp.bfloat16, rounding="stochastic"),
  "TopK 1 %": TopK(density=0.01),
  "TopK 0.1 %, ASQ": TopK(density=0.001, quantize="asq"),
  "RandomK 1 %": RandomK(density=0.01),
}
QUICK = ("QSGD 4 bits", "OneBit", "Dense bfloat16")
WHOLE = ("v5e", "H100")  # of each compiler the target whose table is whole
# For the others: a codec of each family of kernels.
SOME = ("QSGD 8 bits", "QSGD 4 bits", "QSGD 2 bits, fitted", "EightBit", "Natural")
SOME += ("Ternary", "OneBit", "BlockTop", "FloatCast (5, 2)", "Dense bfloat16")


class Case(NamedTuple):
  codec: str
  operation: str
  shape: tuple[int, ...]

  @property
  def name(self) -> str:
    return f"{self.codec}, {self.operation}, {shown(self.shape)}"


def shown(shape: tuple[int, ...]) -> str:
  return " x ".join(map(str, shape))


def cases(target: str, extent: Extent) -> dict[str, Case]:
  """Returns the cases of a target, by their names."""
  if TARGETS[target].slices > 1:  # its chips are those of another target
    return {}
  whole = extent == "all" or target in WHOLE
  quick = extent == "quick"
  if quick and not whole:
    return {}
  every = [
    Case(codec, operation, shape)
    for codec in (QUICK if quick else CODECS if whole else SOME)
    for shape in (LARGE, *(ODD if whole and not quick else ()))
    # Odd ones show what padding and reshapes cost, for which two are enough.
    for operation in (OPERATIONS if whole and shape == LARGE else ("encode", "decode"))
  ]
  return {case.name: case for case in every}


def row(target: str, case: Case) -> tuple[dict[str, Any], str]:
  """Compiles a case: its facts, and the text of the program."""
  function, *shapes = program(CODECS[case.codec], case.operation, case.shape)
  facts, text = _compiled(target, function, shapes)
  leaf = 4 * jnp.prod(jnp.array(case.shape)).item()
  found = {
    "codec": case.codec,
    "operation": case.operation,
    "shape": shown(case.shape),
    "leaf_bytes": leaf,
    "unit": _unit(target, case.shape),
  }
  return found | facts, text


def program(codec: Codec, operation: str, shape: tuple[int, ...]) -> tuple[Any, ...]:
  """Returns the function of an operation, and the shapes of its arguments."""
  key = jnp.array([0x9E3779B9, 0x7F4A7C15], jnp.uint32)
  x = jax.ShapeDtypeStruct(shape, jnp.float32)
  encode = lambda x: codec.encode(x, key=key)
  if operation == "encode":
    return encode, x
  if operation == "decode":
    return lambda payload: codec.decode(payload, like=x), jax.eval_shape(encode, x)
  if operation == "keep":
    return functools.partial(_kept, codec.bind(Leaf(shape)), key), x
  part = jax.ShapeDtypeStruct((shape[0] // WORKERS, *shape[1:]), jnp.float32)
  payload = jax.eval_shape(encode, part)
  stacked = jax.ShapeDtypeStruct((WORKERS, *payload.rows.shape), payload.rows.dtype)
  sums = codec.bind(Leaf(part.shape)).sums

  def add(rows: jax.Array, agreed: jax.Array | None) -> jax.Array:
    if agreed is not None:  # a message has those of each row
      agreed = jnp.broadcast_to(agreed, (rows.shape[1], *agreed.shape[1:]))
    return sums.gathered(rows, agreed, 1 / WORKERS)(0, rows.shape[1])

  return add, stacked, payload.agreed


def _kept(codec: Codec, key: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Encodes a leaf, and returns what is left of it, too."""
  memory = codec.init(Leaf(x.shape), key)
  agreed = codec.agree(x)
  context = Context(key, memory=memory, agreed=agreed, step=jnp.int32(0))
  rows, unsent, *_ = codec.encode_leaf(x, context, keep=True)
  if unsent is None:
    unsent = x - codec.decode(Payload(rows, agreed), like=x)
  return rows, unsent


@functools.cache
def _unit(target: str, shape: tuple[int, ...]) -> int | None:
  """Returns the cycles of ``x + 1``."""
  x = jax.ShapeDtypeStruct(shape, jnp.float32)
  facts, _ = _compiled(target, lambda x: x + 1, [x])
  return sum(facts["cycles"].values()) if facts["cycles"] else None


def _compiled(
  target: str, function: Any, shapes: list[Any]
) -> tuple[dict[str, Any], str]:
  """Compiles a function for each device of a target by itself."""
  found = TARGETS[target]
  mesh = found.mesh()
  # Kernels of Pallas learn from the map which GPU they are for.
  whole = jax.P()
  mapped = jax.shard_map(
    function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False
  )
  compiled, facts = reading.compile_for(
    found, jax.jit(mapped), reading.replicated(mesh, shapes)
  )
  return facts, compiled.as_text()
