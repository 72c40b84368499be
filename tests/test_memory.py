"""A step needs little more temporary memory than its messages and one gradient."""

import jax
import jax.numpy as jnp
import modes
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from slow_cases import slow

import gradcomp
from gradcomp.codecs import QSGD, EightBit, FloatCast, OneBit, RandomK, Ternary, TopK
from gradcomp.exchange import as_exchange, plan_messages

SIZE, WORKERS = 1 << 20, 4


def temporaries(codec, exchange):
  """The temporary bytes of an update of one leaf, in gradients, as XLA plans them."""
  mesh = modes.mesh(WORKERS)
  tx = gradcomp.compress(codec, axis_name="data", exchange=exchange, feedback="error")
  with jax.set_mesh(mesh):
    state = jax.eval_shape(tx.init, jax.ShapeDtypeStruct((SIZE,), jnp.float32))
  specs = gradcomp.state_specs(state, "data")

  def placed(like, spec):
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)

  update = jax.shard_map(
    tx.update, mesh=mesh, in_specs=(P("data"), specs), out_specs=(P(), specs)
  )
  grads = placed(jax.ShapeDtypeStruct((WORKERS * SIZE,), jnp.float32), P("data"))
  lowered = jax.jit(update, donate_argnums=1).lower(
    grads, jax.tree.map(placed, state, specs)
  )
  analysis = lowered.compile().memory_analysis()
  return analysis.temp_size_in_bytes / (4 * SIZE)


@pytest.mark.parametrize(
  "codec, exchange",
  [
    (RandomK(density=0.01), "psum"),
    (QSGD(bits=4), "two_shot"),
    *slow(
      (QSGD(bits=4), "all_gather"),
      (OneBit(), "two_shot"),
      (Ternary(), "psum"),
      (EightBit(), "two_shot"),
      (FloatCast(), "all_gather"),
      (TopK(density=0.01), "all_gather"),
    ),
  ],
  ids=str,
)
def test_temporaries_are_the_payloads_and_one_and_a_half_gradients(codec, exchange):
  (message,) = plan_messages(
    [jax.ShapeDtypeStruct((SIZE,), jnp.float32)],
    [()],
    codec,
    exchange=as_exchange(exchange),
    workers=WORKERS,
    min_leaf_size=None,
    message_bytes=None,
  )
  payload = message.layout.nbytes / (4 * SIZE)
  # A worker's own, and those that it receives: all others', or two stages of one.
  payloads = (1 + WORKERS if exchange == "all_gather" else 3) * payload
  assert temporaries(codec, exchange) < payloads + 1.5
