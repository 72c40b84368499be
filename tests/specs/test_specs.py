"""The specifications read what they write, and refuse what no encoder could send."""

import ast
import functools
import pathlib
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
SPECS = {
  "qsgd": Spec(qsgd, dict(bits=4, bucket_size=64, levels="sign_magnitude"), NEAREST),
  "levels": Spec(
    levels, dict(bits=3, bucket_size=64), dict(k=levels.first(3), key=KEY)
  ),
  "dense": Spec(dense, dict(dtype=ml_dtypes.bfloat16)),
  "one_bit": Spec(one_bit, dict(bucket_size=64)),
  "columns": Spec(one_bit, dict(column=SIZE)),
  "sign mean": Spec(sign, dict(bucket_size=64, scale="mean")),
  "sign one": Spec(sign, dict(bucket_size=64, scale="one")),
  "2bit": Spec(ternary, dict(packing="2bit", bucket_size=64), dict(key=KEY)),
  "base3": Spec(ternary, dict(packing="base3", bucket_size=64), dict(key=KEY)),
  "linear": Spec(eight_bit, dict(data_type="linear", bucket_size=64)),
  "mantissa": Spec(eight_bit, dict(data_type="mantissa", bucket_size=64)),
  "fixed": Spec(
    eight_bit, dict(data_type="mantissa", bucket_size=64, exponent_offset=1)
  ),
  "e4m2": Spec(float_cast, dict(exponent_bits=4, mantissa_bits=2)),
  "e5m2": Spec(float_cast, dict(exponent_bits=5, mantissa_bits=2)),
  "e5m2 byte": Spec(float_cast, dict(exponent_bits=5, mantissa_bits=2, byte=126)),
  "natural": Spec(natural, {}, dict(key=KEY)),
  "mx": Spec(block_float, dict(element="e2m1", scale="e8m0", block_size=32)),
  "nv": Spec(block_float, dict(element="e2m1", scale="e4m3", block_size=16)),
  "lossless": Spec(lossless, {}),
  "top_k": Spec(top_k, dict(slots=3, range_size=SIZE)),
  "float32": Spec(top_k, RANGE, dict(positions=np.array([5, 7, 65_539])), TO_END),
  "float16": Spec(
    top_k,
    dict(value_dtype="float16", **RANGE),
    dict(positions=np.array([5, 7, 65_539])),
    TO_END,
  ),
  "asq": Spec(top_k, dict(quantize="asq", **RANGE), x=np.maximum(TO_END, 0)),
  "asq of none": Spec(top_k, dict(quantize="asq", **RANGE), x=np.minimum(TO_END, 0)),
  "mean": Spec(
    top_k,
    dict(quantize="mean", **RANGE),
    dict(positions=np.array([5, 7, 65_539])),
    MEANS,
  ),
  "random_k": Spec(random_k, dict(range_size=SIZE, stride=8), dict(key=KEY)),
  "block_top 2": Spec(block_top, dict(block_size=8, count=1, value_bits=2)),
  "block_top 8": Spec(block_top, dict(block_size=8, count=2, value_bits=8)),
  "block_top 32": Spec(block_top, dict(block_size=8, count=1, value_bits=32)),
}
each = pytest.mark.parametrize("name", SPECS)


@each
def test_values_that_are_read_are_written_as_they_are(name):
  spec = SPECS[name]
  values = spec.read(spec.rows())
  assert values.shape == spec.x.shape and values.dtype == np.float32
  assert np.isfinite(values).all()
  np.testing.assert_array_equal(spec.read(spec._replace(x=values).rows()), values)


@each
def test_rows_of_another_shape_are_refused(name):
  spec = SPECS[name]
  with pytest.raises(ValueError, match="the rows must have the shape"):
    spec.read(spec.rows()[:, 1:])
  with pytest.raises(ValueError, match="must be uint32"):
    spec.read(spec.rows().astype(np.int64))


