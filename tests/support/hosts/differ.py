"""Steps that one process of two traces otherwise: what each of them is told.

Nothing is computed. A step that went on would wait for the other process for ever.
"""

import collections
import json
import os

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import gradcomp
from tests.support.hosts.averaging import QSGD4


def train(optimizer, names=("a", "b"), fails=False):
  """Traces a step of ``make_train_step``."""
  mesh = jax.make_mesh((jax.device_count(),), ("data",))

  def loss_fn(params, batch):
    if fails:
      raise ZeroDivisionError("of this process alone")
    return jnp.sum(params["a"]) + 10 * jnp.sum(params["b"]) * jnp.mean(batch)

  step = gradcomp.make_train_step(loss_fn, optimizer, axis_name="data", mesh=mesh)
  params = collections.OrderedDict(
    (name, jax.ShapeDtypeStruct((64, 64), jnp.float32)) for name in names
  )
  with jax.set_mesh(mesh):
    state = jax.eval_shape(optimizer.init, params)
  jax.eval_shape(step, params, state, jax.ShapeDtypeStruct((2, 4), jnp.float32))


def update(exchange):
  """Traces a step that holds no more than ``update``."""
  tx = gradcomp.compress(QSGD4, axis_name="data", exchange=exchange)
  mesh = jax.make_mesh((jax.device_count(),), ("data",))
  step = jax.shard_map(
    lambda g: tx.update(g, tx.init(g))[0],
    mesh=mesh,
    in_specs=P(),
    out_specs=P(),
    check_vma=False,
  )
  jax.eval_shape(step, jax.ShapeDtypeStruct((64, 64), jnp.float32))


def chain(codec=QSGD4):
  return optax.chain(gradcomp.compress(codec, axis_name="data"), optax.sgd(1.0))


def later():
  return gradcomp.wrappers.switch([2], [optax.identity(), optax.scale(0.5)])


def local(every):
  return gradcomp.local.local_steps(
    optax.sgd(0.1), optax.sgd(1.0), every=every, codec=QSGD4, axis_name="data"
  )


# What each process traces, by its number.
CASES = {
  "order": lambda host: train(chain(), ("a", "b") if host == 0 else ("b", "a")),
  "rounds": lambda host: train(local(every=2 + host)),
  "exchange": lambda host: update("ring" if host else "two_shot"),
  "chain": lambda host: train(optax.chain(chain(), *[later()] * host)),
  "failed": lambda host: train(chain(), fails=host == 1),
  "same": lambda host: train(chain()),
  "silent": lambda host: update("ring") if host == 0 else None,
}


def differ(host, folder):
  """Saves what the process is told."""
  told = {}
  for name, run in CASES.items():
    if name == "silent":
      os.environ["GRADCOMP_PATIENCE_SECONDS"] = "1"
    try:
      told[name] = run(host)
    except (ValueError, ZeroDivisionError) as error:
      told[name] = str(error)
  (folder / f"told.{host}.json").write_text(json.dumps(told))
