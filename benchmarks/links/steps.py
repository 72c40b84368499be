"""Compiles the programs that hosts time: whole exchanges, and their parts.

A step takes a gradient and a state, and both are donated: the mean comes back in the
gradient's place, as in a train step. The state goes on from call to call, so that
fitted levels, signs that take turns and low-rank factors are those of a training.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import gradcomp
from benchmarks.links import methods
from benchmarks.links.process import Timed
from gradcomp._src.codecs.sums.records import Payload
from gradcomp._src.exchange.collectives import scatter
from gradcomp.codecs import Codec, Context, Leaf

BASELINE = "plain f32 mean"
_GROUP = methods.GROUPED.group_size

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


def local_like(
  mesh: jax.sharding.Mesh, grads: list[jax.Array]
) -> list[jax.ShapeDtypeStruct]:
  """Returns the shapes of the part of the gradients that one host holds."""
  shape = lambda x: (x.shape[0] // mesh.size, *x.shape[1:])
  return [jax.ShapeDtypeStruct(shape(x), x.dtype) for x in grads]


def payload_bytes(codec: Codec, like: list[jax.ShapeDtypeStruct], shares: int) -> int:
  """Counts the bytes of leaves, whose rows are filled up to ``shares`` equal shares."""
  rows = sum(-(-leaf.size // codec.tile_size) for leaf in like)
  return 4 * codec.row_words * shares * -(-rows // shares)


def _arithmetic(
  case: methods.Case, exchange: str, like: list[jax.ShapeDtypeStruct], hosts: int
) -> float | None:
  """Returns the bytes that a host should send; None where only the library knows."""
  alike = len({leaf.shape for leaf in like}) == 1
  if not isinstance(case.codec, Codec) or not alike:
    return None
  codec = case.codec.bind(Leaf(like[0].shape))
  if codec.fits or not codec.tile_size:  # sparse payloads have no tiles
    return None
  if jax.eval_shape(codec.agree, like[0]) is not None:
    return None
  payload = payload_bytes(codec, like, 1 if exchange == "all_gather" else hosts)
  return _SENT[exchange](hosts, payload, 4 * sum(leaf.size for leaf in like))


def steps(
  mesh: jax.sharding.Mesh, grads: list[jax.Array], names: list[str]
) -> Iterator[tuple[str, Timed]]:
  """Compiles the plain mean, and then each step that is named."""
  hosts = mesh.size
  like = local_like(mesh, grads)
  copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))

  def timed(update: Callable[..., Any], state: Any, specs: Any, sent: Any) -> Timed:
    both = (P("data"), specs)
    step = jax.shard_map(update, mesh=mesh, in_specs=both, out_specs=both)
    step = jax.jit(step, donate_argnums=(0, 1)).lower(grads, state).compile()
    held = [state]
    keep = lambda outputs: held.__setitem__(0, outputs[1])
    return Timed(step, lambda: (copy(grads), held[0]), sent, keep, True)

  floats = 4 * sum(leaf.size for leaf in like)
  plain = lambda grads, state: (jax.lax.pmean(grads, "data"), state)
  yield BASELINE, timed(plain, (), (), _SENT["psum"](hosts, floats, floats))
  for name in names:
    codec, exchange = name.rsplit(" ", 1)
    case = methods.STEPS[codec]
    group = _GROUP if exchange == methods.GROUPED.name else 1
    if group >= hosts or hosts % group:
      continue
    try:
      tx = case.transformation(exchange)
    except ValueError:  # the library says that these do not go together
      continue
    with jax.set_mesh(mesh):  # owners keep something where their number is known
      specs = gradcomp.state_specs(jax.eval_shape(tx.init, like), axis_name="data")
    # Of parameters that all hosts have alike, as users have them.
    zeros = lambda: tx.init([jnp.zeros(x.shape, x.dtype) for x in like])  # noqa: B023
    state = jax.jit(jax.shard_map(zeros, mesh=mesh, in_specs=(), out_specs=specs))()
    updates = isinstance(case, methods.Optimizer)
    sent = None if updates else _arithmetic(case, exchange, like, hosts)
    step = timed(tx.update, state, specs, sent)
    yield name, dataclasses.replace(step, updates=updates)


def parts(
  mesh: jax.sharding.Mesh, grads: list[jax.Array], codec: Codec
) -> Iterator[tuple[str, Timed]]:
  """Compiles a two_shot exchange of equal leaves as programs that hand results on."""
  hosts = mesh.size
  like = local_like(mesh, grads)
  key = jnp.array([1, 2], jnp.uint32)
  rows = -(-like[0].size // codec.tile_size)  # of a leaf

  def encode(*leaves: jax.Array) -> jax.Array:
    matrix = jnp.concatenate([codec.encode(leaf, key=key).rows for leaf in leaves])
    padded = jnp.pad(matrix, ((0, -len(matrix) % hosts), (0, 0)))
    return padded.reshape(hosts, -1, codec.row_words)

  def all_to_all(shares: jax.Array) -> jax.Array:
    return scatter(shares.reshape(hosts, -1), "data").reshape(shares.shape)

  def average_own(received: jax.Array) -> jax.Array:
    total = codec.decode_rows(received[0])
    for share in received[1:]:
      total = total + codec.decode_rows(share)
    return codec.encode_rows(total * jnp.float32(1 / hosts), Context(key))

  def all_gather(own: jax.Array) -> jax.Array:
    return jax.lax.all_gather(own, "data", tiled=True)

  def decode(matrix: jax.Array) -> list[jax.Array]:
    return [
      codec.decode(Payload(matrix[i * rows : (i + 1) * rows]), like=leaf)
      for i, leaf in enumerate(like)
    ]

  share = (hosts - 1) / hosts * payload_bytes(codec, like, hosts)
  sent = {all_to_all: share, all_gather: share}
  values: tuple[jax.Array, ...] = tuple(grads)
  for function in (encode, all_to_all, average_own, all_gather, decode):
    mapped = jax.shard_map(
      function, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    program = jax.jit(mapped).lower(*values).compile()
    timed = Timed(program, lambda values=values: values, sent.get(function, 0.0))
    yield function.__name__, timed
    values = (program(*values),)
