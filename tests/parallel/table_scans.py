"""Rows of scans over layers: each by its door, and with its exchanges layer by layer.

A row has two compiled programs: of the door, and of the same layers in turn. Laws read
what they return, of clean numbers and with a NaN in the loss of one worker, and what
they send. Numbers are whole, so that sums are exact in any order.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import (
  QSGD,
  BlockTop,
  Dense,
  EightBit,
  FloatCast,
  Natural,
  OneBit,
  Policy,
  RandomK,
  Ternary,
)
from gradcomp.exchange import Hierarchical
from tests.parallel.scan_doors import door_of, explicit, turn_of
from tests.support import laws
from tests.support.cases.parallel import mapped_over
from tests.support.cases.scan import ROWS, WIDTH, layers_of, whole

CODECS = {
  "qsgd": QSGD(bits=4, bucket_size=32),
  # To -1, 0 or 1 times the largest at random: with the same draws, to the same bits.
  "coarse": QSGD(bits=2, bucket_size=32),
  "eight": EightBit(dtype="linear", bucket_size=32),
  "tree": EightBit(bucket_size=32),
  "dense": Dense(),
  "ternary": laws.kept(Ternary()),
  "aps": FloatCast(exponent_bits=5, mantissa_bits=2),
  "natural": Natural(),
  "one_bit": OneBit(bucket_size=32),
  "sparse": BlockTop(),
  "random": RandomK(density=0.1),
  "none": None,
}
CODECS = {name: codec and laws.here(codec) for name, codec in CODECS.items()}
CODECS["policy"] = Policy([("w", CODECS["qsgd"]), ("b", CODECS["dense"])])

# By door, its way: the exchange of `scan`, the codec of the shards, or the axes inside
# a host; the codec of gradients; how many workers are where; layers; and what is kept.
TABLE = """
scan   two_shot      qsgd     vmap:data=4                     4  kept
scan   two_shot      qsgd     shard_map:data=8                3  none
scan   all_gather    qsgd     shard_map:data=4                4  kept
scan   two_shot      ternary  vmap:data=4                     4  kept
scan   hierarchical  qsgd     shard_map:host=2,chip=2,model=2 6  kept
scan   two_shot      qsgd     explicit:data=4                 3  kept
shards eight         qsgd     vmap:data=4                     4  kept
shards eight         qsgd     shard_map:data=4                3  none
copy   chip          coarse   shard_map:host=2,chip=2         4  kept
whole  none          qsgd     vmap:data=4                     4  kept
whole  none          qsgd     shard_map:data=8                3  none
"""
SLOW = """
scan   two_shot      qsgd     shard_map:data=2                5  kept
scan   two_shot      qsgd     unchecked:data=3                4  kept
scan   two_shot      qsgd     pmap:data=4                     3  kept
scan   two_shot      qsgd     vmap:data=5                     2  none
scan   two_shot      qsgd     vmap:data=4                     1  kept
scan   two_shot      qsgd     vmap:data=4                     3  kept bfloat16
scan   two_shot      qsgd     vmap:data=4                     3  none bfloat16
scan   auto          qsgd     vmap:data=4                     4  kept
scan   psum          dense    shard_map:data=4                5  kept
scan   psum          ternary  shard_map:data=4                5  kept
scan   two_shot      aps      vmap:data=4                     4  kept
scan   ring          qsgd     shard_map:data=4                5  kept
scan   groups        qsgd     shard_map:data=4                5  kept
scan   two_shot      natural  vmap:data=4                     4  kept
scan   two_shot      one_bit  vmap:data=4                     4  kept
scan   all_gather    sparse   vmap:data=4                     4  kept
scan   auto          random   vmap:data=4                     4  kept
scan   all_gather    policy   vmap:data=4                     4  kept
scan   hierarchical  qsgd     unchecked:host=2,chip=2,model=2 6  kept
scan   two_shot      qsgd     explicit:data=4                 3  kept bfloat16
scan   all_gather    qsgd     explicit:data=8                 3  none
scan   groups        qsgd     explicit:data=4                 3  kept
scan   psum          ternary  explicit:data=4                 3  kept
shards eight         qsgd     shard_map:data=4                4  kept
shards eight         qsgd     unchecked:data=4                2  kept
shards eight         qsgd     pmap:data=4                     1  kept
shards eight         qsgd     vmap:data=4                     3  kept bfloat16
shards none          one_bit  vmap:data=4                     3  kept
shards none          none     vmap:data=4                     3  none
shards eight         none     vmap:data=4                     3  kept
copy   host          coarse   shard_map:host=2,chip=4         3  kept
copy   chip          coarse   unchecked:host=2,chip=2         1  kept
copy   chip          tree     unchecked:host=4,chip=2         2  none
copy   host,chip     none     shard_map:pod=2,host=2,chip=2   3  kept
whole  none          qsgd     shard_map:data=2                5  kept
whole  none          qsgd     unchecked:data=4                4  none
whole  none          qsgd     pmap:data=4                     1  kept
whole  none          one_bit  vmap:data=8                     3  kept
whole  none          none     vmap:data=2                     2  none
whole  none          qsgd     vmap:data=4                     4  kept bfloat16
"""


class Row(NamedTuple):
  door: str
  way: str
  codec: str
  kind: str  # of the place
  axes: tuple[tuple[str, int], ...]  # their names and sizes
  length: int
  keeps: bool
  dtype: Any

  def __str__(self):
    where = ",".join(f"{name}={size}" for name, size in self.axes)
    of = "kept" if self.keeps else "none"
    return (
      f"{self.door}-{self.way}-{self.codec}-{self.kind}:{where}-{self.length}-{of}"
      f"{'' if self.dtype == np.float32 else '-half'}"
    )

  @property
  def workers(self):
    return int(np.prod([size for name, size in self.axes if name != "model"]))

  @property
  def axis_name(self):
    """Of the workers: over "model" each half of a layer is another one."""
    names = tuple(name for name, _ in self.axes if name != "model")
    return names[0] if len(names) == 1 else names

  @property
  def options(self):
    """Those of `parallel.scan`, or of `parallel.scan_shards`."""
    codec, options = CODECS[self.codec], dict(axis_name=self.axis_name)
    match self.door:
      case "scan":
        exchange = Hierarchical(group_size=2) if self.way == "groups" else self.way
        return options | dict(codec=codec, exchange=exchange)
      case "copy":  # its gradients are random; the codec is that of the shards
        return options | dict(params=codec, grads=CODECS["qsgd"])
    return options | dict(params=CODECS[self.way], grads=codec)

  @property
  def inner(self):
    names = tuple(self.way.split(","))
    return names if len(names) > 1 else self.way


def rows(text):
  def row(door, way, codec, place, length, keeps, dtype="float32"):
    kind, _, axes = place.partition(":")
    pairs = [x.split("=") for x in axes.split(",")]
    axes = tuple((name, int(size)) for name, size in pairs)
    given = door, way, codec, kind, axes, int(length), keeps == "kept"
    return Row(*given, np.dtype(dtype))

  return [row(*line.split()) for line in text.strip().splitlines()]


class Program(NamedTuple):
  """Arrays that a program returns, and the collectives that it has."""

  clean: Any
  dirty: Any
  report: Any  # None where workers are no devices


class Run(NamedTuple):
  row: Row
  door: Program  # of a Result
  turn: Program  # of a Result, the gradients of whole layers, and the old residuals


def mesh_of(row, kind=AxisType.Auto):
  sizes = [size for _, size in row.axes]
  devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
  return Mesh(devices, tuple(dict(row.axes)), axis_types=(kind,) * len(sizes))


def compiled(row, function, *arrays):
  """The function of a worker's arrays, as one of those of all, and its report."""
  if row.kind == "pmap":
    devices = jax.devices()[: row.workers]
    return jax.pmap(function, axis_name="data", devices=devices), None
  if row.kind == "vmap":
    return jax.jit(jax.vmap(function, axis_name="data")), None
  checked = row.kind != "unchecked"
  program = mapped_over(dict(row.axes), function, check_vma=checked)
  return aot(row, program, *arrays)


