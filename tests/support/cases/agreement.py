"""Threads that are the processes of a run, and the steps that they trace.

Steps are traced with shapes alone. A process is told what differs, or nothing.
"""

import threading

import jax
import jax.numpy as jnp
import pytest
from jax._src import distributed
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from gradcomp._src.core import agreement
from gradcomp._src.mesh.per_worker import PerWorker

GRADS = {
  "v": jax.ShapeDtypeStruct((64,), jnp.float32),
  "w": jax.ShapeDtypeStruct((256, 64), jnp.float32),
}


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
    told = [None] * len(functions)

    def process(number, function):
      own.number = number
      try:
        function()
      except Exception as error:
        told[number] = error

    threads = [threading.Thread(target=process, args=x) for x in enumerate(functions)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    return told

  return run


def mesh(size=None):
  return AbstractMesh((jax.device_count() if size is None else size,), ("data",))


def trace(tx, grads=GRADS, over=None):
  """Traces a step that the user has written, with ``update`` alone in it."""

  def step(grads):
    return tx.update(grads, tx.init(grads), grads)[0]

  mapped = jax.shard_map(
    step, mesh=over or mesh(), in_specs=P(), out_specs=P(), check_vma=False
  )
  jax.eval_shape(mapped, grads)


def trace_rows(tx):
  """Traces a step in plain jit under Auto axes, with the rows of all workers."""
  rows = lambda x: jax.ShapeDtypeStruct((mesh().size, *x.shape), x.dtype)
  auto = mesh().update(axis_types=(AxisType.Auto,))
  with jax.sharding.use_abstract_mesh(auto):
    grads = PerWorker(jax.tree.map(rows, GRADS), "data")
    jax.eval_shape(tx.update, grads, jax.eval_shape(tx.init, GRADS), GRADS)


def assert_told(error, match):
  with pytest.raises(ValueError, match=match):
    raise error
