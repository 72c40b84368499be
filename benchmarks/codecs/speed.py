"""Times encode, decode and decode-and-sum, as multiples of a memory copy.

  make bench     or     python -m benchmarks.codecs.speed

Prints nanoseconds an element for each codec and size, the ratio to a copy of as many
float32 numbers into a buffer in use and into a new one (see common/timing.py), and the
temporary memory of the compiled encoder. Then it does the same for ResNet-50's 161
leaves as one message, and times their plain mean over two devices, by itself and
through gradcomp.dense. Then it times the message of 8 matrices and their exchange over
two devices, in turn with a flat leaf of as many elements. Last it times what a sparse
codec does one after the other, as programs of their own.
"""

import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gradcomp
from benchmarks.common import cli, quiet, shapes, tables, timing
from benchmarks.compilers.codecs import NVFP4, mean
from gradcomp import codecs, contrib
from gradcomp._src.codecs import encoding, protocol
from gradcomp._src.cost.measure import updates
from gradcomp._src.cost.planner.candidates import CANDIDATES
from gradcomp._src.exchange.layout import materialized, plan_rows
from gradcomp._src.kernels.selection import RowView

_WORKERS = 4  # whose payloads decode-and-sum adds
_MIB = 2**20
Calls = dict[str, Callable[[], Any]]
Row = dict[str, Any]
_PARTS = ("codecs", "messages", "matrices", "sparse")

_FITTED: Any = {"levels": "nonuniform"}
_cast = lambda e, m: codecs.FloatCast(exponent_bits=e, mantissa_bits=m)
CODECS: dict[str, codecs.Codec] = {
  **{f"qsgd-{bits}": codecs.QSGD(bits=bits) for bits in (2, 4, 8)},
  "qsgd-4 nearest": codecs.QSGD(bits=4, rounding="nearest"),
  "qsgd-4 shared": codecs.QSGD(bits=4, share_scale=True),
  **{f"qsgd-4 rotate {n}": codecs.QSGD(bits=4, rotate=n) for n in (8, 32)},
  **{f"qsgd-{n} nonuniform": codecs.QSGD(bits=n, **_FITTED) for n in (2, 3, 4)},
  **{f"onebit-{size}": codecs.OneBit(bucket_size=size) for size in (64, 512)},
  "terngrad": codecs.Ternary(),
  "terngrad base3": codecs.Ternary(packing="base3"),
  **{name: codecs.EightBit(dtype=name) for name in ("dynamic_tree", "linear")},
  **{f"aps-{e}-{m}": _cast(e, m) for e, m in ((5, 2), (4, 3), (3, 0), (5, 10))},
  "cast-5-2": codecs.FloatCast(scale=1.0),
  "natural": codecs.Natural(),
  "mxfp8": codecs.BlockFloat(),
  "mxfp4": codecs.BlockFloat(element="e2m1"),
  "mxfp4 rotate 32": codecs.BlockFloat(element="e2m1", rotate=32),
  "nvfp4 stochastic": NVFP4,
  **{f"blocktop-{bits}": codecs.BlockTop(bits=bits) for bits in (2, 8, 32)},
  **{f"eden-{bits}": contrib.Eden(bits=bits) for bits in (1, 2, 4)},
  "dense-f32": codecs.Dense(),
  "dense-bf16": codecs.Dense(dtype=jnp.bfloat16),
  "dense-f16": codecs.Dense(dtype=jnp.float16),
}
NAMES = {codec: name for name, codec in CODECS.items()}
SPARSE: Any = {x.name: x.codec for x in CANDIDATES if x.density}
# Of each kind: with its residual known, with fitted levels, with a shared scale, and
# with sums in its format.
QUICK = ("qsgd-4", "qsgd-2 nonuniform", "onebit-64", "terngrad", "linear", "aps-5-2")


