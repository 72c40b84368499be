"""Rows of scans over layers: each by its door, and with its exchanges layer by layer.

A row has two compiled programs: of the door, and of the same layers in turn. Laws read
what they return, of clean numbers and with a NaN in the loss of one worker, and what
they send. Numbers are whole, so that sums are exact in any order.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp import codecs, parallel
from gradcomp._src.exchange.auto import as_exchange
from gradcomp._src.kernels.common.dithers import fold_key, key_words
from gradcomp.exchange import Hierarchical
from tests.support import laws
from tests.support.cases.parallel import mapped_over
from tests.support.cases.scan import KEY, ROWS, WIDTH, body, layers_of, loss_of, whole

CODECS = {
  "qsgd": codecs.QSGD(bits=4, bucket_size=32),
  # To -1, 0 or 1 times the largest at random: with the same draws, to the same bits.
  "coarse": codecs.QSGD(bits=2, bucket_size=32),
  "eight": codecs.EightBit(dtype="linear", bucket_size=32),
  "dense": codecs.Dense(),
  "ternary": laws.kept(codecs.Ternary()),
  "one_bit": codecs.OneBit(bucket_size=32),
  "sparse": codecs.BlockTop(),
  "random": codecs.RandomK(density=0.1),
  "none": None,
}
CODECS = {name: codec and laws.here(codec) for name, codec in CODECS.items()}
CODECS["policy"] = codecs.Policy([("w", CODECS["qsgd"]), ("b", CODECS["dense"])])
wrapped = lambda words: jax.random.wrap_key_data(words, impl="threefry2x32")

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
scan   two_shot      qsgd     unchecked:data=3                4  kept
scan   two_shot      qsgd     pmap:data=4                     3  kept
scan   two_shot      qsgd     vmap:data=4                     1  kept
scan   two_shot      qsgd     vmap:data=4                     3  kept bfloat16
scan   psum          dense    shard_map:data=4                5  kept
scan   psum          ternary  shard_map:data=4                5  kept
scan   ring          qsgd     shard_map:data=4                5  kept
scan   groups        qsgd     shard_map:data=4                5  kept
scan   two_shot      one_bit  vmap:data=4                     4  kept
scan   all_gather    sparse   vmap:data=4                     4  kept
scan   auto          random   vmap:data=4                     4  kept
scan   all_gather    policy   vmap:data=4                     4  kept
scan   two_shot      qsgd     explicit:data=4                 3  kept bfloat16
scan   all_gather    qsgd     explicit:data=8                 3  none
scan   groups        qsgd     explicit:data=4                 3  kept
scan   psum          ternary  explicit:data=4                 3  kept
shards eight         qsgd     unchecked:data=4                2  kept
shards eight         qsgd     pmap:data=4                     1  kept
shards eight         qsgd     vmap:data=4                     3  kept bfloat16
shards none          one_bit  vmap:data=4                     3  kept
shards none          none     vmap:data=4                     3  none
shards eight         none     vmap:data=4                     3  kept
copy   host          coarse   shard_map:host=2,chip=4         3  kept
copy   chip          coarse   unchecked:host=2,chip=2         1  kept
copy   host,chip     none     shard_map:pod=2,host=2,chip=2   3  kept
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
    half = "" if self.dtype == np.float32 else "-half"
    place = f"{self.kind}:{where}-{self.length}-{of}{half}"
    return f"{self.door}-{self.way}-{self.codec}-{place}"

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
    """Returns the options of `parallel.scan`, or of `parallel.gather` for shards."""
    codec, options = CODECS[self.codec], dict(axis_name=self.axis_name)
    match self.door:
      case "scan":
        exchange = Hierarchical(group_size=2) if self.way == "groups" else self.way
        return options | dict(codec=codec, exchange=exchange)
      case "copy":  # its gradients are random; the codec is that of the shards
        return options | dict(params=codec, grads=CODECS["qsgd"])
    return options | dict(params=CODECS[self.way], grads=codec)

  def scan(self, *given, **more):
    """Scans with these options, and a key."""
    options = dict(key=KEY, **self.options, **more)
    if self.door != "scan":
      options |= dict(axis=0, codec=options.pop("grads") or codecs.Dense())
    return parallel.scan(*given, **options)

  def first(self, layers):
    """The first residual of whole layers."""
    given = self.options | dict(feedback="error")
    return parallel.compress_in_scan(**given).init(layers).residual


def rows(text):
  def row(door, way, codec, place, length, keeps, dtype="float32"):
    kind, _, axes = place.partition(":")
    pairs = [x.split("=") for x in axes.split(",")]
    axes = tuple((name, int(size)) for name, size in pairs)
    given = door, way, codec, kind, axes, int(length), keeps == "kept"
    return Row(*given, np.dtype(dtype))

  return [row(*line.split()) for line in text.strip().splitlines()]


# Of a row, and the arrays of one worker.


class Result(NamedTuple):
  """A scan returns these, of all workers ``[N, ...]``."""

  values: Any  # the last carry, and the outputs of all layers
  x: Any  # the gradient of the first carry
  layers: Any  # the means of layers, or the sums of a worker's rows
  kept: list[Any]  # the new residuals of the leaves
  owners: Any = ()


def layers_at(row):
  """The layers that a worker has: over the axis "model" others, where it has one."""
  layers = jax.tree.map(jnp.asarray, layers_of(row.length, row.dtype))
  if "model" not in dict(row.axes):
    return layers
  return jax.tree.map(lambda x: x * (1 + lax.axis_index("model")), layers)


def old_of(row, shards):
  """Residuals that are not zero, of numbers that sums do not round."""
  if not row.keeps:
    return None
  if row.door == "scan":
    zeros = row.first(layers_at(row))
  else:
    one = lambda w: parallel.gather_residual(w, axis_name=row.axis_name, axis=1)
    zeros = jax.tree.map(one, shards)
  own = lax.axis_index(row.axis_name)
  wave = lambda x: (jnp.arange(x.size) * (3 + own) % 17 - 8).reshape(x.shape) / 64
  return jax.tree.map(lambda x: x + wave(x).astype(jnp.float32), zeros)


def by_gradient(scan, x, weights, given, old):
  """The result of a scan whose backward pass exchanges."""

  def loss(x, given, old):
    values = scan(x, given, old)
    return loss_of(values, weights), values

  (of_x, means, new), values = jax.grad(loss, (0, 1, 2), has_aux=True)(x, given, old)
  if isinstance(new, tuple):  # of workers, and of owners
    return Result(values, of_x, means, jax.tree.leaves(new.leaves), new.owners)
  return Result(values, of_x, means, jax.tree.leaves(new))


def door_of(row, x, weights, shards, old):
  given, layers = {}, layers_at(row) if row.door == "scan" else shards
  if row.door == "copy":
    names = tuple(row.way.split(","))
    given |= dict(backward_axis_name=names if len(names) > 1 else row.way)
  if row.door == "whole":
    given |= dict(whole=layers_at(row))
  scan = lambda x, w, e: row.scan(body, x, w, residual=e, **given)
  return by_gradient(scan, x, weights, layers, old)


def plain(row, x, weights):
  """Values and gradients of each worker by ``lax.scan``, which nothing encodes."""
  own = gradcomp.defer_reduction(layers_at(row), axis_name=row.axis_name)

  def loss(x, own):
    values = lax.scan(body, x, own)
    return loss_of(values, weights), values

  return jax.grad(loss, (0, 1), has_aux=True)(x, own)


def turn_of(row, x, weights, shards):
  """The same with an exchange of each layer in turn."""
  old = old_of(row, shards)
  (of_x, grads), values = plain(row, x, weights)
  match row.door:
    case "scan":
      result = Result(values, of_x, *averaged(row, grads, old))
    case "whole":
      result = Result(values, of_x, *scattered(row, grads, shards, old))
    case "shards":
      result = by_gradient(gathering(row), x, weights, shards, old)
    case "copy":
      scan = lambda x, w, e: row.scan(body, x, w, residual=e)
      result = by_gradient(scan, x, weights, shards, old)
  return result, grads, old


def averaged(row, grads, residual):
  """``(means, residuals of leaves, of owners)`` by a message for each layer."""
  options = row.options
  if not row.keeps:  # nor do owners keep anything
    exchange = as_exchange(options["exchange"])
    if exchange.feedback:
      exchange = dataclasses.replace(exchange, feedback=False)
    options |= dict(exchange=exchange)
  feedback = "error" if row.keeps else None
  one = gradcomp.compress(message_bytes=None, feedback=feedback, **options)

  def exchanged(given):
    number, grads, residual = given
    state = one.init(grads)._replace(key=fold_key(key_words(KEY), number))
    if residual is not None:
      owners = residual.owners or None
      state = state._replace(residual=residual.leaves, server_residual=owners)
    means, state = one.update(grads, state)
    owners = state.server_residual or {}
    return means, jax.tree.leaves(state.residual), owners if row.keeps else ()

  return lax.map(exchanged, (jnp.arange(row.length), grads, residual))


def gathering(row):
  """A scan with a gather of each array in its loop."""

  @jax.checkpoint
  def layer(x, given):
    number, shards, residual = given
    own, every = fold_key(key_words(KEY), number), {}
    for i, name in enumerate(sorted(shards)):
      left = None if residual is None else residual[name]
      given = dict(residual=left, key=wrapped(fold_key(own, i)), **row.options)
      every[name] = parallel.gather(shards[name], **given)
    return body(x, every)

  order = jnp.arange(row.length)
  return lambda x, shards, old: lax.scan(layer, x, (order, shards, old))


def scattered(row, grads, shards, residual):
  """A worker's rows of layers, and its residuals, by a reduction of each array."""
  axis_name, codec = row.axis_name, row.options["grads"]

  def rows_of(grad, shard, residual, words):
    if residual is None:
      own = dict(codec=codec or codecs.Dense(), key=wrapped(fold_key(words, 1)))
      return parallel.psum_scatter(grad, axis_name=axis_name, **own), ()
    given = dict(axis_name=axis_name, params=None, grads=codec, key=wrapped(words))
    gather = lambda w, e: parallel.gather(w, residual=e, **given)
    return jax.vjp(gather, shard, residual)[1](grad)

  def of_layer(given):
    number, grads, shards, residual = given
    words = fold_key(key_words(KEY), number)
    found = {}
    for i, name in enumerate(sorted(grads)):
      old = None if residual is None else residual[name]
      grad = grads[name].astype(jnp.float32)
      found[name] = rows_of(grad, shards[name], old, fold_key(words, i))
    new = [x for _, x in found.values()]
    return {name: x for name, (x, _) in found.items()}, new if row.keeps else []

  return lax.map(of_layer, (jnp.arange(row.length), grads, shards, residual))