@pytest.mark.parametrize(
  "name, place, value, reason",
  [
    ("qsgd", 63, 1 << 4, "fill the last tile"),
    ("one_bit", 63, 1 << 2, "fill the last tile"),
    ("one_bit", 64, bits(np.nan), "NaN, or neither"),
    ("one_bit", 64, bits(np.inf), "finite or NaN"),
    ("one_bit", 64 + 32, bits(1), "avg- must not be positive"),
    ("one_bit", 64 + 1, bits(-1), "avg\\+ must not be negative"),
    ("one_bit", 64 + 32 + 1, bits(-1), "mean of no elements"),
    ("columns", 2, 1 << 6, "unused bits"),
    ("sign mean", 63, 1 << 2, "fill the last tile"),
    ("sign one", 63, 1 << 2, "fill the last tile"),
    ("sign mean", 64, bits(-1), "not negative"),
    ("sign mean", 64, bits(np.inf), "finite or NaN"),
    ("sign mean", 64 + 31, bits(1), "beyond the end"),
    ("sign one", 64, 1 << 31, "beyond the end"),
    ("sign one", 65, 1 << 31, "marked as not zero"),
    ("2bit", 0, 2, "code 2"),
    ("2bit", 63, 1 << 2, "fill the last tile"),
    ("2bit", 64, bits(np.inf), "a scale must be"),
    ("2bit", 64, bits(0), "under a scale of 0"),
    ("base3", 0, 0, "a word must be"),
    ("base3", 0, 2**32 - 1, "fill the last"),
    ("linear", 0, 128, "zero has no sign"),
    ("mantissa", 0, 114, "below 114"),
    ("linear", 63, 1 << 8, "fill the last"),
    ("linear", 66, bits(1), "beyond the end"),
    ("linear", 64, bits(1e-30), "a scale"),
    ("fixed", 64, bits(10), "a scale must be 15"),
    ("e4m2", 0, 1 << 7, "bits 7 to 7 of a code"),
    ("e5m2", 127, 1, "fill the last tile"),
    ("e5m2 byte", 0, 0x7C, "that of a number"),
    ("natural", 127, 1, "fill the last tile"),
    ("levels", -1, bits(0.5), "the last of them 1"),
    ("levels", -2, bits(0.3), "multiples of 1/256"),
    ("levels", -4, bits(0.75), "increasing"),
    ("nv", 127, 1, "fill the last tile"),
    ("nv", 128, 127, "from 0 to 448"),
    ("nv", -1, bits(1e-38), "a shared scale"),
    ("lossless", -10, 0, "the places of the escapes"),
    ("float32", 0, 4, "ends must not descend"),
    ("float32", 1, 5, "nor the last exceed 4"),
    ("float32", 1, 2**32 - 1, "nor the last exceed 4"),
    ("float32", 3, 7 | 1 << 16, "the codes of unused slots"),
    ("float32", 2, 5 | (70_000 - 65_536) << 16, "positions must be in the range"),
    ("float32", 3, 5, "no two the same"),
    ("float32", 7, bits(1), "the values of unused slots"),
    ("float32", 7, bits(-0.0), "the values of unused slots"),
    ("float16", 5, 0xC000 | 1 << 16, "the values of unused slots"),
    ("asq of none", 4, bits(1), "the mean of no entries"),
    ("mean", 5, bits(-1), "the signs of what they stand for"),
    ("mean", 6, bits(2), "the signs of what they stand for"),
    ("mean", 4, 7, "the mean of no entries"),
    ("top_k", 2, 1 << 16, "behind the last slot"),
  ],
)
def test_what_no_encoder_sends_is_refused(name, place, value, reason):
  spec = SPECS[name]
  rows = spec.rows()
  spec.read(rows)  # one word makes the difference
  rows[0, place] = value
  with pytest.raises(ValueError, match=reason):
    spec.read(rows)


def test_floats_under_a_byte_of_nan_are_all_nan():
  fields = SPECS["e5m2 byte"].fields | dict(byte=255)
  values = float_cast.decode(SPECS["e5m2"].rows(), SIZE, **fields)
  assert values.shape == (SIZE,) and np.isnan(values).all()


