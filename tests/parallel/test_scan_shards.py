"""Layers of FSDP in a loop: whole layers are constant, and bad arguments are named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from gradcomp import parallel
from gradcomp.codecs import QSGD, EightBit, OneBit
from tests.support.assertions import says
from tests.support.cases.scan import ROWS, WIDTH, body, layers_of, loss_of, whole

N = 4
PLAIN = dict(axis_name="data", params=None, grads=None)
SHARDS = jax.tree.map(lambda x: np.stack(np.split(x, N, axis=1)), layers_of(3))
X, WEIGHTS = whole(ROWS, WIDTH, seed=5), whole(3, WIDTH, seed=6)
GOOD = layers_of(3)


def test_whole_layers_are_constant():
  def loss(shards, layers):
    given = dict(PLAIN, whole=layers)
    return loss_of(parallel.scan_shards(body, X, shards, **given), WEIGHTS)

  grads = jax.vmap(jax.grad(loss, (0, 1)), (0, None), axis_name="data")
  rows, zeros = jax.device_get(jax.jit(grads)(SHARDS, GOOD))
  assert all(x.any() for x in jax.tree.leaves(rows))
  assert not any(x.any() for x in jax.tree.leaves(zeros))


@pytest.mark.parametrize("given", ["equal", "of one half"])
def test_a_residual_that_jax_would_add_up_is_refused(given):
  """It is typed as equal on all workers, or over an axis over which shards differ."""
  layer = lambda x, w: (x @ w, None)
  run = lambda x, w, e: parallel.scan_shards(
    layer, x, w, axis_name="data", params=None, grads=None, residual=e
  )[0]
  specs = {"equal": (P("model"), "data"), "of one half": (P("data"), "model")}
  spec, missing = specs[given]
  every = P(("data", "model"))
  step = jax.shard_map(
    run,
    mesh=Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model")),
    in_specs=(every, P(None, ("data", "model")), spec),
    out_specs=every,
  )
  of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  shapes = of(8, 4), of(3, 8, 4), of(6, 4, 4)
  with pytest.raises(
    ValueError, match=says("`residual`", f"['{missing}']", "in_specs")
  ):
    jax.eval_shape(step, *shapes)


WRONG = {
  "key": (dict(grads=QSGD(bits=4)), ["`key`", "QSGD"]),
  "residual": (dict(grads=OneBit()), ["`grads`", "`residual` is None"]),
  "axis": (dict(axis=2), ["`axis`", "1 axes"]),
  "shapes": (
    dict(residual={k: x[..., :16] for k, x in GOOD.items()}),
    ["`residual`", "(3, 32, 32)", "gather_residual"],
  ),
  "codec": (
    dict(params=EightBit(), whole=GOOD),
    ["`params`", "None with `whole`", "EightBit"],
  ),
  "inner": (
    dict(backward_axis_name="data", whole=GOOD),
    ["`backward_axis_name`", "'data'"],
  ),
  "shards": (
    dict(whole={k: x[:, ::4] for k, x in GOOD.items()}),
    ["`whole`", "(3, 32, 32)", "(3, 8, 32)", "all_gather"],
  ),
  "tree": (dict(whole=list(GOOD.values())), ["`whole`", "a tree like `shards`"]),
  "lengths": (
    dict(whole=GOOD | {"b": GOOD["b"][:2]}),
    ["`whole`", "the same number in each", "[2, 3]"],
  ),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_arguments_are_named(case):
  options, words = WRONG[case]
  run = lambda w: parallel.scan_shards(body, X, w, **PLAIN | options)
  with pytest.raises(ValueError, match=says(*words)):
    jax.eval_shape(jax.vmap(run, axis_name="data"), SHARDS)