def explicit(row):
  """The door in plain jit: the loss is the mean of all workers', and so are addends."""
  share, many = 1 / row.workers, row.workers

  def of_rows(x, layer):
    h = x @ layer["w"] + layer["b"]
    x = jnp.where(h > 0, h, 0).astype(x.dtype)
    return x, jnp.sum(x, 1)

  def run(x, weights, old):
    layers = layers_at(row)
    if old is not None:  # owners have theirs in the units of means
      flat = lambda x: x.reshape(-1, *x.shape[2:], out_sharding=P("data"))
      old = jax.tree.map(lambda x, zero: flat(x) + zero, old, row.first(layers))
      own = jax.tree.map(lambda x: x * jnp.float32(share), old.leaves)
      old = old._replace(leaves=own)

    def loss(x, layers, old):
      last, ys = row.scan(of_rows, x, layers, residual=old)
      ys = jnp.swapaxes(ys, 0, 1)
      own = weights.astype(x.dtype)
      return share * (jnp.sum(last[:, 0] * own[:, 0]) + jnp.sum(ys * own)), (last, ys)

    return jax.grad(loss, (0, 1, 2), has_aux=True)(x, layers, old)

  def result(found):
    (of_x, means, new), values = jax.tree.map(np.asarray, found)
    means = jax.tree.map(lambda x: np.stack([x] * many), means)
    each = lambda x: x.reshape(many, row.length, *x.shape[1:])
    of_x = of_x * np.asarray(many, of_x.dtype)
    if new is None:
      return Result(values, of_x, means, [])
    kept = [each(x) * np.float32(many) for x in jax.tree.leaves(new.leaves)]
    return Result(values, of_x, means, kept, jax.tree.map(each, new.owners))

  return run, result


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
  program = mapped_over(dict(row.axes), function, check_vma=row.kind != "unchecked")
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