@pytest.mark.parametrize(
  "name, expected, values",
  [
    ("float32", row(2, 3, 5 | 3 << 16, 7, bits(1), bits(-2), bits(0.5), 0), 0.5),
    ("float16", row(2, 3, 5 | 3 << 16, 7, 0x3C00 | 0x3800 << 16, 0xC000), 0.5),
    # Blocks of 32,768: of 5 and 65,539 the mean is 1, of 7 it is -2.
    ("mean", row(2, 2, 3, 5 | 3 << 16, 7 | 1 << 15, bits(1), bits(-2)), 1),
  ],
)
def test_rows_of_top_k_by_hand(name, expected, values):
  spec = SPECS[name]
  np.testing.assert_array_equal(spec.rows(), expected)
  (entries,) = top_k.entries(expected, **spec.fields)
  assert entries.positions.tolist() == [5, 7, 65_539]
  assert entries.values.tolist() == [1, -2, values]
  np.testing.assert_array_equal(spec.read(expected), spec.x)
  with pytest.raises(ValueError, match="must be those of 140001 elements"):
    top_k.decode(expected, 140_001, **spec.fields)


@pytest.mark.parametrize(
  "spec, words, values",
  [
    (
      Spec(sign, dict(bucket_size=32, scale="one"), x=np.float32([2, -1, 0])),
      {1: 1, 32: 1},
      [1, -1, 1],
    ),
    (
      Spec(natural, {}, dict(key=(0, 0, 0)), np.float32([1, -1.5, 0, 3e30])),
      {0: 0x3F, 1: 0xBF, 3: 0x7F},
      [1, -1, 0, np.nan],
    ),
    (
      Spec(natural, {}, dict(key=(0, 0, 0xFFFF)), np.float32([0, -1.5])),
      {1: 0xC0},
      [0, -2],
    ),
    (
      Spec(
        block_float,
        dict(element="e2m1", scale="e8m0", block_size=32),
        x=np.float32([7, -3, 0.4, 2.6]),
      ),
      {0: 7, 1: 13, 2: 1, 3: 5, 128: 0x7F},
      [6, -3, 0.5, 3],
    ),
    (
      Spec(
        block_top,
        dict(block_size=8, count=1, value_bits=2),
        x=np.float32([1, -4, *[0] * 13, 2, 1.5]),
      ),
      {0: 0x1B, 1: 1, 2: 0x1C, 32: 0x40800000},
      [0, -4, *[0] * 13, 4, 1.5],
    ),
    (
      Spec(
        qsgd,
        dict(bits=4, bucket_size=512, levels="sign_magnitude"),
        NEAREST,
        np.pad(np.float32([1, -3, 0, 7]), (0, 508)),
      ),
      {0: 1, 1: 0b1011, 3: 7, 512: 0x40E00000},
      [1, -3, 0, 7, *[0] * 508],
    ),
  ],
  ids=["sign", "natural", "its partner", "block_float", "block_top", "qsgd"],
)
def test_examples_of_the_page(spec, words, values):
  """docs/inside/wire-format.md says the words that are not zero, by their places."""
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
  np.testing.assert_allclose(power_sgd.decode(rows, x.shape, rank=1), x, atol=1e-6)
  eight = power_sgd.encode(x, rank=1, bits=8)
  read = power_sgd.decode(eight, x.shape, rank=1, bits=8)
  np.testing.assert_allclose(read, x, atol=4 / 127)


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
  last = lambda key: int(random_k.places((0, key), 10, 4)[2])
  inside, behind = (
    next(key for key in range(99) if (last(key) < 10) == wanted)
    for wanted in (True, False)
  )
  read = functools.partial(random_k.decode, size=10, range_size=10, stride=4)
  sent = [bits(1), bits(2)]
  assert np.count_nonzero(read(row(0, inside, *sent, bits(3)))) == 3
  assert np.count_nonzero(read(row(0, behind, *sent, 0))) == 2
  with pytest.raises(ValueError, match="a value behind the range"):
    read(row(0, behind, *sent, bits(3)))


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
  known = {"numpy", "scipy", "ml_dtypes", *sys.stdlib_module_names}
  folder = pathlib.Path(__file__).parent
  for path in folder.glob("*.py"):
    if path.name == pathlib.Path(__file__).name:
      continue
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
      elif isinstance(node, ast.ImportFrom):
        names = [node.module]
      else:
        continue
      for name in names:
        assert name.split(".")[0] in known or name.startswith("tests.specs"), path
