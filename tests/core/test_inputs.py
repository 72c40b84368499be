"""Arrays that an update is given may be in boxes, as flax.nnx has them, or not."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import gradcomp
from tests.plugins.slow_cases import slow
from tests.support import laws, modes
from tests.support.assertions import assert_same_bits
from tests.support.cases.steps import OVER, N

QSGD4 = {"bits": 4, "bucket_size": 32, "min_leaf_size": 0}
ARRAYS = laws.tree({"b": (32,), "w": (64, 32)})


class Linear(nnx.Module):
  """Has Variables of numbers and of keys, which are not trained."""

  def __init__(self):
    self.b, self.w = (nnx.Param(jnp.asarray(x)) for x in ARRAYS.values())
    self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("placed", [False, *slow(True)])
def test_arrays_may_be_in_boxes_or_not(placed):
  """A state of ``nnx.Optimizer`` beside gradients of a module, and any other mixture.

  Bits are random, by the names of leaves, and equal to those of a dict.
  """
  over = OVER if placed else {}
  kept = gradcomp.qsgd(feedback="error", **QSGD4, **over)
  tx = gradcomp.skip_nonfinite(kept, 3, **over)
  pure = nnx.as_pure

  def step(grads, state):
    if placed:
      rows = lambda g: jnp.tile(g[None], (N, *[1] * g.ndim))
      grads = gradcomp.PerWorker(jax.tree.map(rows, grads), **OVER)
    return tx.update(grads, state)

  params = nnx.state(Linear(), nnx.Param)
  with jax.set_mesh(modes.mesh(N)):
    boxed = nnx.Optimizer(Linear(), tx, wrt=nnx.Param).opt_state
    given = [(params, boxed), (pure(params), boxed), (params, pure(boxed))]
    given.append((ARRAYS, tx.init(ARRAYS)))
    *found, expected = jax.jit(lambda pairs: [step(*x) for x in pairs])(given)
  for pair, result in zip(given, found, strict=False):
    assert jax.tree.structure(result) == jax.tree.structure(pair)
    assert_same_bits(jax.tree.leaves(result), jax.tree.leaves(expected))


INT8 = gradcomp.ErrorFeedback(residual_dtype="int8")
BOXED = {
  # ``init`` puts a residual of two arrays in the place of one.
  "int8": gradcomp.qsgd(feedback=INT8, **QSGD4),
  # ``optax.masked`` leaves an empty node in a box; other leaves keep their names.
  "masked": optax.masked(
    gradcomp.qsgd(feedback="error", **QSGD4),
    lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree),
  ),
  # What codecs remember has no box.
  "levels": gradcomp.qsgd(**QSGD4, levels="nonuniform"),
  "thresholds": gradcomp.topk(density=0.1, selection="sampled", min_leaf_size=0),
  "low rank": gradcomp.powersgd(1, min_leaf_size=0),
}


@pytest.mark.parametrize("name", BOXED)
def test_what_is_in_a_box_comes_back_in_it(name):
  tx, boxed = BOXED[name], nnx.state(Linear(), nnx.Param)
  step = jax.jit(lambda tree: (tx.update(tree, tx.init(tree)), tx.init(tree)))
  (found, state), first = step(boxed)
  expected, _ = step(nnx.as_pure(boxed))
  assert jax.tree.structure((found, state)) == jax.tree.structure((boxed, first))
  assert_same_bits(jax.tree.leaves((found, state)), jax.tree.leaves(expected))