def aot(row, program, *arrays):
  made = program.lower(*arrays).compile()
  call = lambda *given: made(*jax.device_put(given, made.input_shardings[0]))
  return call, gradcomp.wire_report(made, mesh=mesh_of(row))


@functools.cache
def run(row):
  count = int(np.prod([size for _, size in row.axes]))
  x = whole(count, ROWS, WIDTH, seed=5).astype(row.dtype)
  weights = whole(count, row.length, WIDTH, seed=6)
  dirty = weights.copy()
  dirty[-2, 1 % row.length, :] = np.nan
  # Rows of whole layers in half precision are float32.
  layers = layers_of(row.length, np.float32 if row.door == "whole" else row.dtype)
  if row.door == "copy" and row.codec != "none":
    layers = jax.tree.map(lambda x: np.float32(x / 2), layers)
    layers["w"][:, 0] = 1.0
  cut = lambda x: np.stack(np.split(x, count, axis=1))
  shards = jax.tree.map(cut, layers) if row.door != "scan" else None
  host = lambda tree: jax.tree.map(np.asarray, tree)

  def program(make, *others):
    call, report = make
    return Program(*[host(call(x, w, *others)) for w in (weights, dirty)], report)

  turn = functools.partial(turn_of, row)
  turn = program(compiled(row, turn, x, weights, shards), shards)
  old = turn.clean[2]
  if row.kind != "explicit":
    door = functools.partial(door_of, row)
    given = x, weights, shards, old
    return Run(row, program(compiled(row, door, *given), shards, old), turn)
  function, result = explicit(row)
  mesh = mesh_of(row, AxisType.Explicit)
  put = lambda tree: jax.device_put(tree, NamedSharding(mesh, P("data")))
  with jax.set_mesh(mesh):
    call, report = aot(row, jax.jit(function), *put((x, weights, old)))
    door = program((lambda *given: result(call(*given)), report), old)
  return Run(row, door, turn)
