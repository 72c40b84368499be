"""Goes on from a saved state, which ``python -m tests.support.saved_format`` writes."""

import hashlib
import json
import os
import pathlib

import chex
import jax
import numpy as np
import optax

import gradcomp
from gradcomp._src.checkpoint import records
from gradcomp.codecs import QSGD
from gradcomp.parallel import zero
from tests.plugins import selected
from tests.support import laws, modes

FOLDER = pathlib.Path(__file__).parents[1] / "checkpoint" / "saved_states"
N = 4
SHAPES = {
  "owners": (20, 13),
  "levels": (15, 17),
  "entries": (300,),
  "codes": (6, 64),
  "shares": (9, 40),
}
QSGD4 = QSGD(bits=4, bucket_size=32)


def optimizer():
  """One transformation a leaf: what each keeps, the others do not."""
  options = {"axis_name": "data", "min_leaf_size": 10}
  fitted = QSGD(bits=3, bucket_size=32, levels="nonuniform")
  two_shot = {"exchange": "two_shot", "feedback": "error"}
  int8 = gradcomp.ErrorFeedback(residual_dtype="int8")
  parts = {
    "owners": gradcomp.compress(QSGD4, **options, **two_shot, key=3),
    "levels": gradcomp.compress(fitted, **options, **two_shot),
    "entries": gradcomp.redsync(0.1, quantize="asq", exchange="all_gather", **options),
    "codes": gradcomp.compress(QSGD4, exchange="all_gather", feedback=int8, **options),
    "shares": zero(optax.sgd(0.1, 0.9), grads=QSGD4, params=QSGD4, **options),
  }

  def init(params):
    return {name: tx.init({name: params[name]}) for name, tx in parts.items()}

  def update(updates, state, params):
    found = {
      name: tx.update({name: updates[name]}, state[name], {name: params[name]})
      for name, tx in parts.items()
    }
    means = {name: mean[name] for name, (mean, _) in found.items()}
    return means, {name: new for name, (_, new) in found.items()}

  return optax.GradientTransformation(init, update)


def record():
  return gradcomp.checkpoint.make_record(optimizer(), first_params(), workers=N)


def first_params():
  return {name: np.full(shape, 0.5, np.float32) for name, shape in SHAPES.items()}


def steps(numbers, state=None):
  """Returns all outputs, and the state behind the last step."""
  update = modes.started("shard_map", modes.training(optimizer()), N).update
  outputs = []
  for number in numbers:
    gradient = laws.tree(SHAPES, N, seed=number)
    output, state = update(gradient, state, first_params())
    outputs.append(output)
  return outputs, state


def goes_on(file):
  """The hash of two steps from a file: of outputs, parameters and state."""
  found = jax.tree.leaves(steps((3, 4), restored(file)))
  hashed = hashlib.sha256()
  for leaf in found:
    hashed.update(np.asarray(leaf).tobytes())
  return hashed.hexdigest()[:16]


def restored(file):
  """The state of a file, in the structure of a new one."""
  mesh = modes.mesh(N)
  _, new = modes.placed(modes.training(optimizer()), first_params(), mesh)
  arrays = {name: file[name] for name in file if name.startswith("[")}
  named = lambda path, _: arrays.pop(jax.tree_util.keystr(path))
  state = jax.tree_util.tree_map_with_path(named, new)
  assert not arrays
  chex.assert_trees_all_equal_shapes_and_dtypes(state, new)
  specs = gradcomp.state_specs(new, axis_name="data")
  return gradcomp.checkpoint.put_on_mesh(state, mesh, specs)


def load(path):
  with np.load(path) as arrays:
    return dict(arrays)


def _write():
  os.environ["XLA_FLAGS"] = " ".join(selected.IN_LEAST_TIME)
  jax.config.update("jax_num_cpu_devices", N)
  _, state = steps(range(3))
  leaves = jax.tree_util.tree_leaves_with_path(state)
  file = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
  file["record"] = np.array(json.dumps(record()))
  file["goes_on"] = np.array(goes_on(file))
  FOLDER.mkdir(exist_ok=True)
  path = FOLDER / f"format-{records.FORMAT}.npz"
  np.savez_compressed(path, **file)
  print(f"wrote {path.stat().st_size:,} bytes to {path}")


if __name__ == "__main__":
  _write()
