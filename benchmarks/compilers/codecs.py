"""Cases: each codec's operations on a leaf of 64 MiB, and on leaves of odd shapes.

The cycles of ``x + 1`` on the same leaf, which reads and writes it once, are the unit.

  encode  a leaf to its payload
  keep    the same, and what is left of the leaf
  decode  a payload to the leaf
  add     the payloads of eight workers, for an eighth of a leaf, to their mean
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.common.shapes import mapped
from benchmarks.compilers import program as hlo
from benchmarks.compilers import targets
from gradcomp import codecs
from gradcomp._src.codecs.sums.records import Payload

WORKERS = 8  # whose payloads an owner adds
LARGE = (4096, 4096)
ODD = ((1_000_003,), (3001, 777))
OPERATIONS = ("encode", "keep", "decode", "add")

_RMS: dict[str, Any] = {"norm": "rms", "levels": "uniform"}
_NVFP4: dict[str, Any] = {"element": "e2m1", "scale": "e4m3", "block_size": 16}
NVFP4 = codecs.BlockFloat(rounding="stochastic", **_NVFP4)
_cast = lambda e, m, **way: codecs.FloatCast(exponent_bits=e, mantissa_bits=m, **way)
CODECS: dict[str, codecs.Codec] = {
  "QSGD 8 bits": codecs.QSGD(bits=8),
  "QSGD 4 bits": codecs.QSGD(bits=4),
  "QSGD 4 bits, nearest": codecs.QSGD(bits=4, rounding="nearest"),
  "QSGD 4 bits, shared scale": codecs.QSGD(bits=4, bucket_size=None, share_scale=True),
  "QSGD 2 bits, bucket 128": codecs.QSGD(bits=2, bucket_size=128),
  "QSGD 2 bits, fitted": codecs.QSGD(bits=2, bucket_size=128, levels="nonuniform"),
  "QSGD 2 bits, rms, rotate 32": codecs.QSGD(bits=2, rotate=32, **_RMS),
  "EightBit": codecs.EightBit(),
  "Natural": codecs.Natural(),
  "MXFP8": codecs.BlockFloat(),
  "NVFP4, stochastic": NVFP4,
  "Ternary": codecs.Ternary(),
  "Ternary, base 3": codecs.Ternary(packing="base3"),
  "OneBit": codecs.OneBit(),
  "OneBit, columns": codecs.OneBit(per_column=True),
  "BlockTop": codecs.BlockTop(),
  "FloatCast (5, 2)": _cast(5, 2),
  "FloatCast (4, 3)": _cast(4, 3),
  "FloatCast (3, 0), scale 1": _cast(3, 0, scale=1.0),
  "Dense": codecs.Dense(),
  "Dense bfloat16": codecs.Dense(dtype=jnp.bfloat16),
  "Dense bfloat16, stochastic": codecs.Dense(dtype=jnp.bfloat16, rounding="stochastic"),
  "TopK 1 %": codecs.TopK(density=0.01),
  "TopK 0.1 %, ASQ": codecs.TopK(density=0.001, quantize="asq"),
  "RandomK 1 %": codecs.RandomK(density=0.01),
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


def cases(target: str, extent: targets.Extent) -> dict[str, Case]:
  if targets.TARGETS[target].slices > 1:  # its chips are those of another target
    return {}
  whole, quick = extent == "all" or target in WHOLE, extent == "quick"
  if quick and not whole:
    return {}
  return {
    f"{codec}, {operation}, {' x '.join(map(str, shape))}": Case(
      codec, operation, shape
    )
    for codec in (QUICK if quick else CODECS if whole else SOME)
    for shape in (LARGE, *(ODD if whole and not quick else ()))
    # Odd ones show what padding and reshapes cost, for which two are enough.
    for operation in (OPERATIONS if whole and shape == LARGE else ("encode", "decode"))
  }


def row(target: str, case: Case) -> tuple[dict[str, Any], Any]:
  function, *shapes = program(CODECS[case.codec], case.operation, case.shape)
  compiled, facts = _compiled(target, function, shapes)
  found = case._asdict() | {"shape": " x ".join(map(str, case.shape))}
  found |= {"leaf_bytes": 4 * math.prod(case.shape), "unit": _unit(target, case.shape)}
  return found | facts, compiled


def program(codec: Any, operation: str, shape: tuple[int, ...]) -> tuple[Any, ...]:
  """Returns the function of an operation, and the shapes of its arguments."""
  key = jnp.array([0x9E3779B9, 0x7F4A7C15], jnp.uint32)
  x = jax.ShapeDtypeStruct(shape, jnp.float32)
  encode = lambda x: codec.encode(x, key=key)
  if operation == "encode":
    return encode, x
  if operation == "decode":
    return lambda payload: codec.decode(payload, like=x), jax.eval_shape(encode, x)
  if operation == "keep":
    return functools.partial(_kept, codec.bind(codecs.Leaf(shape)), key), x
  part = jax.ShapeDtypeStruct((shape[0] // WORKERS, *shape[1:]), jnp.float32)
  payload = jax.eval_shape(encode, part)
  stacked = jax.ShapeDtypeStruct((WORKERS, *payload.rows.shape), payload.rows.dtype)
  sums = codec.bind(codecs.Leaf(part.shape)).sums
  return functools.partial(mean, sums), stacked, payload.agreed


def mean(sums: Any, rows: jax.Array, agreed: jax.Array | None) -> jax.Array:
  """Adds the rows of a leaf from several workers, to their mean."""
  workers, count, _ = rows.shape
  if agreed is not None:  # a message has those of each row
    agreed = jnp.broadcast_to(agreed, (count, *agreed.shape[1:]))
  return sums.gathered(rows, agreed, 1 / workers)(0, count)


def _kept(codec: Any, key: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Encodes a leaf, and returns what is left of it, too."""
  memory = codec.init(codecs.Leaf(x.shape), key)
  agreed = codec.agree(x)
  context = codecs.Context(key, memory=memory, agreed=agreed, step=jnp.int32(0))
  rows, unsent, *_ = codec.encode_leaf(x, context, keep=True)
  if unsent is None:
    unsent = x - codec.decode(Payload(rows, agreed), like=x)
  return rows, unsent


@functools.cache
def _unit(target: str, shape: tuple[int, ...]) -> int | None:
  """Returns the cycles of ``x + 1``."""
  x = jax.ShapeDtypeStruct(shape, jnp.float32)
  _, facts = _compiled(target, lambda x: x + 1, [x])
  return sum(facts["cycles"].values()) if facts["cycles"] else None


def _compiled(target: str, function: Any, shapes: Any) -> tuple[Any, dict[str, Any]]:
  """Compiles a function for each device of a target by itself."""
  found, whole = targets.TARGETS[target], jax.P()
  # Kernels of Pallas learn from the map which GPU they are for.
  made = mapped(found.mesh(), function, shapes, whole, whole, check_vma=False)
  return hlo.compile_for(found, *made)
