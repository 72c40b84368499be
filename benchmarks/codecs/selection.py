"""Times selecting, listing and packing few elements, against a copy and a top-k.

  python -m benchmarks.codecs.selection [--sizes 16777216] [--densities 0.001 0.01]
    [--quick] [--output FILE.json]

Prints a line for each selection: milliseconds, the ratio to a memory copy of as many
float32 numbers (see common/timing.py), the speed against ``jax.lax.top_k`` of the
magnitudes, the temporary memory of the compiled encoder, the slots of the payload, and
how many of them are used. All run in turn. Writes JSON with --output.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.common import cli, quiet, tables, timing
from gradcomp._src.codecs.selecting import Selected
from gradcomp._src.codecs.sums.entries import Entries
from gradcomp.codecs import NOTHING, Context, Memory, RandomK, TopK

_WORKERS = 4  # whose payloads are added
_KEY = jnp.array([1, 2], jnp.uint32)


def data(kind: str, size: int) -> jax.Array:
  """Draws numbers like a gradient's, or uniform ones, which the paper has."""
  key = jax.random.key(0)
  if kind == "normal":
    return jax.random.normal(key, (size,))
  if kind == "uniform":
    return jax.random.uniform(key, (size,), minval=-1.0)
  return jax.random.t(key, 2.0, (size,))


def codecs(density: float) -> dict[str, TopK | RandomK]:
  """Returns the codecs to compare. ``exact`` calls ``lax.top_k``, and packs."""
  selections = ("threshold", "trimmed", "auto", "exact")
  return {
    **{name: TopK(density=density, selection=name) for name in selections},
    "asq": TopK(density=density, selection="threshold", quantize="asq"),
    "mean": TopK(density=density, selection="threshold", quantize="mean"),
    "random": RandomK(density=density),
  }


def rows(kind: str, size: int, density: float, repeats: int) -> dict[str, Any]:
  """Times all selections of one array."""
  x = data(kind, size)
  count = max(1, round(density * size))
  calls: dict[str, Any] = {
    "lax.top_k": _call(lambda x: lax.top_k(jnp.abs(x), count), x)
  }
  facts: dict[str, Any] = {}
  for name, unbound in codecs(density).items():
    codec = unbound.ranged(size)
    encode = _compiled(lambda x, codec=codec: codec.encode(x, key=_KEY).rows, x)
    payload = encode(x)
    facts[name] = {
      "temp_bytes": encode.memory_analysis().temp_size_in_bytes,
      "slots": codec.slots,
      "bytes_a_slot": payload.nbytes / codec.slots,
    }
    calls[name] = lambda encode=encode: encode(x)
    if not isinstance(codec, TopK):
      continue
    facts[name]["used"] = int(codec.used(payload)[0])
    calls[f"{name}, with residual"] = _call(
      lambda x, codec=codec: codec.encode_leaf(x, NOTHING, keep=True), x
    )
    if name == "threshold":
      add = lambda rows, codec=codec: Entries(codec).mean(rows, 1 / _WORKERS)
      calls[f"add {_WORKERS} payloads"] = _call(add, jnp.stack([payload] * _WORKERS))
      again = TopK(density=density, selection="sampled").ranged(size)
      reuse = lambda x, t, codec=again: (
        codec.encode_leaf(
          x, Context(memory=Memory(own=Selected(t, None)), step=jnp.int32(1))
        ).rows
      )
      first = jax.jit(lambda x, codec=codec: codec.encode_leaf(x, NOTHING).own)(x)
      calls["sampled, again"] = _call(reuse, x, first.threshold)
  seconds = timing.interleaved({**timing.copies(size), **calls}, repeats)
  print(f"{kind}, {size:,} elements, {density:%}:")
  tables.show(
    {
      name: {
        "ms": 1e3 * value,
        "x copy": value / seconds["copy"],
        "x as fast as top_k": seconds["lax.top_k"] / value,
        **facts.get(name, {}),
      }
      for name, value in seconds.items()
    }
  )
  return {"seconds": seconds, "facts": facts}


def _compiled(function: Any, *args: jax.Array) -> Any:
  return jax.jit(function).lower(*args).compile()


def _call(function: Any, *args: jax.Array) -> Any:
  compiled = _compiled(function, *args)
  return lambda: compiled(*args)


def main() -> None:
  options = cli.options(
    __doc__,
    "one small array",
    "JSON file to write",
    sizes=cli.Option([2**24], [2**14]),
    densities=cli.Option([0.001, 0.01], [0.01]),
    data=cli.Option(["normal", "uniform", "heavy"], ["normal"]),
    repeats=cli.Option(7, 1),
  )
  quiet.keep(unless=options.quick)
  results: dict[str, Any] = {"machine": timing.machine()}
  print(json.dumps(results["machine"]))
  for size in options.sizes:
    for density in options.densities:
      for kind in options.data:
        key = f"{kind}, {size}, {density}"
        results[key] = rows(kind, size, density, options.repeats)
  results["load at the end"] = timing.machine()["load"]
  cli.write_json(options.output, results)


if __name__ == "__main__":
  main()
