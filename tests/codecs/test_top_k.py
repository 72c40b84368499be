"""TopK sends the elements that the paper's algorithms select, and keeps all others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp._src.codecs.sums import tiles as _sums
from gradcomp._src.codecs.sums.records import NOTHING
from gradcomp._src.kernels import selection
from gradcomp.codecs import TopK
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

SIZE, DENSITY, K = 100_003, 0.001, 101
METHODS = ("exact", "trimmed", "threshold")


def narrowed(codec, x):
  """What a value is sent as, of 32 or of 16 bits."""
  return np.asarray(jnp.asarray(x).astype(codec.dtype), np.float32)


def check_rows(codec, x, rows, rest):
  """Each range sends its largest elements as they are, and the rest is the rest.

  The difference of an element and its 16 bits is exact.
  """
  n = codec.range_size or x.size
  parts = np.pad(x, (0, -x.size % n)).reshape(-1, n)
  k, slots = top_k.entries_of(codec.density, n), layout(codec, x.size)["slots"]
  found = entries_of(codec, rows, x.size)
  left = parts.copy()
  for part, own, entries in zip(parts, left, found, strict=True):
    check_selection(part, entries.positions, k, slots)
    assert_same_bits(entries.values, narrowed(codec, part[entries.positions]))
    own[entries.positions] -= entries.values
  np.testing.assert_array_equal(values_of(codec, rows, x.size) + rest, x)
  assert_same_bits(rest, left.ravel()[: x.size])
  return found


@pytest.mark.parametrize(
  "codec, size",
  [
    *((TopK(density=0.01, selection=method), 1000) for method in METHODS),
    (TopK(density=0.05, selection="threshold", range_size=300), 1000),
    (TopK(density=0.011, selection="exact", dtype=jnp.bfloat16), 1000),  # 11 slots
    (TopK(density=DENSITY, selection="threshold", slack=1.25), SIZE),
    (TopK(density=DENSITY, selection="threshold", dtype=jnp.float16), SIZE),
    *slow(
      (TopK(density=0.05, selection="exact", range_size=300), 1000),
      (TopK(density=DENSITY, selection="threshold", slack=1), SIZE),
      (TopK(density=DENSITY, selection="threshold", dtype=jnp.bfloat16), SIZE),
      *((TopK(density=DENSITY, selection=method), SIZE) for method in METHODS),
      *((TopK(density=DENSITY, selection=method), 10**6) for method in METHODS),
    ),
  ],
  ids=lambda x: str(x) if isinstance(x, int) else laws.name(x),
)
def test_the_largest_are_sent_of_any_data(codec, size):
  """All of the top k; of `threshold` up to 2 k elements, of the others k."""
  bound = codec.ranged(size)
  assert bound.slots == layout(codec, size)["slots"]
  for name, x in data(size).items():
    # Of 16 bits a subnormal number is zero, and one that is too large the largest.
    if codec.dtype != jnp.float32 and name in ("subnormal", "powers", "heavy"):
      continue
    rows, rest = encode(codec, x)
    found = check_rows(codec, x, rows, rest)
    own = encoder(codec)(jnp.asarray(x), None)
    used = np.ravel(own.own.used)
    np.testing.assert_array_equal(used, [len(entries.positions) for entries in found])
    np.testing.assert_array_equal(np.ravel(bound.used(rows)), used)
    if codec.range_size is None and codec.dtype == jnp.float32:
      assert own.own.threshold == np.abs(found[0].values).min()
      sent = bound.sums.sent_at(jnp.asarray(rows), size)
      np.testing.assert_array_equal(own.chosen, sent)


def test_the_algorithms_of_the_paper_send_the_same():
  """Algorithm 2's elements, and those that any threshold of algorithm 3 leaves."""
  for name, x in data(1000).items():
    paper = top_k.order(x)[top_k.trimmed(x, 10)]
    np.testing.assert_array_equal(np.sort(paper)[::-1], top_k.largest(x, 10))
    codec = TopK(density=0.01, selection="trimmed")
    (entries,) = entries_of(codec, encode(codec, x)[0], 1000)
    np.testing.assert_array_equal(np.sort(top_k.order(entries.values)), np.sort(paper))
    codec = TopK(density=0.01, selection="threshold")
    (entries,) = entries_of(codec, encode(codec, x)[0], 1000)
    limit, count = top_k.threshold_ratio(x, 10, 20)
    if 10 <= count <= 20:
      assert len(entries.positions) >= 10
      least = np.sort(np.abs(entries.values))[-10]
      assert (np.abs(x)[np.abs(x) > limit] >= least).sum() >= 10
    else:
      assert name not in ("normal", "uniform")


