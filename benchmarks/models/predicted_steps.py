"""Predicts steps of a scanned transformer: exchange behind the loop, and inside.

  python -m benchmarks.models.predicted_steps [--quick] [--output FOLDER]

This is a model: nothing ran. The net has 24 layers of 12 matrices of 2048 x 2048 in
bfloat16, as a transformer of that width has them: four in attention, eight in its dense
layers. They are those of compilers/overlap.py. The backward pass computes each layer
again. `gradcomp.cost.step_seconds` adds up: behind the loop one after the other, inside
with messages that travel while other layers are computed.

Two slices of four v5e have the cycles of `make aot`: of the products, of the codec, and
of bytes that move without an estimate, once read and once written at the memory's rate.
Bytes are those of the compiled programs. Sends go between the slices; the rest goes
inside of one, and the products wait for it. A plain mean of float32 sends twice the
bytes of one of bfloat16.

H100s have an assumed share of the peak rate for their products, and for the codec what
`make ptx-check` finds of its encoder, which the memory limits. A decoder moves the same
bytes. `gradcomp.explain` has the bytes.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import gradcomp
from benchmarks.common import cli, tables
from benchmarks.compilers import overlap, record
from benchmarks.models.package_speeds import CLOCK
from benchmarks.pages import records
from gradcomp import cost
from gradcomp._src.cost.exchange import Breakdown

LAYERS, MATRICES, TOKENS = 24, 12, (2048, 8192)
SIZE = MATRICES * overlap.WIDTH**2  # parameters of a layer
FORWARD = 0.25  # of the products: forward, forward again, and two backward
WORKERS = 8

# docs.cloud.google.com/tpu/docs/v5e: a host of 8 chips has 2 network cards of 100
# Gbit/s; a chip moves 400 GB/s on 4 ports, both ways. A 2 x 2 is a ring of 4.
NEAR = cost.Link.torus((4,), port=400e9 / 2 / 4, latency=0.0).bytes_per_second
NETWORK, MEMORY, ETHERNET = 2 * 100e9 / 8 / 8, 819e9, 100e9 / 8
# NVIDIA's data sheet: 989 TFLOPs in bfloat16, 3.35 TB/s. github.com/NVIDIA/Megatron-LM
# has 41 % of it for the smallest model of its table on H100s.
PEAK, REACHED, HBM3 = 989e12, 0.41, 3.35e12

Layers = Iterator[tuple[str, tuple["Layer", "Layer"]]]  # behind the loop, and inside


class Layer(NamedTuple):
  """Costs of a layer in seconds."""

  products: float  # for one token, forward and backward
  codec: float  # to encode, add and decode its gradient, and to move it for that
  near: float  # of collectives inside of a slice, for which the products wait
  far: float  # of its message on the slow link

  def seconds(self, tokens: int, inside: bool) -> float:
    """Predicts a step of all layers."""
    computed = LAYERS * tokens * self.products
    wire = (("message", 0.0, self.far),)
    spent = Breakdown(encode=self.codec + self.near, wire=wire)
    messages = [((i + 1) / LAYERS, spent) for i in range(LAYERS)]
    backward = (1 - FORWARD) * computed
    return cost.step_seconds(FORWARD * computed, backward, messages, overlap=inside)


def slices() -> Layers:
  """Yields the layers of each exchange between two slices of four v5e."""
  rows = record.read(record.FOLDER / "overlap.jsonl")
  cases = overlap.PLAIN, overlap.BEHIND, overlap.INSIDE
  plain, behind, inside = (rows[overlap.SLICES, case] for case in cases)
  # The record has no plain mean of layers in a loop: bytes are those of unrolled ones.
  near, far = _sent(plain, overlap.LAYERS)
  for name, factor in (("plain mean, float32", 2), ("plain mean, bfloat16", 1)):
    yield name, (Layer(_products(behind), 0.0, factor * near, factor * far),) * 2
  layers = []
  for row in (behind, inside):
    codec = _cycles(row, ("encode", "decode", "exchange")) * MATRICES / overlap.SCANNED
    layers.append(Layer(_products(row), codec, *_sent(row, overlap.SCANNED)))
  yield "QSGD, 4 bits", (layers[0], layers[1])


def _cycles(row: Mapping[str, Any], parts: Iterable[str]) -> float:
  """Returns the seconds of parts of a program, at least."""
  total = lambda fact: sum(row[fact].get(part, 0) for part in parts)
  return total("cycles") / CLOCK + 2 * total("moved") / MEMORY


def _products(row: Mapping[str, Any]) -> float:
  """Returns the seconds of a layer for a token, from those of a record's net."""
  return _cycles(row, ["model"]) * MATRICES / overlap.SCANNED / overlap.BATCH