def codec_rows(name: str, codec: codecs.Codec, size: int, repeats: int) -> Row:
  """Times one codec on one array of ``size`` elements."""
  x = jax.random.normal(jax.random.key(0), (size,))
  key = jnp.array([1, 2], jnp.uint32)
  # Levels are fitted in one step of a hundred.
  leaf = codecs.Leaf(x.shape)
  codec, memory = codec.bind(leaf), codec.init(leaf, key)
  start = time.perf_counter()
  context = lambda key: codecs.Context(key, memory=memory)
  rows = jax.jit(lambda x, key: protocol.payload_of(codec, x, context(key)))
  encode = rows.lower(x, key).compile()
  compile_seconds = time.perf_counter() - start
  payload = encode(x, key)
  decode = jax.jit(lambda p: codec.decode(p, like=x)).lower(payload).compile()
  share = payload.rows.shape[0] // _WORKERS
  received = jnp.stack([payload.rows[:share]] * _WORKERS)
  first = jax.tree.map(lambda x: x[:share], payload.agreed)
  add = jax.jit(lambda rows: mean(codec.sums, rows, first)).lower(received).compile()
  calls = {"encode": lambda: encode(x, key), "decode": lambda: decode(payload)}
  calls["decode and sum, a worker"] = lambda: add(received)
  given = lambda key: context(key)._replace(agreed=payload.agreed)
  both = jax.jit(lambda x, key: codec.encode_leaf(x, given(key), keep=True))
  if jax.eval_shape(both, x, key).unsent is not None:
    both = both.lower(x, key).compile()
    calls["encode and residual"] = lambda: both(x, key)
  forget, keep = updates(codec, (size,))
  calls |= {"update": forget, "update and residual": keep}
  print(f"compiled in {compile_seconds:.1f} s", end="; ")
  about = f"{name}, {size:,}", size, encode, payload.rows.nbytes
  return _report(calls, repeats, *about)


def matrices_rows(size: int, repeats: int) -> Row:
  """Times 8 matrices beside a flat leaf: their message, and their exchange."""
  flat = jax.random.normal(jax.random.key(0), (size,))
  trees = {"flat": [flat], "matrices": list(flat.reshape(8, 1024, -1))}
  calls, tx = timing.copies(size), gradcomp.qsgd(bits=4, axis_name="data")
  for name, tree in trees.items():
    steps = _message(tree)[0] | {"exchange": _exchange(tx, tree)}
    calls |= {f"{step}, {name}": call for step, call in steps.items()}
  seconds = timing.interleaved(calls, 4 * repeats)
  for step in steps:
    ratio = seconds[f"{step}, matrices"] / seconds[f"{step}, flat"]
    print(f"{step} of 8 matrices: {ratio:.2f} x one of a flat leaf")
  return {"elements": size, "seconds": seconds}


def mean_rows(tree: list[jax.Array], repeats: int) -> Row:
  """Times a plain mean of all leaves over two devices, ours against jax.lax.pmean."""
  plain = optax.stateless(lambda tree, _: jax.lax.pmean(tree, "data"))
  ways = {"pmean": plain, "dense": gradcomp.dense(axis_name="data")}
  calls = {name: _exchange(tx, tree) for name, tx in ways.items()}
  seconds = timing.interleaved(calls, 4 * repeats)
  said = [f"{name} {1e3 * x:.1f} ms" for name, x in seconds.items()]
  said += [f"{seconds['dense'] / seconds['pmean']:.3f} x"]
  print("mean of ResNet-50's leaves over two devices:", ", ".join(said))
  return {"elements": sum(leaf.size for leaf in tree), "seconds": seconds}


def sparse_rows(name: str, codec: codecs.TopK, size: int, repeats: int) -> Row:
  """Times a sparse codec's selection, packing and unpacking, as Fang's figure 8 does.

  What packing leaves of the gradient is not in it. ``encode`` is both as one program.
  """
  x, zero = jax.random.normal(jax.random.key(0), (size,)), jnp.int32(0)
  bound: Any = codec.bind(codecs.Leaf((size,)))
  context = codecs.Context(memory=bound.init(codecs.Leaf((size,)), None), step=zero)
  select = jax.jit(lambda x: bound.select(RowView([x], zero), bound._given(context)))
  pack = jax.jit(lambda x, at: bound.pack(at, RowView([x], zero).at(at))[0])
  encode = jax.jit(lambda x: bound.encode_leaf(x, context).rows).lower(x).compile()
  unpack = jax.jit(lambda rows: bound.sums.gathered(rows, None, 1 / _WORKERS)(0, 1))
  at, rows = select(x), encode(x)
  if not (pack(x, at) == rows[0]).all():
    raise RuntimeError(f"{name}: its parts do not make what it encodes")
  received = jnp.stack([rows] * _WORKERS)
  calls = {"select": lambda: select(x), "pack": lambda: pack(x, at)}
  calls |= {"encode": lambda: encode(x), "unpack": lambda: unpack(received)}
  return _report(calls, repeats, f"{name}, {size:,}", size, encode, rows.nbytes)


