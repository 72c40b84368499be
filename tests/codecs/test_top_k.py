"""TopK sends the elements that the paper's algorithms select, and keeps all others."""

import chex
import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp._src.codecs import selecting
from gradcomp._src.codecs.sums import entries as _entries
from gradcomp.codecs import NOTHING, TopK
from tests.plugins.slow_cases import slow
from tests.specs import top_k
from tests.support import laws
from tests.support.assertions import assert_same_bits
from tests.support.selections import (
  check_selection,
  data,
  encode,
  encoder,
  entries_of,
  layout,
  values_of,
)

SIZES = {1000: 0.01, 100_003: 0.001, 1_000_000: 0.001}  # each with a density
METHODS = ("exact", "trimmed", "threshold")


def check_row(codec, x, rows, rest, chosen):
  """Unquantized: entries are the elements as they are, and the rest is the rest."""
  (entries,) = entries_of(codec, rows, x.size)
  assert_same_bits(entries.values, x[entries.positions])
  left = x.copy()
  left[chosen] = 0
  assert_same_bits(rest, left)
  sent = values_of(codec, rows, x.size)
  np.testing.assert_array_equal(sent + rest, x)


@pytest.mark.parametrize(
  "size, method",
  [
    *((1000, method) for method in METHODS),
    *slow(
      *((100_003, method) for method in METHODS),
      *((1_000_000, method) for method in METHODS),
    ),
  ],
)
def test_the_largest_are_sent_of_any_data(size, method):
  """All of the top k; of `threshold` up to 2 k elements, of the others k."""
  codec = TopK(density=SIZES[size], selection=method)
  k = top_k.entries_of(codec.density, size)
  slots = top_k.slots_of(codec.density, size, method)
  assert codec.ranged(size).slots == slots == (2 * k if method == "threshold" else k)
  for x in data(size).values():
    rows, rest = encode(codec, x)
    (entries,) = entries_of(codec, rows, size)
    check_selection(x, entries.positions, k, slots)
    check_row(codec, x, rows, rest, entries.positions)
    bound = codec.ranged(size)
    assert bound.used(rows) == len(entries.positions)
    found = encoder(codec)(jnp.asarray(x), None)
    assert found.own.used == len(entries.positions)
    assert found.own.threshold == np.abs(entries.values).min()
    sent = bound.sums.sent_at(jnp.asarray(rows), size)
    np.testing.assert_array_equal(found.chosen, sent)


def test_the_algorithms_of_the_paper_send_the_same():
  """Algorithm 2's elements, and those that any threshold of algorithm 3 leaves."""
  for size in (1000, 100_003):
    k = top_k.entries_of(SIZES[size], size)
    for name, x in data(size).items():
      paper = top_k.order(x)[top_k.trimmed(x, k)]
      np.testing.assert_array_equal(np.sort(paper)[::-1], top_k.largest(x, k))
      rows, _ = encode(TopK(density=SIZES[size], selection="trimmed"), x)
      (entries,) = entries_of(TopK(density=SIZES[size]), rows, size)
      np.testing.assert_array_equal(
        np.sort(top_k.order(entries.values)), np.sort(paper)
      )
      codec = TopK(density=SIZES[size], selection="threshold")
      (entries,) = entries_of(codec, encode(codec, x)[0], size)
      limit, count = top_k.threshold_ratio(x, k, 2 * k)
      if k <= count <= 2 * k:
        assert len(entries.positions) >= k
        least = np.sort(np.abs(entries.values))[-k]
        assert (np.abs(x)[np.abs(x) > limit] >= least).sum() >= k
      else:
        assert name not in ("normal", "uniform")


@pytest.mark.slow
def test_ten_million_elements():
  """A leaf of many blocks, whose sample is a small part."""
  size, k = 10_000_000, 10_000
  codec = TopK(density=0.001)
  assert codec.ranged(size).method == "threshold"
  x = np.random.default_rng(0).random(size, np.float32) - np.float32(0.5)
  rows, rest = encode(codec, x)
  entries = top_k.entries(rows, range_size=size, slots=2 * k)[0]
  check_selection(x, entries.positions, k, 2 * k)
  assert_same_bits(entries.values, x[entries.positions])
  assert np.count_nonzero(rest) == np.count_nonzero(x) - len(entries.positions)


@pytest.mark.parametrize("slack", [1, 1.25])
def test_slack_narrows_the_message(slack):
  size, k = 100_003, 101
  codec = TopK(density=0.001, selection="threshold", slack=slack)
  slots = int(slack * k)
  for x in data(size).values():
    rows, rest = encode(codec, x)
    (entries,) = entries_of(codec, rows, size)
    check_selection(x, entries.positions, k, slots)
    check_row(codec, x, rows, rest, entries.positions)


@pytest.mark.parametrize("size", [1, 2, 1023, 1024, 65_537, 131_072])
def test_sizes_at_the_edges_of_tiles_and_blocks(size):
  """Elements at both ends of each block are found, and none behind the end is."""
  codec = TopK(density=0.01, selection="threshold")
  x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
  edges = [i for b in range(0, size + 1, 65_536) for i in (b - 1, b) if 0 <= i < size]
  x[[0, -1, *edges]] = 9
  rows, rest = encode(codec, x)
  (entries,) = entries_of(codec, rows, size)
  k = top_k.entries_of(0.01, size)
  check_selection(x, entries.positions, k, min(size, 2 * k))
  check_row(codec, x, rows, rest, entries.positions)
  if k > len(edges) + 2:
    assert {0, size - 1, *edges} <= set(entries.positions.tolist())