def _sent(row: Mapping[str, Any], layers: int) -> tuple[float, float]:
  """Returns the seconds of a layer's bytes inside of a slice, and between slices."""
  near, far = row["bytes"], 0.0
  for x in row["collectives"]:
    if x["kind"] == "send":
      # An all-to-all has rows for all chips: half of these are in the other slice.
      # Those of its own are on its host.
      to_all = x["types"][0].startswith(f"u32[{WORKERS}, ")
      near -= x["bytes"] * (1 - 1 / WORKERS if to_all else 1)
      far += x["bytes"] * (1 / 2 if to_all else 1)
  share = MATRICES / layers
  return share * near / NEAR, share * far / NETWORK


def gpus() -> Layers:
  """Yields the layers of each exchange between eight hosts with an H100 each."""
  products = 2 * SIZE / FORWARD / (PEAK * REACHED)
  link = cost.Link(latency=0.0, bytes_per_second=ETHERNET)
  for name, nbytes in (("plain mean, float32", 4), ("plain mean, bfloat16", 2)):
    far = cost.collective_seconds("all_reduce", nbytes * SIZE, WORKERS, link)
    yield name, (Layer(products, 0.0, 0.0, far),) * 2
  spent = four_bits(cost.Cluster(workers=WORKERS, link=link))
  layer = Layer(products, spent.codec_seconds, 0.0, spent.wire_seconds)
  yield "QSGD, 4 bits", (layer, layer)


def four_bits(cluster: cost.Cluster) -> Breakdown:
  """Predicts the exchange of a layer between H100s."""
  tx = gradcomp.qsgd(bits=4, axis_name="data", exchange="two_shot", message_bytes=None)
  layer = jax.ShapeDtypeStruct((SIZE,), jnp.bfloat16)
  explained = gradcomp.explain(tx, layer, workers=cluster.workers, platform="gpu")
  moved = encoder()
  payload = moved - 4  # beside the float32 that is read
  seconds = moved / HBM3
  speed = cost.CodecSpeed(encode=seconds, decode=seconds, add=payload / HBM3)
  (spent,) = cost.message_seconds(explained, cluster, speed)
  return spent


def encoder() -> float:
  """Returns the bytes an element of the encoder's kernel, which the memory limits."""
  found = {row["kernel"]: row for row in records.rows("ptx_check.md")}
  row = found["qsgd 4 bit, 67,108,864"]
  assert row["bound by"] == "memory"
  return float(row["bytes an element"])


def rows() -> Iterator[dict[str, Any]]:
  machines = {"2 slices of 4 v5e": slices, "8 hosts with an H100": gpus}
  for machine, layers in machines.items():
    for tokens in TOKENS:
      for exchange, (behind, inside) in layers():
        parts = [tokens * inside.products, inside.codec, inside.near, inside.far]
        yield {
          "machines": machine,
          "tokens": tokens,
          "exchange": exchange,
          "parts": [_milliseconds(LAYERS * x) for x in parts],
          "behind": _milliseconds(behind.seconds(tokens, inside=False)),
          "inside": _milliseconds(inside.seconds(tokens, inside=True)),
        }


def _milliseconds(seconds: float) -> float:
  return round(1e3 * seconds, 3)  # the last digits of a sum depend on Python's version


def page(found: Iterable[Mapping[str, Any]]) -> str:
  lines = []
  for x in found:
    numbers = [*x["parts"], x["behind"], x["inside"]]
    cells = [f"{value:.0f}" for value in (*numbers, x["inside"] - sum(x["parts"][:3]))]
    lines.append([x["machines"], f"{x['tokens']:,}", x["exchange"], *cells])
  header = "machines,tokens,exchange,products,codec,in the slice,network"
  header += ",behind the loop,inside,of it waits"
  table = tables.table(header.split(","), lines)
  return tables.page(__file__, "predicted_steps", table=table) + "\n"


def main() -> None:
  parser = cli.parser(__doc__, quick="the same", output="folder of the two files")
  options = parser.parse_args()
  found = list(rows())
  print(page(found))
  cli.write(options.output, "predicted_steps", found, page(found))


if __name__ == "__main__":
  main()
