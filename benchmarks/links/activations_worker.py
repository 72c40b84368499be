"""Times on one host how activations travel, and layers that are cut over the hosts.

  python -m benchmarks.links.activations_worker '{"rank": 0, ...}'

links/activations.py starts it.

A program's name in the report is a list in JSON: what it is, and its numbers.
"""

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.links import process
from benchmarks.links.steps import Timed, payload_bytes
from examples.lib.sharded.sub_batches import sub_batches
from gradcomp import parallel
from gradcomp.codecs import Codec, Dense, EightBit

PLAIN = "lax"  # JAX's own collective, in float32
CODECS: dict[str, Codec] = {
  "f32": Dense(),
  "dynamic_tree": EightBit(),
  "linear": EightBit(dtype="linear"),
  "mantissa": EightBit(dtype="mantissa"),
  "static_tree": EightBit(dtype="static_tree"),
}


def compiled(
  mesh: jax.sharding.Mesh,
  function: Callable[..., Any],
  *shapes: tuple[int, ...],
  arithmetic: float = 0.0,
) -> Timed:
  """Compiles a function of one host's arrays, drawn here.

  Its results stay on the hosts.
  """
  rng = np.random.default_rng(jax.process_index())
  local = [rng.standard_normal(shape, np.float32) for shape in shapes]
  arrays = tuple(process.spread(mesh, x) for x in local)
  mapped = jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
  program = jax.jit(mapped).lower(*arrays).compile()
  return Timed(program, lambda: arrays, arithmetic)


def gather(
  mesh: jax.sharding.Mesh, codec: str, rows: int, columns: int, axis: int
) -> Timed:
  """Sends ``[rows, columns]`` of each host to all others, as in a forward pass."""
  send: Callable[[jax.Array], jax.Array] = lambda x: parallel.all_gather(
    x, axis_name="data", axis=axis, codec=CODECS[codec]
  )
  if codec == PLAIN:
    send = lambda x: lax.all_gather(x, "data", axis=axis, tiled=True)
  sent = _sent(mesh, codec, rows, columns)
  return compiled(mesh, send, (rows, columns), arithmetic=sent)


def scatter(
  mesh: jax.sharding.Mesh, codec: str, rows: int, columns: int, axis: int
) -> Timed:
  """Adds at each host the ``[rows, columns]`` of all, as in a backward pass."""
  shape = (rows * mesh.size, columns) if axis == 0 else (rows, columns * mesh.size)
  add: Callable[[jax.Array], jax.Array] = lambda x: parallel.psum_scatter(
    x, axis_name="data", axis=axis, codec=CODECS[codec]
  )
  if codec == PLAIN:
    add = lambda x: lax.psum_scatter(x, "data", scatter_dimension=axis, tiled=True)
  return compiled(mesh, add, shape, arithmetic=_sent(mesh, codec, rows, columns))


def _sent(mesh: jax.sharding.Mesh, codec: str, *shape: int) -> int:
  """Counts the bytes of an array that a host sends to all others."""
  part = _floats(*shape)
  own = 4 * part.size if codec == PLAIN else payload_bytes(CODECS[codec], [part], 1)
  return (mesh.size - 1) * own


def layer(w: jax.Array, batch: jax.Array) -> jax.Array:
  """Returns a number that needs all outputs of the columns of a dense layer."""
  return jnp.sum(jax.nn.relu(batch @ w) ** 2)


def product(mesh: jax.sharding.Mesh, rows: int, inputs: int, outputs: int) -> Timed:
  """Computes the layer of one pass, whose inputs are there, forward."""
  columns = (inputs, outputs // mesh.size)
  forward = lambda w, batch: layer(w, batch)[None]
  return compiled(mesh, forward, columns, (rows, inputs))


def products(mesh: jax.sharding.Mesh, rows: int, inputs: int, outputs: int) -> Timed:
  """Computes the same forward and backward."""
  columns = (inputs, outputs // mesh.size)
  return compiled(mesh, jax.grad(layer, (0, 1)), columns, (rows, inputs))


def step(
  mesh: jax.sharding.Mesh,
  codec: str,
  samples: int,
  inputs: int,
  outputs: int,
  passes: int,
  prefetch: bool,
) -> Timed:
  """Computes the gradients of the layer and of its inputs, in so many passes."""

  def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    sums = sub_batches(
      lambda batch, number: layer(w, batch),
      x,
      axis_name="data",
      passes=passes,
      codec=CODECS[codec],
      prefetch=prefetch,
    )
    return jnp.sum(sums)

  sent = 2 * passes * _sent(mesh, codec, samples // passes, inputs)
  columns = (inputs, outputs // mesh.size)
  both = jax.grad(loss, (0, 1))
  return compiled(mesh, both, columns, (samples, inputs), arithmetic=sent)


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, jnp.float32)


PROGRAMS: dict[str, Callable[..., Timed]] = {
  function.__name__: function for function in (gather, scatter, product, products, step)
}


def main(options: dict[str, Any]) -> dict[str, Any]:
  mesh = process.joined(options)
  meet = process.meeting(mesh)
  programs = {
    json.dumps(call): functools.partial(PROGRAMS[call[0]], mesh)(*call[1:])
    for call in options["programs"]
  }
  results = process.measure(programs, options["repeats"], meet, options["interface"])
  return {"steps": results}


if __name__ == "__main__":
  process.run(main)
