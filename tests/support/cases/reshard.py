"""Gives states of N workers, and what waits in them, for the tests of reshard_state."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp import codecs
from gradcomp._src.transforms.low_rank import PowerSGD
from gradcomp.exchange import Hierarchical
from tests.support import laws, modes
from tests.support.cases.zero import coded

PARAMS = {
  "b": jnp.zeros(7),
  "one": jnp.zeros(()),
  "v": jnp.zeros((3, 100)),
  "w": jnp.zeros((40, 32)),
}
BUCKET = 32
TILE = 8 * BUCKET  # elements of a row
FOUR_BITS = codecs.QSGD(bits=4, bucket_size=BUCKET)
SHARED = codecs.QSGD(bits=8, bucket_size=BUCKET, share_scale=True)
EXCHANGES = {
  "all_gather": (FOUR_BITS, "all_gather"),
  "two_shot": (FOUR_BITS, "two_shot"),
  "ring": (FOUR_BITS, "ring"),
  "hierarchical": (FOUR_BITS, Hierarchical(group_size=2)),
  "psum": (SHARED, "psum"),
  # With memories: shared levels and rows, and thresholds of a worker's own.
  "levels": (codecs.QSGD(bits=3, bucket_size=BUCKET, levels="nonuniform"), "two_shot"),
  "threshold": (codecs.TopK(density=0.05, selection="threshold"), "two_shot"),
  "sampled": (codecs.TopK(density=0.05, selection="sampled"), "all_gather"),
  "asq": (codecs.TopK(density=0.05, quantize="asq"), "all_gather"),
  "powersgd": (PowerSGD(rank=2, min_rate=1), "all_gather"),
}


def compressed(name, feedback, **options):
  return laws.compressed(*EXCHANGES[name], feedback, min_leaf_size=0, **options)


zero = functools.partial(coded, optax.adam(0.1), FOUR_BITS, feedback="error")


def around():
  """Everything that may stand around an exchange."""
  labels = {"b": "rest", "one": "rest", "v": "coded", "w": "coded"}
  two_shot = functools.partial(compressed, "two_shot", "error")
  parts = {"coded": gradcomp.wrappers.switch([3], [two_shot(), two_shot(key=1)])}
  parted = optax.partition(parts | {"rest": compressed("ring", "error")}, labels)
  chain = optax.chain(parted, optax.trace(0.9), optax.scale(-0.1))
  guarded = gradcomp.skip_nonfinite(chain, 5, axis_name="data")
  return optax.MultiSteps(guarded, 3).gradient_transformation()


def params_of(name):
  """Those of a case: no map can stack the scalars that MultiSteps would collect."""
  scalar = {"one": jnp.zeros(1)} if name == "around" else {}
  return PARAMS | scalar


CASES = {
  f"{name} {feedback}": functools.partial(compressed, name, feedback)
  for name in EXCHANGES
  for feedback in (None, "error", "momentum")
}
CASES |= {
  "messages": functools.partial(compressed, "two_shot", "error", message_bytes=600),
  "zero": zero,
  "zero messages": functools.partial(zero, message_bytes=600),
  "around": around,
}


def shapes(tx, workers, params=PARAMS, **options):
  given = {"workers": workers, "axis_name": "data"} | options
  return gradcomp.checkpoint.state_shapes(tx, params, **given)


def reshard(state, tx, old, new, params=PARAMS, axis_name="data", **options):
  given = {"axis_name": axis_name, "old_workers": old, "workers": new} | options
  return gradcomp.reshard_state(tx, params, state, **given)


def filled(tx, workers, params=PARAMS):
  """A state of random numbers; those that only fill up rows are zeros, as in training.

  One worker owns all rows, and no others.
  """
  rng = np.random.default_rng(0)

  def draw(x):
    if np.issubdtype(x.dtype, np.floating):
      return rng.standard_normal(x.shape).astype(x.dtype)
    return rng.integers(0, 2, x.shape).astype(x.dtype)

  one = jax.tree.map(draw, shapes(tx, 1, params))
  again = lambda path, x: x if is_rows(path) else draw(x)
  state = reshard(one, tx, 1, workers, params)
  return jax.tree_util.tree_map_with_path(again, state)


def _below(*names):
  """Says whether the path of a leaf goes through a field of one of these names."""
  return lambda path: any(getattr(key, "name", None) in names for key in path)


is_rows = _below("server_residual", "arrays")
is_addends = _below("residual", "velocity", "acc_grads")
is_memory = _below("memory")


def leaves(tree):
  return jax.tree_util.tree_leaves_with_path(tree)


def total(x, workers):
  """The sum of what workers have stacked, in float64."""
  return np.asarray(x, np.float64).reshape(workers, -1).sum(axis=0)


def owned_leaves(state, groups=None):
  """What owners keep of leaves: rows of one leaf after another.

  ``groups`` are the leaves of each array: all, or as ``message_bytes=600`` cuts them.
  """
  (arrays,) = state.server_residual.values()
  if groups is None:
    groups = [PARAMS] if len(arrays) == 1 else [("b", "one"), ("v",), ("w",)]
  result = {}
  for array, names in zip(arrays, groups, strict=True):
    rows = np.asarray(array).reshape(array.shape[0], -1)
    for name in names:
      leaf = PARAMS[name]
      count = math.ceil(leaf.size / rows.shape[1])
      result[name] = rows[:count].reshape(-1)[: leaf.size].reshape(leaf.shape)
      rows = rows[count:]
    assert not rows.any()
  return result


def ranges(workers):
  """The leaves of each array of a sparse codec, of which a worker owns a range each."""
  groups = {}
  for name, leaf in PARAMS.items():
    groups.setdefault(math.ceil(leaf.size / workers), []).append(name)
  return groups.values()


def waiting(state, workers, weight=None):
  """Of each leaf, what a step has not sent, in units of a sum over the workers."""
  kept = {
    name: total(x, workers).reshape(PARAMS[name].shape)
    for name, x in state.residual.items()
  }
  if state.server_residual:
    for name, x in owned_leaves(state).items():
      kept[name] = kept[name] + (weight or workers) * np.asarray(x, np.float64)
  return kept


def unstacked(state):
  """Undoes ``modes.of_each``: the global arrays of a state."""

  def join(x, spec):
    x = np.asarray(x)
    return x[0] if spec == P() else x.reshape(-1, *x.shape[2:])

  return jax.tree.map(join, state, gradcomp.state_specs(state, axis_name="data"))


def step(tx, state, gradients, params=None):
  """One step of all workers: the global state, and gradients ``[N, ...]``."""
  workers = jax.tree.leaves(gradients)[0].shape[0]
  update = jax.vmap(lambda g, state: tx.update(g, state, params), axis_name="data")
  output, state = jax.jit(update)(gradients, modes.of_each(state, workers))
  return jax.tree.map(lambda x: np.asarray(x)[0], output), unstacked(state)


def gradients(workers, seed):
  return laws.tree({name: x.shape for name, x in PARAMS.items()}, workers, seed=seed)
