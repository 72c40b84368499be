"""Compiles the programs that hosts time: whole exchanges, and their parts.

A step takes a gradient and a state, and both are donated: the mean comes back in the
gradient's place, as in a train step. The state goes on from call to call, so that
fitted levels, signs that take turns and low-rank factors are those of a training.
"""

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
from gradcomp.codecs import Codec, Context

BASELINE = "plain f32 mean"


def steps(
  mesh: jax.sharding.Mesh, grads: list[jax.Array], names: list[str]
) -> Iterator[tuple[str, Timed]]:
  """Compiles the plain mean, and then each step that is named."""
  hosts = mesh.size
  like = [jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype) for x in grads]
  copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))

  def timed(update: Callable[..., Any], state: Any, specs: Any, updates: bool) -> Timed:
    both = (P("data"), specs)
    step = jax.shard_map(update, mesh=mesh, in_specs=both, out_specs=both)
    step = jax.jit(step, donate_argnums=(0, 1)).lower(grads, state).compile()
    held = [state]
    keep = lambda outputs: held.__setitem__(0, outputs[1])
    return Timed(step, lambda: (copy(grads), held[0]), keep, True, updates)

  plain = lambda grads, state: (jax.lax.pmean(grads, "data"), state)
  yield BASELINE, timed(plain, (), (), False)
  for name in names:
    codec, exchange = name.rsplit(" ", 1)
    case = methods.STEPS[codec]
    group = methods.GROUPED.group_size if exchange == methods.GROUPED.name else 1
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
    yield name, timed(tx.update, state, specs, case.updates)


def parts(
  mesh: jax.sharding.Mesh, grads: list[jax.Array], codec: Codec
) -> Iterator[tuple[str, Timed]]:
  """Compiles a two_shot exchange of equal leaves as programs that hand results on."""
  hosts = mesh.size
  like = [jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype) for x in grads]
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

  values: tuple[jax.Array, ...] = tuple(grads)
  for function in (encode, all_to_all, average_own, all_gather, decode):
    mapped = jax.shard_map(
      function, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    program = jax.jit(mapped).lower(*values).compile()
    yield function.__name__, Timed(program, lambda values=values: values)
    values = (program(*values),)
