"""Makes Adam with exchanges of momenta, and states of it behind its warm-up."""

import jax
import jax.numpy as jnp
import optax

from gradcomp.codecs import OneBit
from gradcomp.optimizers import adam

BUCKET = 32
ONE_BIT = OneBit(bucket_size=BUCKET)
LEAVES = {"w": (6, 50), "v": (300,), "one": ()}
MODES = ["vmap", "pmap", "shard_map", "shard_map_unchecked", "auto", "explicit"]


def make(local=None, codec=ONE_BIT, rate=0.1, **options):
  given = {"axis_name": "data", "min_leaf_size": 10, "warmup": 2, "floor": 0.0}
  return adam(rate, codec=codec, local=local, **given | options)


def moments_of(state):
  """The moments in a state of either kind: a chain's, or one of local steps."""
  return getattr(state, "moments", None) or state[0]


def settled(tx, done=0):
  """Behind the warm-up, with variances of one, and ``done`` steps since an exchange."""

  def init(params):
    state = tx.init(params)
    nu, one = jax.tree.map(jnp.ones_like, moments_of(state).nu), jnp.int32(1)
    after = {"count": one + done, "dense": -one, "updates": one, "later": one, "nu": nu}
    moments = moments_of(state)._replace(**after)
    if hasattr(state, "moments"):
      return state._replace(moments=moments, synced=one)
    return (moments, *state[1:])

  return optax.GradientTransformationExtraArgs(init, tx.update)


def dense_steps(first, steps, each=16):
  """The steps that update the variance: gaps as of 0/1 Adam follow the warm-up."""
  found, step = [*range(first)], first - 1
  for number in range(steps):
    step += 2 ** (number // each)
    found.append(step)
  return {x for x in found if x < steps}
