"""``place`` puts a state on a mesh; test_many_hosts.py does so in two processes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from tests.support import modes
from tests.support.assertions import assert_same_bits

MESH = modes.mesh(4)
PARAMS = {"w": np.linspace(-1, 1, 40 * 32, dtype=np.float32).reshape(40, 32)}
TX = optax.chain(
  gradcomp.qsgd(bits=4, axis_name="data", feedback="error", exchange="two_shot"),
  optax.adam(0.1),
  optax.add_noise(0.01, 0.5, jax.random.key(3)),  # a typed key
)


def test_a_placed_state_has_its_numbers_and_the_shardings_of_its_specs():
  """As ``init`` made it, on the host, on one device, and whole on each of a mesh."""
  rng = np.random.default_rng(0)
  draw = lambda x: jax.device_put(rng.random(x.shape, np.float32), x.sharding)
  with jax.set_mesh(MESH):
    new = TX.init(PARAMS)
  state = PARAMS, jax.tree.map(lambda x: draw(x) if x.dtype == np.float32 else x, new)
  specs = gradcomp.state_specs(state, axis_name="data")
  assert P("data") in jax.tree.leaves(specs)
  is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
  on_host = lambda x: jnp.copy(x) if is_key(x) else np.array(x)
  for given in (
    state,
    jax.tree.map(on_host, state),
    jax.device_put(state, jax.devices()[5]),
    gradcomp.checkpoint.put_on_mesh(state, MESH, P()),
  ):
    placed = gradcomp.checkpoint.put_on_mesh(given, MESH, specs)
    assert_same_bits(*(jax.tree.map(modes.words, x) for x in (placed, state)))
    for x, spec in zip(jax.tree.leaves(placed), jax.tree.leaves(specs), strict=True):
      assert x.sharding == NamedSharding(MESH, spec)


@pytest.mark.parametrize("workers", [1, 4])
def test_it_shares_no_memory_with_what_it_was_made_from(workers):
  """A step donates what was placed, and a program writes into its own arrays."""
  mesh = modes.mesh(workers)
  room = np.zeros(16 * 64 + 16, np.float32)
  start = -room.ctypes.data % 64 // 4  # JAX takes memory of NumPy's at such an address
  read = room[start : start + 16 * 64].reshape(16, 64)
  live = jax.device_put(np.ones((16, 64)), NamedSharding(mesh, P()))
  placed = gradcomp.checkpoint.put_on_mesh([read, live, live], mesh, P())
  read[:] = 1
  assert not np.any(placed[0])
  for x in placed:
    x.delete()
  np.testing.assert_array_equal(live, np.ones((16, 64)))


def test_numbers_have_the_types_of_jax():
  state = {"a": np.zeros(4), "b": 2, "c": 0.5, "d": np.int8(3), "e": None}
  placed = gradcomp.checkpoint.put_on_mesh(state, MESH, P())
  found = [x.dtype.name for x in jax.tree.leaves(placed)]
  assert found == ["float32", "int32", "float32", "int8"]
