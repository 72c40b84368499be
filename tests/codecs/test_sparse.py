"""Sparse codecs cut leaves of more elements than an int32 counts, and favor none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp._src.codecs import sparse as _sparse
from gradcomp._src.kernels.common import sparse
from gradcomp._src.kernels.common.dithers import key_words
from gradcomp.codecs import BlockTop, Context, RandomK, TopK
from tests.plugins.slow_cases import slow
from tests.specs import random_k, top_k
from tests.support import laws, modes
from tests.support.assertions import assert_same_bits


@pytest.mark.parametrize(
  ("size", "owners", "ranges", "each"),
  [
    (1000, 3, 3, 334),
    (2**30, 1, 1, 2**30),
    (2**30 + 1, 1, 2, 2**29 + 1),
    (32 * 4096 * 14336, 1, 2, 16 * 4096 * 14336),  # Llama 3 8B, stacked
    (32 * 4096 * 14336, 3, 3, 626349398),
    (3 * 2**30 + 5, 3, 6, 2**29 + 1),
    (2**36, 8, 64, 2**30),
  ],
)
def test_ranges_of_large_leaves_are_cut(size, owners, ranges, each):
  """As the page says: no int32 counts the positions in more."""
  for codec in (TopK(), RandomK()):
    assert codec.ranged(size, ranges=owners).range_size == each
  assert top_k.range_of(size, owners) == each
  assert -(-size // each) == ranges


def test_a_stacked_model_of_8_billion_is_sent_sparsely():
  params = {"up": jax.ShapeDtypeStruct((32, 4096, 14336), jnp.float32)}
  tx = gradcomp.redsync(density=0.001, axis_name="data")
  found = gradcomp.explain(tx, params, workers=4)
  assert 0.001 < found.ratio < 0.01


def test_all_elements_are_chosen_alike():
  """Counts of 512 keys: each element of a stride of 32 expects 16 a block."""
  counts = np.zeros(1024)
  for key in range(512):
    counts[random_k.positions((0, key), 1, 1024, 1 / 32)[0]] += 1
  # Binomial, sigma 3.9; 5.5 sigma are passed by 1024 elements with probability 4e-5.
  assert np.abs(counts - 16).max() < 5.5 * 3.94


@pytest.mark.parametrize("codec", [TopK(density=0.1), RandomK(density=0.1)], ids=str)
def test_a_cut_leaf_is_that_of_ranges_by_name(codec, monkeypatch):
  x = np.random.default_rng(1).standard_normal(1001, np.float32)
  named = type(codec)(density=0.1, range_size=251)

  @functools.partial(jax.jit, static_argnums=0)
  def sent(codec, x, key):
    rows, unsent = laws.encoded(codec, x, Context(key_words(key)))[:2]
    return rows, unsent, codec.roundtrip(x, key=key)

  expected = sent(named, x, jax.random.key(0))
  monkeypatch.setattr(_sparse, "_MOST_ELEMENTS", 300)
  assert codec.ranged(1001).range_size == 251
  assert_same_bits(sent(codec, x, jax.random.key(0)), expected)


@pytest.mark.parametrize(
  ("codec", "exchange"),
  [
    (TopK(density=0.05), "all_gather"),
    *slow((TopK(density=0.05), "two_shot"), (BlockTop(), "two_shot")),
  ],
  ids=str,
)
def test_what_no_int32_counts_has_the_same_bits(codec, exchange, monkeypatch):
  """Rows by their numbers in place of flat positions, and a mask of what was sent."""
  monkeypatch.setattr(_sparse, "_MOST_ELEMENTS", 256)  # several rows a leaf
  shapes = {"b": (3,), "v": (630,), "w": (9, 70)}
  steps = [laws.tree(shapes, 4, seed=i) for i in range(3)]
  steps[1]["w"][0, 3, 5] = np.nan
  options = {"exchange": exchange, "feedback": "momentum", "min_leaf_size": 64}
  tx = gradcomp.compress(codec, axis_name="data", **options)
  counted = modes.run_with_state("vmap", tx, steps)
  monkeypatch.setattr(sparse, "COUNTED", 100)
  jax.clear_caches()
  masked = modes.run_with_state("vmap", tx, steps)
  assert_same_bits((counted.outputs, counted.state), (masked.outputs, masked.state))