@pytest.mark.parametrize("size", [1, 1024, 65_537, *slow(2, 1023, 131_072)])
def test_sizes_at_the_edges_of_tiles_and_blocks(size):
  """Elements at both ends of each block are found, and none behind the end is."""
  codec = TopK(density=0.01, selection="threshold")
  x = laws.gaussian(size, size)
  edges = [i for b in range(0, size + 1, 65_536) for i in (b - 1, b) if 0 <= i < size]
  x[[0, -1, *edges]] = 9
  (entries,) = check_rows(codec, x, *encode(codec, x))
  if top_k.entries_of(0.01, size) > len(edges) + 2:
    assert {0, size - 1, *edges} <= set(entries.positions.tolist())


def test_sizes_choose_the_selection_and_the_slots():
  sizes = {1: "exact", 2**15 - 1: "exact", 2**15: "trimmed", 2**20 - 1: "trimmed"}
  for size, method in {**sizes, 2**20: "threshold"}.items():
    assert TopK().ranged(size).method == method
  assert TopK().ranged(5000, ranges=3).range_size == 1667
  assert TopK().ranged(5000).ranged(10) == TopK().ranged(5000)
  for density, size, slots in ((0.001, 1000, 1), (0.001, 1001, 2), (1, 7, 7)):
    assert TopK(density=density).ranged(size).slots == slots


@pytest.mark.parametrize("copied", [True, False])
def test_leaves_of_one_size_share_a_program(monkeypatch, copied):
  """Each comes out as it would alone, copied as small leaves are, or where it lies."""
  monkeypatch.setattr(selection, "COPIED", 4 * 300 if copied else 0)
  xs = [data(1000)[name] for name in ("normal", "half zero", "heavy")]
  codec = TopK(density=0.05, selection="threshold", range_size=300)
  found = jax.jit(lambda xs: codec.encode_several(xs, [NOTHING] * 3, None))(xs)
  rows = np.concatenate([x.rows for x in found])
  decode = _sums.Entries(codec).gathered(jnp.stack([rows, rows]), None, 0.5)
  for i, (x, (own, rest, *_)) in enumerate(zip(xs, found, strict=True)):
    alone = encode(codec, x)
    np.testing.assert_array_equal(own, alone[0])
    assert_same_bits(rest, alone[1])
    mean = np.ravel(decode(4 * i, 4 * i + 4))[:1000]
    np.testing.assert_array_equal(mean, values_of(codec, own, 1000))


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


def check_means(name, x, rest, groups):
  """Entries of a sign have its mean, which is taken from each of them.

  Groups have positions and values. Whether a subnormal number is zero in a sum is the
  processor's affair.
  """
  least = 2.0**-126 if name in ("subnormal", "powers") else 0
  left = x.copy()
  for place, values in groups:
    if place.size:
      expected = x[place].mean(dtype=np.float64)
      np.testing.assert_allclose(values, expected, laws.mean_bound(place.size), least)
      left[place] -= values
  np.testing.assert_allclose(rest, left, 0, least)


every_size = pytest.mark.parametrize(
  "size, density, method", [(1000, 0.01, "exact"), (SIZE, DENSITY, "threshold")]
)


