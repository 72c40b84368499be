"""Runs every codec in every exchange for some steps, and hashes all that comes out.

``golden.json`` holds the hashes of a time when oracles, laws and breaks had been run
over everything. A change that means to change no bits changes no hash: see
``test_golden.py``. ``python -m tests.support.golden`` writes the file anew, for changes
that mean to. From the first release on they raise ``gradcomp._src.version.WIRE``, which
the file keeps.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import gradcomp
from gradcomp._src.version import WIRE
from gradcomp.codecs import (
  QSGD,
  BlockTop,
  Codec,
  EightBit,
  FloatCast,
  RandomK,
  Ternary,
  TopK,
)
from tests.plugins import selected
from tests.support import laws, modes

FILE = pathlib.Path(__file__).parents[1] / "golden.json"
EXCHANGES = ("all_gather", "two_shot", "ring", "hierarchical", "psum")
NUMBERS = (1, 3, 4)
STEPS = 3

# One codec for each kind of sum, in every place where transformations run.
KINDS = [
  (QSGD(bits=4, bucket_size=64), "two_shot"),
  (QSGD(bits=3, bucket_size=64, levels="nonuniform"), "ring"),
  (QSGD(bits=4, bucket_size=64, share_scale=True), "two_shot"),
  (Ternary(), "psum"),
  (FloatCast(accumulate="kahan", rounding="stochastic"), "ring"),
  (FloatCast(), "all_gather"),
  (TopK(density=0.02, range_size=1000, selection="sampled"), "two_shot"),
  (RandomK(density=0.1, range_size=1000), "psum"),
  (BlockTop(bits=8, block_size=8, count=2), "two_shot"),
]
# Feedback that is not the codec's default.
FEEDBACK = [
  *((QSGD(bits=4, bucket_size=64), e, "error") for e in EXCHANGES[:4]),
  (QSGD(bits=4, bucket_size=64), "two_shot", "momentum"),
  (QSGD(bits=4, bucket_size=64, share_scale=True), "psum", "error"),
  (EightBit(bucket_size=64, rounding="stochastic"), "two_shot", "error"),
  (TopK(density=0.02, range_size=1000), "all_gather", "momentum"),
  (TopK(density=0.02, range_size=1000, quantize="asq"), "two_shot", "momentum"),
  (RandomK(density=0.1, range_size=1000), "psum", "momentum"),
  (FloatCast(), "two_shot", "momentum"),
]


class Case(NamedTuple):
  """A transformation, the number of its workers, and where they run."""

  codec: Codec
  exchange: str
  workers: int
  feedback: str = "auto"
  mode: str = "vmap"

  @property
  def name(self) -> str:
    rest = (self.exchange, str(self.workers), self.feedback, self.mode)
    return " ".join((laws.name(self.codec), *rest))


def transformation(case):
  codec = case.codec
  if getattr(codec, "implementation", "") is None:
    codec = dataclasses.replace(codec, implementation="xla")
  codec = laws.kept(codec) if case.feedback else codec
  exchange = modes.grouped(case.exchange, {1: 1, 3: 3, 4: 2}[case.workers])
  return gradcomp.compress(
    codec,
    axis_name="data",
    exchange=exchange,
    feedback=case.feedback,
    min_leaf_size=64,
    key=7,
  )


def is_allowed(case):
  try:
    transformation(case)
  except ValueError:
    return False
  return True


@functools.cache
def cases():
  """Every case, in an order that changes with the list of codecs alone."""
  every = [Case(c, e, n) for c in laws.CODECS for e in EXCHANGES for n in NUMBERS]
  every += [Case(c, "local", 3) for c in laws.CODECS]
  every += [Case(c, e, n, feedback) for c, e, feedback in FEEDBACK for n in NUMBERS]
  every += [Case(c, e, 4, mode=mode) for c, e in KINDS for mode in modes.modes_for(4)]
  return list(dict.fromkeys(case for case in every if is_allowed(case)))


def gradients(workers):
  """A matrix, a leaf that stays dense and a scalar; the second step has a NaN."""
  rng = np.random.default_rng(11)
  trees = []
  for step in range(STEPS):
    tree = {
      name: rng.standard_normal((workers, *shape)).astype(np.float32)
      for name, shape in (("a", (70, 71)), ("b", (37,)), ("c", ()))
    }
    if step == 1:
      tree["a"][-1, 3, 5] = np.nan
    trees.append(jax.tree.map(jnp.asarray, tree))
  return trees


def digest(case):
  """The hash of all outputs and states.

  Arrays of a state count as a set of their bytes, so that fields may change their names
  and places, and what several leaves hold alike counts once.
  """
  hashed = hashlib.sha256()
  for outputs, state in steps(case):
    for leaf in outputs.values():
      hashed.update(_bytes(leaf))
    for part in sorted({_bytes(leaf) for leaf in state.values()}):
      hashed.update(hashlib.sha256(part).digest())
  return hashed.hexdigest()[:16]


def steps(case):
  """Yields the outputs and the arrays of the state of each step, by their paths."""
  update, state = modes.mapped(case.mode, transformation(case), case.workers), None
  for gradient in gradients(case.workers):
    params = jax.tree.map(lambda leaf: leaf[0], gradient)
    output, state = update(gradient, state, params)
    yield _by_path(output), _arrays(state, case, params)


def _by_path(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _arrays(state, case, params):
  """The arrays of a state, where what workers remember of all leaves is one array.

  So it was when the hashes were made: for each leaf as many rows as N owners would
  have, and for those that are sent whole no threshold and all elements.
  """
  own = {} if state.memory is None else state.memory.own
  kept = {i: tree for trees in own.values() for i, tree in trees.items()}
  whole, workers = [], case.workers
  for number, leaf in enumerate(jax.tree.leaves(params)):
    if kept:
      codec = case.codec.ranged(leaf.size, workers)
      rows = -(-leaf.size // codec.tile_size)
      found = kept.get(number)
      used = np.full((workers, 1), leaf.size, np.int32)
      parts = (np.zeros((workers, 0), np.float32), used) if found is None else found
      parts = [np.asarray(part).reshape(workers, -1) for part in parts]
      whole.append([np.pad(x, ((0, 0), (0, rows - x.shape[1]))) for x in parts])
  rest = _by_path(state if not kept else state._replace(memory=None))
  joined = [np.concatenate(parts, axis=1) for parts in zip(*whole, strict=True)]
  return rest | {f".memory.own {k}": array for k, array in enumerate(joined)}


def _bytes(leaf):
  """The bytes of an array, in which every NaN is the same."""
  array = np.asarray(leaf)
  if array.dtype.kind == "f":
    array = np.where(np.isnan(array), array.dtype.type(np.nan), array)
  return array.dtype.str.encode() + array.tobytes()


def read():
  """The number of the wire, and the hashes by the names of the cases."""
  return json.loads(FILE.read_text())


def _write():
  os.environ["JAX_NUM_CPU_DEVICES"] = "8"  # of the processes that are started here
  os.environ["XLA_FLAGS"] = " ".join(selected.IN_LEAST_TIME)
  spawned = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(2, spawned) as pool:
    found = pool.map(_named, cases(), chunksize=8)
    new = {"wire": WIRE, "hashes": dict(found)}
  FILE.write_text(json.dumps(new, indent=0) + "\n")
  print(f"wrote {len(new['hashes'])} hashes to {FILE}")


def _named(case):
  try:
    return case.name, digest(case)
  finally:
    jax.clear_caches()


if __name__ == "__main__":
  _write()