@pytest.mark.parametrize("quantize", [None, "asq"])
def test_an_empty_leaf_has_no_rows(quantize):
  codec, x = TopK(quantize=quantize), jnp.zeros((3, 0))
  rows, rest = laws.encoded(codec, x)[:2]
  assert rows.shape[0] == 0
  chex.assert_shape([rest, codec.roundtrip(x)], (3, 0))


def test_auto_takes_the_selection_for_the_size():
  sizes = {1: "exact", 2**15 - 1: "exact", 2**15: "trimmed", 2**20 - 1: "trimmed"}
  for size, method in {**sizes, 2**20: "threshold"}.items():
    assert TopK().ranged(size).method == method


@pytest.mark.parametrize("method", ["exact", "threshold"])
def test_ranges_are_selected_from_apart(method):
  """The last is filled with zeros, of which nothing comes back."""
  size, n = 1000, 300
  codec = TopK(density=0.05, selection=method, range_size=n)
  for x in data(size).values():
    rows, rest = encode(codec, x)
    padded = np.zeros(4 * n, np.float32)
    padded[:size] = x
    for part, entries in zip(
      padded.reshape(4, n), entries_of(codec, rows, size), strict=True
    ):
      check_selection(part, entries.positions, 15, layout(codec, size)["slots"])
      assert_same_bits(entries.values, part[entries.positions])
    sent = values_of(codec, rows, size)
    np.testing.assert_array_equal(sent + rest, x)
    np.testing.assert_array_equal(rest[sent != 0], 0)


@pytest.mark.parametrize("copied", [True, False])
def test_leaves_of_one_size_share_a_program(monkeypatch, copied):
  """Each comes out as it would alone, copied as small leaves are, or where it lies."""
  for module in (selecting, _entries):
    monkeypatch.setattr(module, "COPIED", 4 * 300 if copied else 0)
  xs = [data(1000)[name] for name in ("normal", "half zero", "heavy")]
  codec = TopK(density=0.05, selection="threshold", range_size=300)
  found = jax.jit(lambda xs: codec.encode_several(xs, [NOTHING] * 3, None))(xs)
  rows = jnp.concatenate([x.rows for x in found])
  decode = _entries.Entries(codec).gathered(jnp.stack([rows, rows]), None, 0.5)
  for i, (x, (own, rest, *_)) in enumerate(zip(xs, found, strict=True)):
    alone = encode(codec, x)
    np.testing.assert_array_equal(own, alone[0])
    assert_same_bits(rest, alone[1])
    mean = np.ravel(decode(4 * i, 4 * i + 4))[:1000]
    np.testing.assert_array_equal(mean, values_of(codec, own, 1000))


def test_batches_are_loops():
  """vmap searches in all until all have it, and changes none."""
  for codec in (
    TopK(density=0.01, selection="threshold"),
    TopK(density=0.01, selection="trimmed"),
  ):
    batch = np.stack(list(data(1000).values()))
    rows, rest = jax.jit(jax.vmap(lambda x, codec=codec: encoder(codec)(x, None)[:2]))(
      batch
    )
    for i, x in enumerate(batch):
      alone = encode(codec, x)
      np.testing.assert_array_equal(rows[i], alone[0])
      assert_same_bits(rest[i], alone[1])


@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_finite_is_the_largest(method):
  codec = TopK(density=0.01, selection=method)  # ten of them, at least
  x = data(1000)["heavy"].copy()
  bad = np.float32([np.nan, np.inf, -np.inf, np.nan])
  x[[5, 17, 600, 999]] = bad
  rows, rest = encode(codec, x)
  (entries,) = entries_of(codec, rows, 1000)
  check_selection(x, entries.positions, 10, layout(codec, 1000)["slots"])
  sent = values_of(codec, rows, 1000)
  np.testing.assert_array_equal(sent[[5, 17, 600, 999]], bad)
  assert np.isnan(rest[[5, 17, 600, 999]]).all()  # NaN - NaN: never kept, see feedback
  finite = np.isfinite(x)
  np.testing.assert_array_equal((sent + rest)[finite], x[finite])
  crowd = np.where(np.arange(1000) % 2, np.float32(np.nan), np.float32(1))
  (entries,) = entries_of(codec, encode(codec, crowd)[0], 1000)
  assert len(entries.positions) == 10 and np.isnan(entries.values).all()


SMALL = 37
FLOATS = hnp.arrays(np.float32, SMALL, elements=st.floats(width=32))
TIED = hnp.arrays(np.float32, SMALL, elements=st.sampled_from([0.0, -0.0, 1, -1, 2]))


@pytest.mark.parametrize("method", METHODS)
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(x=st.one_of(FLOATS, TIED))
def test_any_values_are_sent_or_left(method, x):
  codec = TopK(density=0.15, selection=method)
  rows, rest = encode(codec, x)
  (entries,) = entries_of(codec, rows, SMALL)
  check_selection(x, entries.positions, 6, layout(codec, SMALL)["slots"])
  np.testing.assert_array_equal(entries.values, x[entries.positions])
  left = np.ones(SMALL, bool)
  left[entries.positions] = False
  assert_same_bits(rest[left], x[left])
  finite = np.isfinite(entries.values)
  assert not rest[entries.positions][finite].any()


@pytest.mark.parametrize("density", [0.001, 0.01])
@pytest.mark.parametrize("size", [10**6, 2**24])
@pytest.mark.parametrize("quantize, most", [(None, 6.1), ("asq", 2.1), ("mean", 2.2)])
def test_bytes_of_a_slot(quantize, most, size, density):
  codec = TopK(density=density, quantize=quantize)
  like = jax.ShapeDtypeStruct((size,), jnp.float32)
  rows = jax.eval_shape(codec.encode, like).rows
  slots = top_k.slots_of(density, size)
  assert codec.ranged(size).slots == slots
  chex.assert_type(rows, jnp.uint32)
  assert 4 * rows.size / slots <= most
