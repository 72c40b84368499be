"""Times exchanges on one host, as a process with one device and gloo to the others.

  python link_worker.py '{"rank": 0, ...}'    link_speed.py starts it

The gradient is donated, and its mean comes back in its place, as in a train step. The
hosts meet in a tiny psum before each timed call and after it. So no host has anything
left to send when the interface's counter is read.
"""

import dataclasses
import json
import os
import pathlib
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from typing import Any, get_args

import jax
import jax.numpy as jnp
import links
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import (
  QSGD,
  Codec,
  Dense,
  EightBit,
  LeafCodec,
  OneBit,
  Payload,
  PowerSGD,
  Ternary,
)
from gradcomp.exchange import ExchangeName, Hierarchical

_BASELINE = "plain f32 mean"
_ALL = tuple(name for name in get_args(ExchangeName) if name not in ("auto", "local"))
_GATHERS = ("all_gather", "two_shot", "ring")
_SUMS = ("two_shot", "psum")

# Each codec with the exchanges to time; those that the codec or the number of hosts
# rules out are skipped.
CODECS: dict[str, tuple[LeafCodec, tuple[str, ...]]] = {
  "f32": (Dense(), ("psum",)),
  "bf16": (Dense(dtype=jnp.bfloat16), ("all_gather", "two_shot")),
  "qsgd-8": (QSGD(bits=8), _ALL),
  "qsgd-4": (QSGD(bits=4), _ALL),
  "qsgd-2": (QSGD(bits=2), _ALL),
  "qsgd-4 shared": (QSGD(bits=4, share_scale=True), _SUMS),
  "onebit-64": (OneBit(bucket_size=64), _GATHERS),
  "onebit-512": (OneBit(bucket_size=512), _GATHERS),
  "terngrad": (Ternary(), _SUMS),
  "terngrad-base3": (Ternary(packing="base3"), _SUMS),
  "dynamic-tree": (EightBit(data_type="dynamic_tree"), _GATHERS),
  "linear": (EightBit(data_type="linear"), _GATHERS),
  "powersgd-4": (PowerSGD(rank=4), ("psum",)),
  "powersgd-4-8bit": (PowerSGD(rank=4, quantize=8), ("two_shot",)),
}
_GROUP = 2
_GROUPED = Hierarchical(group_size=_GROUP)
_IN_PARTS = QSGD(bits=4)  # its two_shot is also timed part by part
# Low rank without residuals would be another method: its mean lacks most of a step.
_WITH_FEEDBACK = ("powersgd-4", "powersgd-4-8bit")

# Bytes that one of n hosts sends for payloads of c bytes, f in float32. Hierarchical:
# shares of f inside a group, of c between groups, and the means to all.
_SENT: dict[str, Callable[[int, int, int], float]] = {
  "psum": lambda n, c, f: 2 * (n - 1) / n * f,
  "all_gather": lambda n, c, f: (n - 1) * c,
  "two_shot": lambda n, c, f: 2 * (n - 1) / n * c,
  "ring": lambda n, c, f: 2 * (n - 1) / n * c,
  "hierarchical": lambda n, c, f: (
    (_GROUP - 1) / _GROUP * f + (1 / _GROUP - 1 / n + (n - 1) / n) * c
  ),
}


@dataclasses.dataclass(frozen=True)
class Timed:
  """A program on all hosts, its arguments, and the bytes that a host should send."""

  program: Any
  arguments: Callable[[], tuple[Any, ...]]  # new ones each time if they are donated
  arithmetic: float | None = None


def spread(mesh: jax.sharding.Mesh, local: np.ndarray) -> jax.Array:
  """Makes the global array whose part on this host is ``local``."""
  sharding = jax.NamedSharding(mesh, P("data"))
  return jax.make_array_from_process_local_data(sharding, local)


