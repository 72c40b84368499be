"""The specifications read what they write, and refuse what no encoder could send."""

import functools
import pathlib
import re
import sys
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from tests.specs import (
  block_float,
  block_top,
  dense,
  eight_bit,
  float_cast,
  levels,
  lines,
  lossless,
  natural,
  one_bit,
  power_sgd,
  qsgd,
  random_k,
  rotation,
  sign,
  ternary,
  top_k,
)

SIZE = 70  # a bucket of 64 and a part of another
X = np.linspace(-1, 1, SIZE, dtype=np.float32)
KEY = (1, 2)
NAN, INF = np.nan, np.inf


def bits(value):
  """The bit pattern of a float."""
  return int(np.float32(value).view(np.uint32))


def row(*words):
  return np.array([words], np.uint32)


class Spec(NamedTuple):
  """A module with the fields of its codec, and what only its writer takes."""

  module: Any
  fields: dict
  more: Any = ()
  x: np.ndarray = X

  def rows(self):
    return self.module.encode(self.x, **self.fields, **dict(self.more))

  def read(self, rows):
    return self.module.decode(rows, self.x.size, **self.fields)


NEAREST = dict(rounding="nearest", norm="max")
TO_END = np.zeros(70_000, np.float32)  # two blocks of 65,536
TO_END[[5, 7, 65_539]] = 1, -2, 0.5
MEANS = np.where(TO_END == 0.5, np.float32(1), TO_END)
RANGE = dict(range_size=70_000, slots=4)
PLACES = dict(positions=np.array([5, 7, 65_539]))
B = dict(bucket_size=64)
HALF = RANGE | {"value_dtype": "float16"}
E5M2 = dict(exponent_bits=5, mantissa_bits=2)
SPECS = {
  "qsgd": Spec(qsgd, dict(bits=4, levels="sign_magnitude", **B), NEAREST),
  "levels": Spec(levels, dict(bits=3, **B), dict(k=levels.first(3), key=KEY)),
  "dense": Spec(dense, dict(dtype=ml_dtypes.bfloat16)),
  "one_bit": Spec(one_bit, B),
  "columns": Spec(one_bit, dict(column=SIZE)),
  "sign mean": Spec(sign, dict(scale="mean", **B)),
  "sign one": Spec(sign, dict(scale="one", **B)),
  "2bit": Spec(ternary, dict(packing="2bit", **B), dict(key=KEY)),
  "base3": Spec(ternary, dict(packing="base3", **B), dict(key=KEY)),
  "linear": Spec(eight_bit, dict(data_type="linear", **B)),
  "mantissa": Spec(eight_bit, dict(data_type="mantissa", **B)),
  "fixed": Spec(eight_bit, dict(data_type="mantissa", exponent_offset=1, **B)),
  "e4m2": Spec(float_cast, dict(exponent_bits=4, mantissa_bits=2)),
  "e5m2": Spec(float_cast, E5M2),
  "e5m2 byte": Spec(float_cast, E5M2 | {"byte": 126}),
  "natural": Spec(natural, {}, dict(key=KEY)),
  "mx": Spec(block_float, dict(element="e2m1", scale="e8m0", block_size=32)),
  "nv": Spec(block_float, dict(element="e2m1", scale="e4m3", block_size=16)),
  "lossless": Spec(lossless, {}),
  "top_k": Spec(top_k, dict(slots=3, range_size=SIZE)),
  "float32": Spec(top_k, RANGE, PLACES, TO_END),
  "float16": Spec(top_k, HALF, PLACES, TO_END),
  "asq": Spec(top_k, dict(quantize="asq", **RANGE), x=np.maximum(TO_END, 0)),
  "asq of none": Spec(top_k, dict(quantize="asq", **RANGE), x=np.minimum(TO_END, 0)),
  "mean": Spec(top_k, dict(quantize="mean", **RANGE), PLACES, MEANS),
  "random_k": Spec(random_k, dict(range_size=SIZE, stride=8), dict(key=KEY)),
  "block_top 2": Spec(block_top, dict(block_size=8, count=1, value_bits=2)),
  "block_top 8": Spec(block_top, dict(block_size=8, count=2, value_bits=8)),
  "block_top 32": Spec(block_top, dict(block_size=8, count=1, value_bits=32)),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_values_that_are_read_are_written_as_they_are(spec):
  rows = spec.rows()
  values = spec.read(rows)
  assert values.shape == spec.x.shape and values.dtype == np.float32
  assert np.isfinite(values).all()
  np.testing.assert_array_equal(spec.read(spec._replace(x=values).rows()), values)
  for wrong, told in ((rows[:, 1:], "the shape"), (rows.astype(np.int64), "be uint32")):
    with pytest.raises(ValueError, match=f"the rows must .*{told}"):
      spec.read(wrong)


# A specification, the place of a word, what stands there in place of it, and why not.
REFUSED = [
  *(("qsgd", 63, 1 << 4, "fill"), ("one_bit", 63, 1 << 2, "fill")),
  *(("one_bit", 64, bits(NAN), "or neither"), ("one_bit", 64, bits(INF), "finite or")),
  *(("one_bit", 96, bits(1), "not be pos"), ("one_bit", 65, bits(-1), "not be neg")),
  *(("one_bit", 97, bits(-1), "mean of no"), ("columns", 2, 1 << 6, "unused bits")),
  *(("sign mean", 63, 1 << 2, "fill"), ("sign one", 63, 1 << 2, "fill")),
  *(("sign mean", 64, bits(-1), "not neg"), ("sign mean", 64, bits(INF), "finite or")),
  *(("sign mean", 95, bits(1), "beyond"), ("sign one", 64, 1 << 31, "beyond")),
  *(("sign one", 65, 1 << 31, "marked as not"), ("2bit", 0, 2, "code 2")),
  *(("2bit", 63, 1 << 2, "fill"), ("2bit", 64, bits(INF), "a scale must")),
  *(("2bit", 64, bits(0), "scale of 0"), ("base3", 0, 0, "a word must be")),
  *(("base3", 0, 2**32 - 1, "fill"), ("linear", 0, 128, "zero has no sign")),
  *(("mantissa", 0, 114, "below 114"), ("linear", 63, 1 << 8, "fill")),
  *(("linear", 66, bits(1), "beyond"), ("linear", 64, bits(1e-30), "a scale")),
  *(("fixed", 64, bits(10), "must be 15"), ("e4m2", 0, 1 << 7, "bits 7 to 7 of a")),
  *(("e5m2", 127, 1, "fill"), ("e5m2 byte", 0, 0x7C, "that of a number")),
  *(("natural", 127, 1, "fill"), ("levels", -1, bits(0.5), "last of them 1")),
  *(
    ("levels", -2, bits(0.3), "of 1/256"),
    ("levels", -4, bits(0.75), "are increasing"),
  ),
  *(("nv", 127, 1, "fill"), ("nv", 128, 127, "from 0 to 448")),
  *(("nv", -1, bits(1e-38), "a shared"), ("lossless", -10, 0, "of the escapes")),
  *(("float32", 0, 4, "not descend"), ("float32", 1, 5, "last exceed 4")),
  *(("float32", 1, 2**32 - 1, "exceed 4"), ("float32", 3, 7 | 1 << 16, "of unused")),
  *(("float32", 2, 5 | 4464 << 16, "in the range"), ("float32", 3, 5, "no two the")),
  *(("float32", 7, bits(-0.0), "unused"), ("float16", 5, 0xC000 | 1 << 16, "unused")),
  *(("asq of none", 4, bits(1), "no entries"), ("mean", 5, bits(-1), "the signs")),
  *(("mean", 6, bits(2), "the signs"), ("mean", 4, 7, "no entries")),
  ("top_k", 2, 1 << 16, "behind the last slot"),
]


@pytest.mark.parametrize("name, place, value, reason", REFUSED)
def test_what_no_encoder_sends_is_refused(name, place, value, reason):
  spec = SPECS[name]
  rows = spec.rows()
  spec.read(rows)  # one word makes the difference
  rows[0, place] = value
  with pytest.raises(ValueError, match=reason):
    spec.read(rows)


def test_floats_under_a_byte_of_nan_are_all_nan():
  values = float_cast.decode(SPECS["e5m2"].rows(), SIZE, **E5M2, byte=255)
  assert values.shape == (SIZE,) and np.isnan(values).all()


@pytest.mark.parametrize(
  "name, expected",
  [
    ("float32", row(2, 3, 5 | 3 << 16, 7, bits(1), bits(-2), bits(0.5), 0)),
    ("float16", row(2, 3, 5 | 3 << 16, 7, 0x3C00 | 0x3800 << 16, 0xC000)),
    # Blocks of 32,768: of 5 and 65,539 the mean is 1, of 7 it is -2.
    ("mean", row(2, 2, 3, 5 | 3 << 16, 7 | 1 << 15, bits(1), bits(-2))),
  ],
)
def test_rows_of_top_k_by_hand(name, expected):
  spec = SPECS[name]
  np.testing.assert_array_equal(spec.rows(), expected)
  (entries,) = top_k.entries(expected, **spec.fields)
  assert entries.positions.tolist() == [5, 7, 65_539]
  np.testing.assert_array_equal(entries.values, spec.x[entries.positions])
  np.testing.assert_array_equal(spec.read(expected), spec.x)
  with pytest.raises(ValueError, match="must be those of 140001 elements"):
    top_k.decode(expected, 140_001, **spec.fields)


QSGD = dict(bits=4, bucket_size=512, levels="sign_magnitude")
BLOCKS = dict(block_size=8, count=1, value_bits=2)
# By docs/inside/wire-format.md: an encoder, the words that are not zero, by their
# places, and what they stand for.
PAGE = [
  (
    Spec(sign, dict(bucket_size=32, scale="one")),
    {1: 1, 32: 1},
    [2, -1, 0],
    [1, -1, 1],
  ),
  (
    *(Spec(natural, {}, dict(key=(0, 0, 0))), {0: 0x3F, 1: 0xBF, 3: 0x7F}),
    *([1, -1.5, 0, 3e30], [1, -1, 0, NAN]),
  ),
  (Spec(natural, {}, dict(key=(0, 0, 0xFFFF))), {1: 0xC0}, [0, -1.5], [0, -2]),
  (
    *(SPECS["mx"], {0: 7, 1: 13, 2: 1, 3: 5, 128: 0x7F}),
    *([7, -3, 0.4, 2.6], [6, -3, 0.5, 3]),
  ),
  (
    *(Spec(block_top, BLOCKS), {0: 0x1B, 1: 1, 2: 0x1C, 32: 0x40800000}),
    *([1, -4, *[0] * 13, 2, 1.5], [0, -4, *[0] * 13, 4, 1.5]),
  ),
  (
    *(Spec(qsgd, QSGD, NEAREST), {0: 1, 1: 0b1011, 3: 7, 512: 0x40E00000}),
    *([1, -3, 0, 7, *[0] * 508], [1, -3, 0, 7, *[0] * 508]),
  ),
]


@pytest.mark.parametrize("spec, words, x, values", PAGE)
def test_examples_of_the_page(spec, words, x, values):
  spec = spec._replace(x=np.float32(x))
  (found,) = spec.rows()
  assert {at: int(found[at]) for at in np.flatnonzero(found)} == words
  np.testing.assert_array_equal(spec.read(found[None]), np.float32(values))


def test_the_factors_of_the_page():
  """docs/inside/wire-format.md says the first words, but for rounding."""
  x = np.zeros((8, 8))
  x[:2, 0] = 3, 4
  rows = power_sgd.encode(x, rank=1)
  found = rows.view(np.float32)[:, :2]
  given = np.uint32([0x4020B002, 0x40564002]).view(np.float32)
  np.testing.assert_allclose(found, [given, [5, 0]], rtol=1e-6, atol=1e-6)
  for how, most in ((dict(rank=1), 1e-6), (dict(rank=1, bits=8), 4 / 127)):
    read = power_sgd.decode(power_sgd.encode(x, **how), x.shape, **how)
    np.testing.assert_allclose(read, x, atol=most)


def test_a_rotation_of_the_page():
  """An element of 8 in plane 3, column 5, alone."""
  x = np.zeros(8 * 32, np.float32)
  x[101] = 8
  layout = dict(bits=4, bucket_size=32, group=8)
  rotated = rotation.rotate(x, **layout)
  np.testing.assert_array_equal(rotated[5::32], [-1, 1, 1, -1, -1, 1, 1, -1])
  assert np.count_nonzero(rotated) == 8
  np.testing.assert_array_equal(rotation.unrotate(rotated, **layout), x)


def test_random_k_has_nothing_behind_its_range():
  """Of the stride from 8 to 12 only two elements are in a range of 10."""
  inside = [random_k.places((0, key), 10, 4)[2] < 10 for key in range(99)]
  read = functools.partial(random_k.decode, size=10, range_size=10, stride=4)
  sent = [bits(1), bits(2)]
  assert np.count_nonzero(read(row(0, inside.index(True), *sent, bits(3)))) == 3
  assert np.count_nonzero(read(row(0, inside.index(False), *sent, 0))) == 2
  with pytest.raises(ValueError, match="a value behind the range"):
    read(row(0, inside.index(False), *sent, bits(3)))


def test_other_lines_are_refused():
  line, least = np.zeros((101, 128), np.uint32), lines.LEAST
  assert len(lines.split_line(line, [(1, least + 1)])) == 1
  for words, wrong in [(least, line), (least + 1, line.ravel()), (7, line[0])]:
    with pytest.raises(ValueError, match="line"):
      lines.split_line(wrong, [(1, words)])
  line[-1, -1] = 1
  with pytest.raises(ValueError, match="zero"):
    lines.split_line(line, [(1, least + 1)])


def test_specifications_know_nothing_of_the_library():
  """They import NumPy, SciPy and ml_dtypes, and each other."""
  known = {"numpy", "scipy", "ml_dtypes", "tests.specs", *sys.stdlib_module_names}
  for path in pathlib.Path(__file__).parent.rglob("*.py"):
    if not path.name.startswith("test_"):
      found = re.findall(r"^ *(?:import|from) ([\w.]+)", path.read_text(), re.M)
      assert known >= {re.sub(r"^(tests\.specs|\w+).*", r"\1", x) for x in found}, path