def _message(tree: list[jax.Array]) -> tuple[Calls, Any, int]:
  """Returns calls for a message, the encoder, and the bytes sent."""
  layout = plan_rows(tree, codecs.QSGD(bits=4))
  own = [layout.codec_of(i) for i in range(len(tree))]
  keys = jnp.arange(2 * len(tree), dtype=jnp.uint32).reshape(-1, 2)

  @jax.jit
  def rows(tree: list[jax.Array], keys: jax.Array) -> dict[int, jax.Array]:
    given = tree, list(map(codecs.Context, keys))
    found = encoding.encode_leaves(encoding.grouped(own, *given), *given, keep=False)
    parts = layout.adjacent({i: x.rows for i, x in found.items()})
    return {i: jnp.concatenate(rows) for i, rows in parts.items()}

  @jax.jit
  def leaves(matrices: dict[int, jax.Array]) -> dict[int, jax.Array]:
    decoder = lambda i, rows: layout.sums[i].gathered(rows[None], None, 1.0)
    found = {i: decoder(i, rows) for i, rows in matrices.items()}
    return materialized(lambda x: layout.viewed(lambda: found, x), matrices[0])

  encode = rows.lower(tree, keys).compile()
  matrices = encode(tree, keys)
  decode = leaves.lower(matrices).compile()
  calls = {"encode": lambda: encode(tree, keys), "decode": lambda: decode(matrices)}
  return calls, encode, sum(matrix.nbytes for matrix in matrices.values())


def _exchange(tx: Any, tree: list[jax.Array]) -> Callable[[], Any]:
  """Returns a call of an update over two devices, or one, with its state donated."""
  count = min(2, jax.device_count())
  mesh = jax.make_mesh((count,), ("data",), devices=jax.devices()[:count])
  step, like = shapes.exchange(mesh, tx, tree, tree, jax.P(), check_vma=False)
  with jax.set_mesh(mesh):
    given = tree, tx.init(tree)
  put = lambda x, like: jax.device_put(x, like.sharding)
  tree, state = jax.tree.map(put, given, like)
  program = step.lower(tree, state).compile()

  def call() -> Any:
    nonlocal state
    state, mean = program(tree, state)
    return mean

  return call


def _report(
  calls: Calls, repeats: int, title: str, size: int, encode: Any, sent: int
) -> Row:
  seconds = timing.interleaved(timing.copies(size) | calls, repeats)
  temp = encode.memory_analysis().temp_size_in_bytes
  print(f"{title}: {8 * sent / size:.3f} bits an element", end="; ")
  print(f"encoder's temporaries {temp / _MIB:.1f} MiB, payload {sent / _MIB:.1f} MiB")
  rows: Any = {name: {"ns an element": 1e9 * x / size} for name, x in seconds.items()}
  for name, row in rows.items():
    row |= {f"x {of}": seconds[name] / seconds[of] for of in ("copy", "copy to new")}
  tables.show(rows)
  return {"elements": size, "seconds": seconds, "temp_bytes": temp, "sent_bytes": sent}


def main() -> None:
  options = cli.options(
    __doc__,
    "one small array, a codec of each kind, ten leaves",
    "JSON file to write",
    parts=cli.Option([*_PARTS], choices=_PARTS),
    sizes=cli.Option([2**20, 2**24], [2**16]),
    repeats=cli.Option(9, 1),
    codecs=cli.Option([*CODECS], QUICK, choices=CODECS),
  )
  quiet.keep(unless=options.quick)
  print(json.dumps(timing.machine()))
  results: dict[str, Any] = {"machine": timing.machine()}
  repeats = options.repeats
  if "codecs" in options.parts:
    for size, name in itertools.product(options.sizes, options.codecs):
      results[f"{name}, {size}"] = codec_rows(name, CODECS[name], size, repeats)
  if "messages" in options.parts:
    tree = shapes.resnet50(10 if options.quick else None)
    calls, *about = _message(tree)
    size = sum(leaf.size for leaf in tree)
    results["resnet50"] = _report(calls, repeats, "ResNet-50, qsgd-4", size, *about)
    results["mean"] = mean_rows(tree, repeats)
  if "matrices" in options.parts:
    results["matrices"] = matrices_rows(options.sizes[-1], repeats)
  if "sparse" in options.parts:
    for size, name in itertools.product(options.sizes, SPARSE):
      results[f"{name}, {size}"] = sparse_rows(name, SPARSE[name], size, repeats)
  cli.write_json(options.output, results)


if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", 2)
  main()
