"""Threads that are the processes of a run, and the steps of shapes that they trace."""

import threading
from concurrent import futures

import jax
import jax.numpy as jnp
import optax
import pytest
from jax._src import distributed
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.mesh import agreement
from gradcomp._src.mesh.trees import PerWorker
from gradcomp.codecs import QSGD
from tests.support.option_fields import with_options

GRADS = {
  "v": jax.ShapeDtypeStruct((64,), jnp.float32),
  "w": jax.ShapeDtypeStruct((256, 64), jnp.float32),
}
A, B = GRADS["v"], jax.ShapeDtypeStruct((64,), jnp.bfloat16)
SGD, MOMENTUM = optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)


class Store:
  """The key-value store of all processes."""

  def __init__(self):
    self.values = {}

  def key_value_set(self, key, value, allow_overwrite=False):
    assert allow_overwrite or key not in self.values
    self.values[key] = value

  def key_value_dir_get(self, folder):
    return [x for x in list(self.values.items()) if x[0].startswith(folder)]

  def blocking_key_value_get(self, key, milliseconds):
    return self.values[key]


def processes(monkeypatch):
  """Returns what runs functions, a process each, and returns what each was told."""
  jax.devices()  # before there is a store, which JAX would give to gloo
  own = threading.local()
  monkeypatch.setattr(distributed.global_state, "client", Store())
  monkeypatch.setattr(agreement, "_agreed", {})
  monkeypatch.setattr(jax, "process_index", lambda: own.number)
  monkeypatch.setenv("GRADCOMP_PATIENCE_SECONDS", "30")

  def run(*functions):
    monkeypatch.setattr(jax, "process_count", lambda: len(functions))

    def process(number, function):
      own.number = number
      function()

    with futures.ThreadPoolExecutor(len(functions)) as pool:
      started = [pool.submit(process, *x) for x in enumerate(functions)]
    return [future.exception() for future in started]

  return run


def mesh(size=None):
  return AbstractMesh((jax.device_count() if size is None else size,), ("data",))


def compressed(bits=4, **options):
  return gradcomp.compress(QSGD(bits=bits), axis_name="data", **options)


def step_of(tx, over=None):
  """A step that the user has written, with ``update`` alone in it."""
  step = lambda grads: tx.update(grads, tx.init(grads), grads)[0]
  whole = {"in_specs": P(), "out_specs": P(), "check_vma": False}
  return jax.shard_map(step, mesh=over or mesh(), **whole)


def trace(tx, grads=GRADS, over=None):
  jax.eval_shape(step_of(tx, over), grads)


def trace_rows(tx):
  """Traces a step in plain jit under Auto axes, with the rows of all workers."""
  rows = lambda x: jax.ShapeDtypeStruct((mesh().size, *x.shape), x.dtype)
  auto = mesh().update(axis_types=(AxisType.Auto,))
  with jax.sharding.use_abstract_mesh(auto):
    grads = PerWorker(jax.tree.map(rows, GRADS), "data")
    jax.eval_shape(tx.update, grads, jax.eval_shape(tx.init, GRADS), GRADS)


def loss_of(has_aux=False, has_weight=False, model_state=None, aux=1.0, **_):
  """A loss that returns what the options of a train step say."""

  def loss_fn(params, *args):
    loss = jnp.sum(params["v"] * args[-1])
    loss = (loss, jnp.float32(1)) if has_weight else loss
    rest = [*args[:-1], *[aux] * has_aux]
    return (loss, rest[0] if len(rest) == 1 else (*rest,)) if rest else loss

  return loss_fn


def train(*chain, loss=None, **options):
  """Traces a step of make_train_step."""
  optimizer = optax.chain(*chain)
  loss = loss_of(**options) if loss is None else loss
  options.pop("aux", None)
  step = gradcomp.make_train_step(
    loss,
    optimizer,
    axis_name="data",
    mesh=mesh(),
    **with_options(gradcomp.TrainOptions, options),
  )
  params = {"v": A}
  with jax.sharding.use_abstract_mesh(mesh()):
    state = jax.eval_shape(optimizer.init, params)
  inspects = options.get("compare_every") == 3
  batch = jax.ShapeDtypeStruct((jax.device_count(), 64), jnp.float32)
  args = params, state, *[B] * ("model_state" in options), batch
  jax.eval_shape(lambda *args: step(*args, inspect=inspects), *args)


def usual(**options):
  train(compressed(), SGD, **options)


def assert_told(error, match):
  with pytest.raises(ValueError, match=match):
    raise error
