"""The decoder of sparse rows refuses what no encoder could have sent."""

import numpy as np
import pytest

from tests.oracles import qsgd
from tests.wire_decoder.sparse import decode_random_k, decode_top_k, top_k_entries

SIZE = 70_000  # two blocks of 65,536


def word(value):
  """The bit pattern of a float."""
  return int(np.float32(value).view(np.uint32))


def row(*words):
  return np.array([words], np.uint32)


# Entries 5, 7 and 65,539, and room for one more.
PLAIN = row(2, 3, 5 | 3 << 16, 7, word(1), word(-2), word(0.5), 0)
NARROW = row(2, 3, 5 | 3 << 16, 7, 0x3C00 | 0x3800 << 16, 0xC000)
ASQ = row(2, 3, 5 | 3 << 16, 7, word(0.5))
NONE = row(0, 0, 0, 0, 0)
# Blocks of 32,768: of 5 and 65,539 the mean is 1, of 7 it is -2.
MEAN = row(2, 2, 3, 5 | 3 << 16, 7 | 1 << 15, word(1), word(-2))
OPTIONS = {
  "plain": dict(slots=4),
  "float16": dict(slots=4, value_dtype="float16"),
  "asq": dict(slots=4, quantize="asq"),
  "mean": dict(slots=4, quantize="mean"),
}


def read(rows, kind, **options):
  return top_k_entries(rows, range_size=SIZE, **OPTIONS[kind] | options)


@pytest.mark.parametrize(
  "rows, kind, expected",
  [
    (PLAIN, "plain", [1, -2, 0.5]),
    (NARROW, "float16", [1, -2, 0.5]),
    (ASQ, "asq", [0.5, 0.5, 0.5]),
    (MEAN, "mean", [1, -2, 1]),
  ],
)
def test_rows_by_hand(rows, kind, expected):
  (entries,) = read(rows, kind)
  assert entries.positions.tolist() == [5, 7, 65_539]
  assert entries.values.tolist() == expected
  values = decode_top_k(rows, SIZE, range_size=SIZE, **OPTIONS[kind])
  assert values[entries.positions].tolist() == expected
  assert np.count_nonzero(values) == 3


@pytest.mark.parametrize(
  "rows, kind, place, value, reason",
  [
    (PLAIN, "plain", 0, 4, "ends must not descend"),
    (PLAIN, "plain", 1, 5, "nor the last exceed 4"),
    (PLAIN, "plain", 1, 2**32 - 1, "nor the last exceed 4"),
    (PLAIN, "plain", 3, 7 | 1 << 16, "the codes of unused slots"),
    (PLAIN, "plain", 2, 5 | (SIZE - 65_536) << 16, "positions must be in the range"),
    (PLAIN, "plain", 3, 5, "no two the same"),
    (PLAIN, "plain", 7, word(1), "the values of unused slots"),
    (PLAIN, "plain", 7, word(-0.0), "the values of unused slots"),
    (NARROW, "float16", 5, 0xC000 | 1 << 16, "the values of unused slots"),
    (NONE, "asq", 4, word(1), "the mean of no entries"),
    (MEAN, "mean", 5, word(-1), "the signs of what they stand for"),
    (MEAN, "mean", 6, word(2), "the signs of what they stand for"),
    (MEAN, "mean", 4, 7, "the mean of no entries"),
  ],
)
def test_what_no_encoder_sends_is_refused(rows, kind, place, value, reason):
  read(rows, kind)  # one word makes the difference
  rows = rows.copy()
  rows[0, place] = value
  with pytest.raises(ValueError, match=reason):
    read(rows, kind)


def test_a_spare_half_is_zero():
  odd = row(2, 3, 5 | 3 << 16, 7, word(1), word(-2), word(0.5))
  read(odd, "plain", slots=3)
  odd[0, 3] |= 1 << 16
  with pytest.raises(ValueError, match="behind the last slot"):
    read(odd, "plain", slots=3)


def test_rows_of_another_shape_are_refused():
  with pytest.raises(ValueError, match="a row must have 8 words, got 7"):
    read(PLAIN[:, 1:], "plain")
  with pytest.raises(ValueError, match="must be uint32"):
    read(PLAIN.astype(np.int64), "plain")
  with pytest.raises(ValueError, match="must be those of 70001 elements"):
    decode_top_k(PLAIN, SIZE + 1, range_size=SIZE, slots=4)
  with pytest.raises(ValueError, match="the wrong shape"):
    decode_random_k(row(1, 2, 0, 0), 10, range_size=10, stride=4)


def test_random_k_has_nothing_behind_its_range():
  """Of the stride from 8 to 12 only two elements are in a range of 10."""
  last = lambda key: 8 + int(qsgd.threefry2x32((0, key), np.uint32([2]), 0)[0][0]) % 4
  inside, behind = (
    next(key for key in range(99) if (last(key) < 10) == wanted)
    for wanted in (True, False)
  )
  read = lambda *words: decode_random_k(row(*words), 10, range_size=10, stride=4)
  sent = [word(1), word(2)]
  assert np.count_nonzero(read(0, inside, *sent, word(3))) == 3
  assert np.count_nonzero(read(0, behind, *sent, 0)) == 2
  with pytest.raises(ValueError, match="a value behind the range"):
    read(0, behind, *sent, word(3))
