"""Steps that one process of two traces otherwise: what each of them is told.

Nothing is computed. A step that went on would wait for the other process for ever.
"""

import collections
import dataclasses
import json
import os
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.kernels.gpu import self_check
from gradcomp._src.kernels.quantize import pallas, reference
from tests.support.hosts.averaging import QSGD4


def train(optimizer, names=("a", "b"), fails=False, aux=None):
  """Traces a step of ``make_train_step``."""
  mesh = jax.make_mesh((jax.device_count(),), ("data",))

  def loss_fn(params, batch):
    if fails:
      raise ZeroDivisionError("of this process alone")
    loss = jnp.sum(params["a"]) + 10 * jnp.sum(params["b"]) * jnp.mean(batch)
    return loss if aux is None else (loss, {aux: loss})

  options = gradcomp.TrainOptions(has_aux=aux is not None)
  step = gradcomp.make_train_step(
    loss_fn, optimizer, axis_name="data", mesh=mesh, options=options
  )
  params = collections.OrderedDict(
    (name, jax.ShapeDtypeStruct((64, 64), jnp.float32)) for name in names
  )
  with jax.set_mesh(mesh):
    state = jax.eval_shape(optimizer.init, params)
    jax.eval_shape(step, params, state, jax.ShapeDtypeStruct((2, 4), jnp.float32))


def step_of(codec=QSGD4, **options):
  """Returns a step of all processes that holds no more than ``update``."""
  tx = gradcomp.compress(codec, axis_name="data", **options)
  return jax.shard_map(
    lambda g: tx.update(g, tx.init(g))[0],
    mesh=jax.make_mesh((jax.device_count(),), ("data",)),
    in_specs=P(),
    out_specs=P(),
    check_vma=False,
  )


def update(exchange):
  """Traces a step with an exchange."""
  like = jax.ShapeDtypeStruct((64, 64), jnp.float32)
  jax.eval_shape(step_of(exchange=exchange), like)


def chain(codec=QSGD4):
  return optax.chain(gradcomp.compress(codec, axis_name="data"), optax.sgd(1.0))


def later():
  return gradcomp.wrappers.switch([2], [optax.identity(), optax.scale(0.5)])


def adam(eps):
  rate = optax.exponential_decay(0.1, 10, 0.5)  # whose numbers are compared, too
  return gradcomp.optimizers.adam(rate, axis_name="data", warmup=2, eps=eps)


def local(every):
  return gradcomp.local.local_steps(
    optax.sgd(0.1), optax.sgd(1.0), every=every, codec=QSGD4, axis_name="data"
  )


def kernels(host):
  """Traces an update, whose kernel fails on one process; returns whether it is in it.

  A device of the CPU stands for the GPU. The update's own kernel is for CUDA alone.
  """

  def encode_rows(*operands, interpret=False, **options):
    rows, residual = reference.encode_rows(*operands, **options)
    return rows + jnp.uint32(host), residual

  encode_rows.__module__ = "fake"

  def kernels_in(codec):
    traced = jax.make_jaxpr(step_of(codec))(jnp.ones((64, 256)))
    return str(traced).count("gradcomp_kernel")

  with (
    mock.patch.object(self_check, "_gpus", lambda: jax.local_devices()[:1]),
    mock.patch.object(self_check, "_TIMED_ELEMENTS", 1 << 12),
    mock.patch.object(pallas, "encode_rows", encode_rows),
    warnings.catch_warnings(record=True) as caught,
  ):
    warnings.simplefilter("always")
    of_xla = kernels_in(dataclasses.replace(QSGD4, implementation="xla"))
    more = kernels_in(QSGD4) - of_xla
  return {"kernels": more, "said": [str(warning.message) for warning in caught]}


# What each process traces, by its number.
CASES = {
  "order": lambda host: train(chain(), ("a", "b") if host == 0 else ("b", "a")),
  "rounds": lambda host: train(local(every=2 + host)),
  "exchange": lambda host: update("ring" if host else "two_shot"),
  "chain": lambda host: train(optax.chain(chain(), *[later()] * host)),
  "option": lambda host: train(adam((1e-8, 1e-6)[host])),
  "aux": lambda host: train(chain(), aux=("accuracy", "perplexity")[host]),
  "failed": lambda host: train(chain(), fails=host == 1),
  "same": lambda host: train(chain()),
  "kernels": kernels,
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