@every_size
def test_asq_sends_the_largest_of_one_sign(size, density, method):
  codec = TopK(density=density, selection=method, quantize="asq")
  k, slots = top_k.entries_of(density, size), layout(codec, size)["slots"]
  for name, x in data(size).items():
    for sign in (1, -1):
      rows, rest = encode(codec, x, sign)
      ((chosen, values),) = entries_of(codec, rows, size)
      own = np.flatnonzero(sign * x > 0)
      assert np.isin(chosen, own).all()
      if own.size < k:
        assert set(chosen) == set(own)
      else:
        check_selection(x[own], np.searchsorted(own, chosen), k, slots)
      check_means(name, x, rest, [(chosen, values)])


@every_size
def test_strom_sends_a_mean_of_each_sign(size, density, method):
  """Blocks are of 32,768 elements: there are up to four of them."""
  codec = TopK(density=density, selection=method, quantize="mean")
  k, slots = top_k.entries_of(density, size), layout(codec, size)["slots"]
  for name, x in data(size).items():
    rows, rest = encode(codec, x)
    ((place, values),) = entries_of(codec, rows, size)
    check_selection(x, place, k, slots)
    signs = values > 0, values < 0
    check_means(name, x, rest, [(place[own], values[own]) for own in signs])


def test_asq_takes_turns_and_sends_all_in_the_end():
  """The step decides, for all workers alike; on its own a leaf has the first sign."""
  tx = gradcomp.redsync(0.01, None, quantize="asq", min_leaf_size=1)
  x = data(1000)["normal"]
  step = jax.jit(tx.update)
  state = tx.init({"w": x})
  for number in range(4):
    sent, state = step({"w": x}, state)
    values = np.asarray(sent["w"])
    values = values[values != 0]
    assert values.size == 10 and (values == values[0]).all()
    assert (values[0] > 0) == (number % 2 == 0)
    assert state.memory.own[()][0].used == 10
  codec = TopK(density=0.01, quantize="asq")
  assert_same_bits(encode(codec, x)[0], encode(codec, x, 1)[0])
  alone = [TopK(density=0.01, selection=way) for way in ("sampled", "threshold")]
  assert_same_bits(*(codec.encode(jnp.asarray(x)).rows for codec in alone))


def test_what_is_too_large_for_16_bits_is_sent_in_part():
  """The largest finite number goes, and the rest waits; infinities stay what they are.

  Of the same shapes as a test before, so that nothing is compiled.
  """
  codec = TopK(density=DENSITY, selection="threshold", dtype=jnp.float16)
  x = data(SIZE)["normal"].copy()
  x[[3, 7, 9]] = 1e6, -65520, np.inf
  rows, rest = encode(codec, x)
  sent = values_of(codec, rows, SIZE)
  np.testing.assert_array_equal(sent[[3, 7, 9]], [65504, -65504, np.inf])
  np.testing.assert_array_equal(rest[[3, 7]], [1e6 - 65504, -16])


def test_thresholds_are_searched_every_interval():
  """And in a step whose elements would not fit, without forgetting the old one."""
  codec = TopK(density=0.01, selection="sampled", search_every=3)
  tx = gradcomp.compress(codec, feedback=None)
  x = data(1000)["normal"]
  step, state = jax.jit(tx.update), tx.init({"w": x})
  limits = []
  for number, factor in enumerate((1, 0.5, 8, 1, 0.9, 0.01, 0.01, 0.01)):
    y = x * np.float32(factor)
    sent, state = step({"w": y}, state)
    chosen = np.flatnonzero(sent["w"])
    own = state.memory.own[()][0]
    limits.append(float(own.threshold[0]))
    assert int(own.used[0]) == chosen.size
    if number % 3 == 0:
      check_selection(y, chosen, 10, 20)
      assert limits[-1] == np.abs(y[chosen]).min()
    else:
      assert limits[-1] == limits[-2]
      reach = np.flatnonzero(np.abs(y) >= limits[-1])
      if reach.size > 20:
        assert number == 2
        check_selection(y, chosen, 10, 20)
      else:
        np.testing.assert_array_equal(chosen, reach)
