"""The plan compresses the large leaves, and says exactly what is encoded."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp._src.exchange.layout import arrange, default_min_leaf_size, plan_rows
from gradcomp.codecs import QSGD, Dense, RandomK, TopK


def shapes(*sizes):
  return [jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes]


@hypothesis.given(st.lists(st.integers(0, 10**7), max_size=40))
def test_more_than_99_percent_are_above_the_default_size(sizes):
  smallest = default_min_leaf_size(sizes)
  dense = sum(size for size in sizes if size < smallest)
  assert dense <= 0.01 * sum(sizes)
  if sum(sizes):
    assert dense < 0.01 * sum(sizes)
    # ... and with the next larger leaves it would be above the share of 0.5 %.
    assert sum(size for size in sizes if size <= smallest) >= 0.005 * sum(sizes)


def test_a_resnet_keeps_its_norms_and_biases_dense():
  sizes = [64, 64, 9408, *[36864, 64, 64] * 8, *[2359296, 512, 512] * 6, 2048000, 1000]
  layout = plan_rows(shapes(*sizes), QSGD(bits=4))
  for size, slot in zip(sizes, layout.slots, strict=True):
    assert layout.codecs[slot.group] == (Dense() if size < 36864 else QSGD(bits=4))


@pytest.mark.parametrize("sizes, least", [((500, 1000), 0), ((4095, 4096), 4096)])
def test_a_leaf_is_never_sent_in_more_bytes_than_dense(sizes, least):
  """A tile of 4,096 codes and 8 scales is 2,080 bytes: 520 floats.

  Nor is a leaf encoded with fewer elements than asked for.
  """
  codec = QSGD(bits=4)
  layout = plan_rows(shapes(*sizes), codec, min_leaf_size=least)
  assert [layout.codecs[slot.group] for slot in layout.slots] == [Dense(), codec]


@pytest.mark.parametrize("codec", [TopK(density=0.01), RandomK(density=0.01)])
def test_leaves_below_a_hundredth_of_a_percent_are_dense(codec):
  """Of a million elements, those of leaves that together hold less than a hundred."""
  sizes = [40, 50, 60, 5000, 994_850]
  assert sum(sizes) == 10**6
  assert default_min_leaf_size(sizes, drops=codec.facts.drops) == 60
  assert default_min_leaf_size(sizes) == 5000
  assert default_min_leaf_size([99, 999_901], drops=True) == 999_901
  assert default_min_leaf_size([100, 999_900], drops=True) == 100
  tx = gradcomp.compress(codec, axis_name="data", exchange="all_gather")
  like = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes]
  leaves = gradcomp.explain(tx, like, workers=4).leaves
  assert [leaf.codec == Dense() for leaf in leaves] == [True, True, False, False, False]


def test_leaves_that_are_decoded_together_are_cut_apart(monkeypatch):
  """In runs of two and of one, whose first leaf is empty."""
  monkeypatch.setattr("gradcomp._src.exchange.layout.JOINT_ENCODING_ELEMENTS", 5000)
  codec = QSGD(bits=4, bucket_size=64)
  leaves = shapes(0, 2000, 2000, 2000, 9000, 10)
  layout = arrange(leaves, [codec] * len(leaves))
  filled = layout.rows[0] * codec.tile_size
  tiles = jnp.arange(filled, dtype=jnp.float32).reshape(-1, codec.tile_size)
  asked = []

  def decoder(start, stop):
    asked.append((start, stop))
    return tiles[start:stop]

  found = layout.viewed(lambda: {0: decoder})
  slots = layout.slots
  runs = [(0, 2), (3, 3), (4, 4), (5, 5)]
  assert asked == [(slots[a].start, slots[b].stop) for a, b in runs]
  for i, (leaf, slot) in enumerate(zip(leaves, slots, strict=True)):
    first = slot.start * codec.tile_size
    np.testing.assert_array_equal(found[i], np.arange(first, first + leaf.size))
