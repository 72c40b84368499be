"""What is inside of zero or local steps is what it is without them, or refused."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from gradcomp.codecs import QSGD, Dense
from gradcomp.parallel import zero
from tests.plugins.slow_cases import one_in
from tests.support.assertions import says
from tests.support.cases.inner import (
  CODECS,
  LOOKING,
  NOISE,
  PLAIN,
  REFUSED,
  SHAPES,
  WHOLE,
  N,
  assert_close,
  by_hand,
  plain,
  rounds,
  targets,
  train,
)


@pytest.mark.parametrize("name", [*one_in(7, PLAIN), *one_in(8, LOOKING)])
def test_zero_is_the_optimizer_inside(name):
  """With float32 both ways. Masks and labels see the leaves, and not their rows."""
  inner = (PLAIN | LOOKING)[name]
  assert_close(train(zero(inner, **CODECS)), plain(inner))


GRID = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
scaled = optax.stateless(lambda g, _: jax.tree.map(jnp.multiply, g, GRID))
mixed = optax.stateless(lambda g, _: g | {"kernel": g["kernel"] + g["one"]})
MIXING = {name: (WHOLE[name], [REFUSED[name]]) for name in WHOLE} | {
  # All owners would draw the same, as rows have one shape and one key.
  "noise": (NOISE, ["at random", "add_noise"]),
  "another shape": (scaled, ["another array"]),
  "leaves": (mixed, ["treat each", "['one']"]),
}


@pytest.mark.parametrize("name", MIXING)
def test_zero_refuses_what_needs_more_than_an_element(name):
  inner, words = MIXING[name]
  tx = zero(inner, **CODECS)
  run = lambda x: tx.update(x, tx.init(x), x)
  with pytest.raises(ValueError, match=says("`inner` must", *words)):
    jax.eval_shape(jax.vmap(run, axis_name="data"), targets())


@pytest.mark.parametrize("name", one_in(60, [*LOOKING, *PLAIN, *WHOLE]))
def test_local_steps_are_those_of_the_optimizer_inside(name):
  inner = (PLAIN | LOOKING | WHOLE)[name]
  tx = gradcomp.local.local_steps(
    inner, optax.sgd(1.0), every=2, codec=Dense(), axis_name="data"
  )
  assert_close(train(tx, 4), by_hand(rounds(inner), lambda state: state[1]))


of = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)


def states(tx, params):
  """The shapes of the states of all workers."""
  every = jax.tree.map(lambda x: of(N, *x.shape), params)
  return jax.eval_shape(jax.vmap(tx.init, axis_name="data"), every)


def test_kinds_of_leaves_have_matrices_of_their_own_and_share_two_messages():
  params = {"w": of(8, 512), "v": of(4, 512), "b": of(512)}
  codecs = dict.fromkeys(("grads", "params"), QSGD(bits=4, bucket_size=64))
  tx = zero(LOOKING["mask by rank"], **codecs, axis_name="data", min_leaf_size=0)
  mu = states(tx, params).inner_state[0].mu.arrays["data",]
  assert [x.shape[:2] for x in mu] == [(N, 1), (N, 12 // N)]
  assert gradcomp.explain(tx, params, workers=N).messages == 1


def test_what_has_rows_only_where_its_mask_is_true():
  inner = optax.masked(optax.trace(0.9), {"w": True, "b": False})
  state = states(zero(inner, **CODECS), {"w": of(256), "b": of(128)})
  (held,) = state.inner_state.inner_state.trace.arrays["data",]
  assert held.shape == (N, 1, 1, 128)


def complex_run(tx):
  params = {"w": np.ones((N, 130), np.complex64), "b": np.ones((N, 3), np.float32)}
  grads = {"w": params["w"] * (3 + 0.1j), "b": params["b"]}
  state = jax.jit(jax.vmap(tx.init, axis_name="data"))(params)
  return jax.jit(jax.vmap(tx.update, axis_name="data"))(grads, state, params)[0]


def test_parts_of_complex_numbers_are_treated_alike():
  inner = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, 0.9))
  got = complex_run(zero(inner, **CODECS))
  dense = gradcomp.dense(axis_name="data")
  chex.assert_trees_all_close(got, complex_run(optax.chain(dense, inner)), atol=1e-6)
  # Of optax's moments both parts share one: that of their absolute value.
  with pytest.raises(ValueError, match=says("imaginary part of ['w']", "computes")):
    complex_run(zero(optax.adam(0.1), **CODECS))
