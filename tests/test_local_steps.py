"""local_steps: workers train alone for some steps, and exchange what they changed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from assertions import assert_same_bits
from jax import lax
from local_cases import LEAVES, N, Nesterov, diloco, local, sparseloco, streaming
from slow_cases import slow
from zero_cases import gradients, last, sharded, train, tree

import gradcomp
from gradcomp.codecs import QSGD, Dense, FloatCast, TopK

ADAM = optax.adamw(0.05, weight_decay=0.1)
NESTEROV = optax.sgd(0.7, 0.9, nesterov=True)
MODES = ["vmap", "pmap", "shard_map", "shard_map_unchecked", "explicit"]


def flat(params):
  """The parameters of each worker in one vector, ``[N, n]``, in the order of leaves."""
  leaves = jax.tree.leaves(params)
  return np.concatenate([np.reshape(x, (N, -1)) for x in leaves], axis=1)


def dyadic(steps):
  """Gradients whose sums are exact in any order: multiples of 2**-10 below 8."""
  cut = lambda x: jnp.round(x * 1024) / 1024
  return [jax.tree.map(cut, given) for given in gradients(steps, LEAVES)]


@pytest.mark.parametrize(
  "mode, inner",
  [
    ("vmap", ADAM),
    ("shard_map", optax.sgd(0.5)),
    *slow(("pmap", optax.sgd(0.5)), ("explicit", optax.sgd(0.5))),
  ],
  ids=str,
)
def test_with_one_step_a_round_it_is_data_parallel_training(mode, inner):
  """Of the mean of the workers' updates, to the bit: either both add in one order, or
  sums are exact in any.
  """
  params, given = tree(0, LEAVES), dyadic(3)
  got, _ = last(mode, local(inner, optax.sgd(1.0), Dense(), every=1), params, given)

  def step(gradient, state, params):
    updates, state = inner.update(gradient, state, params)
    return optax.apply_updates(params, lax.pmean(updates, "data")), state

  step = jax.jit(jax.vmap(step, axis_name="data"))
  expected = jax.tree.map(lambda x: jnp.stack([x] * N), params)
  state = jax.vmap(inner.init)(expected)
  for gradient in given:
    expected, state = step(gradient, state, expected)
  for name in LEAVES:
    assert_same_bits(got[name], expected[name])


CODECS = {
  "dense": (Dense(), {}),
  "sparse": (TopK(density=0.05), {"feedback_decay": 0.95}),
  "random": (QSGD(bits=4, bucket_size=64), {"fragments": 2, "every": 4}),
  "streaming": (
    FloatCast(exponent_bits=3, mantissa_bits=0),
    {"fragments": 3, "delay": 1, "mixing": 0.5},
  ),
}


@pytest.mark.parametrize("name", ["sparse", *slow(*(set(CODECS) - {"sparse"}))])
def test_all_modes_have_the_same_bits(name):
  """In each step, and so all workers have. It ends in the midst of a round.

  SGD rounds alike everywhere; XLA contracts the sums of other optimizers as it likes.
  """
  codec, options = CODECS[name]
  tx = local(optax.sgd(0.5), optax.sgd(1.0), codec, **options)
  params, given = tree(0, LEAVES), dyadic(7)
  expected = list(train("vmap", tx, params, given))
  for mode in MODES[1:]:
    for (got, state), (held, kept) in zip(
      train(mode, tx, params, given), expected, strict=True
    ):
      assert_same_bits(got, held)
      assert_same_bits(state.own.moved, kept.own.moved)
      for leaf in jax.tree.leaves(got):
        assert_same_bits(leaf, np.stack([leaf[0]] * N))
