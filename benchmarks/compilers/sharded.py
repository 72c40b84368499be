"""Steps of layers in a loop that are sharded: who sends what, by form.

Each of eight workers owns an eighth of eight dense layers of 2048 in bfloat16. Layers
are sent in 8 bits, and their gradients in 4.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from gradcomp import parallel
from gradcomp.codecs import QSGD, EightBit

AHEAD = "layers gathered ahead"
INNER = "layers gathered ahead, inside a host in the backward pass"
OWNERS = "gradients sent to the owners of layers"
FORMS = (AHEAD, INNER, OWNERS)
LAYERS, WIDTH, BATCH = 8, 2048, 2048


def axes_of(form: str) -> dict[str, int]:
  """Returns the names and sizes of the workers' axes."""
  return {"host": 2, "chip": 4} if form == INNER else {"data": 8}


def program(mesh: Mesh, form: str) -> tuple[Any, tuple[Any, ...]]:
  """Returns the jitted step, and structs of its arguments."""
  names: tuple[str, ...] = tuple(mesh.axis_names)
  way: dict[str, Any] = {
    "axis_name": names,
    "params": None if form == OWNERS else EightBit(bucket_size=128),
    "codec": QSGD(bits=4),
    "axis": 0,
    "key": jax.random.key(0, impl="threefry2x32"),
    "backward_axis_name": "chip" if form == INNER else None,
  }

  def body(x: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(x @ layer), None

  def step(shards: jax.Array, layers: jax.Array, x: jax.Array) -> jax.Array:
    whole = layers if form == OWNERS else None

    def loss(shards: jax.Array) -> jax.Array:
      y, _ = parallel.scan(body, x, shards, whole=whole, **way)
      return jnp.mean(jnp.square(y.astype(jnp.float32)))

    return shards - (0.1 * jax.grad(loss)(shards)).astype(shards.dtype)

  cut, whole, rows = jax.P(None, names), jax.P(), jax.P(names)
  mapped = jax.shard_map(step, mesh=mesh, in_specs=(cut, whole, rows), out_specs=cut)
  struct = lambda shape, spec: jax.ShapeDtypeStruct(
    shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec)
  )
  layers = (LAYERS, WIDTH, WIDTH)
  batch = struct((mesh.size * BATCH, WIDTH), rows)
  return jax.jit(mapped), (struct(layers, cut), struct(layers, whole), batch)