def local_like(
  mesh: jax.sharding.Mesh, grads: list[jax.Array]
) -> list[jax.ShapeDtypeStruct]:
  """Returns the shapes of the part of the gradients that one host holds."""
  shape = lambda x: (x.shape[0] // mesh.size, *x.shape[1:])
  return [jax.ShapeDtypeStruct(shape(x), x.dtype) for x in grads]


def payload_bytes(codec: Codec, like: list[jax.ShapeDtypeStruct], shares: int) -> int:
  """Counts the bytes of all leaves, each encoded by itself.

  The rows of a leaf are filled up to ``shares`` equal shares.
  """
  rows = sum(-(-leaf.size // codec.tile_size) for leaf in like)
  return 4 * codec.row_words * shares * -(-rows // shares)


def steps(
  mesh: jax.sharding.Mesh, grads: list[jax.Array], codecs: list[str]
) -> Iterator[tuple[str, Timed]]:
  """Compiles the plain mean, and then every codec with every exchange."""
  hosts = mesh.size
  like = local_like(mesh, grads)
  copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))

  def timed(update: Callable[..., Any], state: Any, specs: Any, sent: Any) -> Timed:
    both = (P("data"), specs)
    step = jax.shard_map(update, mesh=mesh, in_specs=both, out_specs=both)
    step = jax.jit(step, donate_argnums=0).lower(grads, state).compile()
    return Timed(step, lambda: (copy(grads), state), sent)

  floats = 4 * sum(leaf.size for leaf in like)
  plain = lambda grads, state: (lax.pmean(grads, "data"), state)
  yield _BASELINE, timed(plain, (), (), _SENT["psum"](hosts, floats, floats))
  for name in codecs:
    codec, exchanges = CODECS[name]
    for exchange in exchanges:
      group = _GROUP if exchange == _GROUPED.name else 1
      if group >= hosts or hosts % group:
        continue
      try:
        tx = gradcomp.compress(
          codec,
          axis_name="data",
          exchange=_GROUPED if exchange == _GROUPED.name else exchange,
          feedback="error" if name in _WITH_FEEDBACK else None,
        )
      except ValueError:  # the library says that these do not go together
        continue
      with jax.set_mesh(mesh):  # owners keep something where their number is known
        specs = gradcomp.state_specs(jax.eval_shape(tx.init, like), "data")
      init = jax.shard_map(tx.init, mesh=mesh, in_specs=P("data"), out_specs=specs)
      # Sums of codes travel in integers of a width that only the library knows.
      sent = None
      if isinstance(codec, Codec) and not codec.agrees:
        payload = payload_bytes(codec, like, 1 if exchange == "all_gather" else hosts)
        sent = _SENT[exchange](hosts, payload, floats)
      yield f"{name} {exchange}", timed(tx.update, jax.jit(init)(grads), specs, sent)


def parts(
  mesh: jax.sharding.Mesh, grads: list[jax.Array], codec: Codec
) -> Iterator[tuple[str, Timed]]:
  """Compiles a two_shot exchange as several programs that hand their results on."""
  hosts = mesh.size
  like = local_like(mesh, grads)
  key = jnp.array([1, 2], jnp.uint32)
  rows = -(-like[0].size // codec.tile_size)  # of a leaf; all are of one size

  def encode(*leaves: jax.Array) -> jax.Array:
    matrix = jnp.concatenate([codec.encode(leaf, key=key).rows for leaf in leaves])
    padded = jnp.pad(matrix, ((0, -len(matrix) % hosts), (0, 0)))
    return padded.reshape(hosts, -1, codec.row_words)

  def all_to_all(shares: jax.Array) -> jax.Array:
    return lax.all_to_all(shares, "data", 0, 0, tiled=True)

  def average_own(received: jax.Array) -> jax.Array:
    total = codec.decode_rows(received[0])
    for share in received[1:]:
      total = total + codec.decode_rows(share)
    return codec.encode_rows(total * jnp.float32(1 / hosts), key=key)

  def all_gather(own: jax.Array) -> jax.Array:
    return lax.all_gather(own, "data", tiled=True)

  def decode(matrix: jax.Array) -> list[jax.Array]:
    return [
      codec.decode(Payload(matrix[i * rows : (i + 1) * rows]), like=leaf)
      for i, leaf in enumerate(like)
    ]

  share = (hosts - 1) / hosts * payload_bytes(codec, like, hosts)
  sent = {all_to_all: share, all_gather: share}
  values: tuple[jax.Array, ...] = tuple(grads)
  for function in (encode, all_to_all, average_own, all_gather, decode):
    on_hosts = jax.shard_map(
      function, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    program = jax.jit(on_hosts).lower(*values).compile()
    timed = Timed(program, lambda values=values: values, sent.get(function, 0.0))
    yield function.__name__, timed
    values = (program(*values),)


def measure(
  programs: dict[str, Timed], repeats: int, meet: Callable[[], Any], interface: str
) -> dict[str, dict[str, Any]]:
  """Times all programs in turn, after a first call that is not timed.

  Lists in the results have an entry for each repeat.
  """
  results: dict[str, dict[str, Any]] = {
    name: {
      "seconds": [],
      "cpu_seconds": [],
      "sent": [],
      "arithmetic": timed.arithmetic,
      "wire_report": gradcomp.wire_report(timed.program).bytes_sent,
    }
    for name, timed in programs.items()
  }
  mean = None
  for repeat in range(repeats + 1):
    for name, timed in programs.items():
      arguments = jax.block_until_ready(timed.arguments())
      meet()
      sent = links.bytes_sent(interface)
      cpu, start = time.process_time(), time.perf_counter()
      outputs = jax.block_until_ready(timed.program(*arguments))
      seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
      meet()
      sent = links.bytes_sent(interface) - sent
      if repeat:
        results[name]["seconds"].append(seconds)
        results[name]["cpu_seconds"].append(cpu)
        results[name]["sent"].append(sent)
      elif isinstance(outputs, tuple):  # a step's: the mean and the state
        leaves = [np.ravel(leaf.addressable_data(0)) for leaf in outputs[0]]
        result = np.concatenate(leaves)
        mean = result if mean is None else mean
        error = np.linalg.norm(result - mean) / np.linalg.norm(mean)
        results[name] |= {"error": float(error), "crc32": zlib.crc32(result)}
      del arguments, outputs
  return results


def main(options: dict[str, Any]) -> None:
  rank, ends = options["rank"], [tuple(end) for end in options["ends"]]
  report: dict[str, Any] = {}
  if options["probe_bytes"]:
    report["probe"] = links.probe(rank, ends, options["probe_bytes"])
  jax.distributed.initialize(
    options["coordinator"],
    len(ends),
    rank,
    initialization_timeout=60,
    heartbeat_timeout_seconds=20,
    shutdown_timeout_seconds=20,
  )
  mesh = jax.make_mesh((len(ends),), ("data",))
  rng = np.random.default_rng(rank)
  size = options["mib"] * 2**20 // 4 // options["leaves"]
  rows = 2 ** (int(np.log2(size)) // 2)  # of a matrix, which low rank needs
  grads = [
    spread(mesh, rng.standard_normal((rows, size // rows), np.float32))
    for _ in range(options["leaves"])
  ]
  total = jax.shard_map(
    lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
  )
  one = spread(mesh, np.ones(1, np.float32))
  tiny = jax.jit(total).lower(one).compile()
  programs = dict(steps(mesh, grads, options["codecs"]))
  count = len(programs)
  programs |= parts(mesh, grads, _IN_PARTS)
  meet = lambda: jax.block_until_ready(tiny(one))
  results = measure(programs, options["repeats"], meet, options["interface"])
  report["steps"] = dict(list(results.items())[:count])
  report["parts"] = dict(list(results.items())[count:])
  pathlib.Path(options["output"]).write_text(json.dumps(report))
  jax.distributed.shutdown()


if __name__ == "__main__":
  try:
    main(json.loads(sys.argv[1]))
  except BaseException:
    traceback.print_exc()
    os._exit(1)  # leaving normally would wait for the others, and they for us
