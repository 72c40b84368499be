"""Differentiable collectives are JAX's own, and what the page says of each codec."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gradcomp import parallel
from gradcomp.codecs import Dense
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits
from tests.support.cases.parallel import (
  CODECS,
  KEY,
  assert_rounded,
  dither,
  in_order,
  mapped,
  numbers,
  roundtrip,
  with_gradient,
)

N = 4
FLOATS = dict(codec=Dense())
RING = [(0, 2), (2, 1), (1, 3), (3, 0)]


X = numbers(N, 8, 4)
GATHERED = numbers(N, 8, 4 * N, seed=1)  # cotangents of what is gathered along axis 1
EQUAL = numbers(8, 4, seed=2)

# Ours and JAX's, the array, and the weights of the loss; those of two axes are equal on
# all workers.
PAIRS = {
  "all_gather": (
    lambda x: parallel.all_gather(x, axis_name="data", axis=1, **FLOATS),
    lambda x: lax.all_gather(x, "data", axis=1, tiled=True),
    GATHERED,
  ),
  "psum_scatter": (
    lambda x: parallel.psum_scatter(x, axis_name="data", axis=-2, **FLOATS),
    lambda x: lax.psum_scatter(x, "data", scatter_dimension=0, tiled=True),
    X[:, :2],
  ),
  "all_to_all": (
    lambda x: parallel.all_to_all(
      x, axis_name="data", split_axis=0, concat_axis=1, **FLOATS
    ),
    lambda x: lax.all_to_all(x, "data", 0, 1, tiled=True),
    GATHERED[:, :2],
  ),
  "ppermute": (
    lambda x: parallel.ppermute(x, axis_name="data", perm=RING, **FLOATS),
    lambda x: lax.ppermute(x, "data", RING),
    X[::-1],
  ),
}


@pytest.mark.parametrize("mode", modes.MODES)
def test_float32_is_what_jax_sends(mode):
  """Bit by bit where nothing is added, and up to rounding where something is."""

  def every(number):
    def function(x, weights):
      return {
        name: with_gradient(pair[number], None)(x, weights[name])
        for name, pair in PAIRS.items()
      }

    return mapped(mode, function, N)(X, {name: pair[2] for name, pair in PAIRS.items()})

  ours, theirs = every(0), every(1)
  for name, (value, gradient) in ours.items():
    same = (assert_same_bits, assert_rounded)
    same[name == "psum_scatter"](value, theirs[name][0])
    same[name == "all_gather"](gradient, theirs[name][1])


@pytest.mark.parametrize("mode", modes.MODES)
def test_a_psum_and_its_gradient(mode):
  """The cotangent is that of all workers together: nothing is sent for it.

  ``sum_gradients`` is the other way round.
  """

  def function(x):
    total = with_gradient(
      lambda x: parallel.psum(x, axis_name="data", **FLOATS), EQUAL
    )(x)
    entry = lambda e: parallel.sum_gradients(e, axis_name="data", **FLOATS)
    # It is equal on all workers, and each has weights of its own.
    value, gradient = with_gradient(entry, x)(jnp.asarray(EQUAL))
    return total, value, gradient

  (total, dx), value, gradient = mapped(mode, function, N)(X)
  assert_rounded(total, np.stack([X.sum(0)] * N))
  assert_same_bits(dx, np.stack([EQUAL] * N))
  assert_same_bits(value, np.stack([EQUAL] * N))
  assert_rounded(gradient, np.stack([X.sum(0)] * N))
  for array in (total, gradient):
    assert_same_bits(array[1:], np.stack([array[0]] * (N - 1)))


# The others, and what is rounded everywhere, are slow.
PLAIN = ("bf16", "eight_bit_buckets", "qsgd8", "float_cast", "ternary", "natural")


def own_or_coded(own, codec, x, sender, receiver, key):
  return x if own == "exact" and sender == receiver else roundtrip(codec, x, key)


@pytest.mark.bits
@pytest.mark.parametrize(
  "name, own",
  [(name, "exact") for name in PLAIN]
  + slow(*[(name, "exact") for name in CODECS if name not in PLAIN])
  + slow(*[(name, "coded") for name in CODECS]),
)
def test_each_codec_is_what_the_page_says(name, own):
  """Forward and backward, of a gather and of sums, in the order of workers."""
  codec = CODECS[name]
  shape = (3, 200)  # no whole rows
  x, weights = numbers(N, *shape, seed=3), numbers(N, 3, 200 * N, seed=4)
  key = jax.random.wrap_key_data(jnp.array(KEY, jnp.uint32))
  options = dict(codec=codec, own=own, axis=1, key=key if codec.needs_key else None)

  def function(x, weights):
    gather = lambda x: parallel.all_gather(x, axis_name="data", **options)
    scatter = lambda x: parallel.psum_scatter(x, axis_name="data", **options)
    return with_gradient(gather, None)(x, weights), scatter(weights)

  (value, gradient), summed = mapped("vmap", function, N)(x, weights)

  for me in range(N):
    sent = [own_or_coded(own, codec, x[i], i, me, dither(i)) for i in range(N)]
    assert_same_bits(value[me], np.concatenate(sent, axis=1))
    for stages, got in (((1,), gradient), ((), summed)):
      parts = [
        own_or_coded(own, codec, weights[i, :, 200 * me : 200 * (me + 1)], i, me, draw)
        for i in range(N)
        for draw in [dither(i, me, *stages)]
      ]
      np.testing.assert_array_equal(got[me], in_order(parts))


@pytest.mark.bits
@pytest.mark.parametrize("name", ["qsgd8", *slow("float_cast")])
def test_a_psum_is_what_the_page_says(name):
  """Two stages, of which the second has keys of its own."""
  codec, x = CODECS[name], numbers(N, 3, 70, seed=7)
  key = jax.random.wrap_key_data(jnp.array(KEY, jnp.uint32))
  got = mapped(
    "vmap", lambda x: parallel.psum(x, axis_name="data", codec=codec, key=key), N
  )(x)
  parts = np.pad(x.reshape(N, -1), ((0, 0), (0, 2))).reshape(N, N, -1)
  sums = [
    in_order([roundtrip(codec, parts[i, me], dither(i, me)) for i in range(N)])
    for me in range(N)
  ]
  whole = [roundtrip(codec, x, dither(me, 0, 2, me)) for me, x in enumerate(sums)]
  want = np.concatenate(whole)[:210].reshape(3, 70)
  assert_same_bits(got, np.stack([want] * N))


def test_the_two_directions_may_have_codecs_of_their_own():
  """None sends float32; the cotangents of the second are powers of two."""
  x, weights = numbers(N, 40, seed=5), numbers(N, 40 * N, seed=6)
  key = jax.random.key(0)

  def function(x, weights):
    each = []
    for backward in (None, CODECS["natural"]):
      gather = lambda x, backward=backward: parallel.all_gather(
        x,
        axis_name="data",
        codec=CODECS["bf16"],
        backward=backward,
        own="coded",
        key=key,
      )
      each.append(with_gradient(gather, None)(x, weights))
    return each

  (first, exact), (second, rounded) = mapped("vmap", function, N)(x, weights)
  assert_same_bits(first, second)
  assert_same_bits(
    first[0], np.concatenate([roundtrip(CODECS["bf16"], x, None)[i] for i in range(N)])
  )
  sums = weights.sum(0).reshape(N, -1)
  assert_rounded(exact, sums)
  assert 1e-3 < np.abs(rounded - sums).max() < np.abs(weights).max() * N
