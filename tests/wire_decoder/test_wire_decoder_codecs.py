"""The decoders that know the page alone refuse what no encoder could have sent."""

import chex
import numpy as np
import pytest

from tests.oracles import eight_bit, float_cast, natural, one_bit, sign, ternary
from tests.oracles import floats as oracle_floats
from tests.oracles import levels as oracle_levels
from tests.wire_decoder import codecs as wire_decoder_codecs

SIZE = 70  # a bucket of 64 and a part of another
X = np.linspace(-1, 1, SIZE, dtype=np.float32)
KEY = (1, 2)


def word(value):
  """The bit pattern of a float."""
  return np.float32(value).view(np.uint32)


def ternary_rows(packing):
  hyper = dict(packing=packing, bucket_size=64)
  scales = ternary.ternary_scales(X, **hyper)
  return ternary.ternary_encode(X, key=KEY, scales=scales, **hyper)


def eight_bit_rows(data_type, exponent_offset=None):
  hyper = dict(data_type=data_type, bucket_size=64)
  scales = eight_bit.eight_bit_scales(X, exponent_offset=exponent_offset, **hyper)
  return eight_bit.eight_bit_encode(X, scales=scales, **hyper)


def read_one_bit(rows):
  return wire_decoder_codecs.decode_one_bit(rows, SIZE, bucket_size=64)


def read_column(rows):
  return wire_decoder_codecs.decode_one_bit_columns(rows, (SIZE,))


def read_ternary(packing):
  return lambda rows: wire_decoder_codecs.decode_ternary(
    rows, SIZE, packing=packing, bucket_size=64
  )


def read_eight_bit(data_type, **options):
  return lambda rows: wire_decoder_codecs.decode_eight_bit(
    rows, SIZE, data_type=data_type, bucket_size=64, **options
  )


def read_sign(scale):
  return lambda rows: wire_decoder_codecs.decode_sign(
    rows, SIZE, bucket_size=64, scale=scale
  )


def read_natural(rows):
  return wire_decoder_codecs.decode_natural(rows, SIZE)


def read_levels(rows):
  return wire_decoder_codecs.decode_nonuniform(rows, SIZE, bits=3, bucket_size=64)


def float_rows(fmt, byte=None):
  cast = float_cast.Cast(oracle_floats.Format(*fmt), byte=byte)
  return cast.encode(X)


def read_floats(fmt, byte=None):
  return lambda rows: wire_decoder_codecs.decode_float_cast(
    rows, SIZE, exponent_bits=fmt[0], mantissa_bits=fmt[1], byte=byte
  )


ONE_BIT = one_bit.one_bit_encode(X, bucket_size=64)
COLUMN = one_bit.one_bit_encode_columns(X)
SIGNS = {x: sign.sign_encode(X, bucket_size=64, scale=x) for x in ("mean", "one")}
NATURAL = natural.natural_encode(X, KEY)
LEVELS = oracle_levels.levels_encode(
  X, oracle_levels.first_levels(3), key=KEY, bits=3, bucket_size=64
)


@pytest.mark.parametrize(
  "read, rows, place, value, reason",
  [
    (read_one_bit, ONE_BIT, 63, 1 << 2, "fill the last tile"),
    (read_one_bit, ONE_BIT, 64, word(np.nan), "NaN, or neither"),
    (read_one_bit, ONE_BIT, 64, word(np.inf), "finite or NaN"),
    (read_one_bit, ONE_BIT, 64 + 32, word(1), "avg- must not be positive"),
    (read_one_bit, ONE_BIT, 64 + 1, word(-1), "avg\\+ must not be negative"),
    (read_one_bit, ONE_BIT, 64 + 32 + 1, word(-1), "mean of no elements"),
    (read_column, COLUMN, 2, 1 << 6, "unused bits"),
    (read_sign("mean"), SIGNS["mean"], 63, 1 << 2, "fill the last tile"),
    (read_sign("one"), SIGNS["one"], 63, 1 << 2, "fill the last tile"),
    (read_sign("mean"), SIGNS["mean"], 64, word(-1), "not negative"),
    (read_sign("mean"), SIGNS["mean"], 64, word(np.inf), "finite or NaN"),
    (read_sign("mean"), SIGNS["mean"], 64 + 31, word(1), "beyond the end"),
    (read_sign("one"), SIGNS["one"], 64, 1 << 31, "beyond the end"),
    (read_sign("one"), SIGNS["one"], 65, 1 << 31, "marked as not zero"),
    (read_ternary("2bit"), ternary_rows("2bit"), 0, 2, "code 2"),
    (read_ternary("2bit"), ternary_rows("2bit"), 63, 1 << 2, "fill the last tile"),
    (read_ternary("2bit"), ternary_rows("2bit"), 64, word(np.inf), "a scale must be"),
    (read_ternary("2bit"), ternary_rows("2bit"), 64, word(0), "under a scale of 0"),
    (read_ternary("base3"), ternary_rows("base3"), 0, 0, "a word must be"),
    (read_ternary("base3"), ternary_rows("base3"), 0, 2**32 - 1, "fill the last"),
    (read_eight_bit("linear"), eight_bit_rows("linear"), 0, 128, "zero has no sign"),
    (read_eight_bit("mantissa"), eight_bit_rows("mantissa"), 0, 114, "below 114"),
    (read_eight_bit("linear"), eight_bit_rows("linear"), 63, 1 << 8, "fill the last"),
    (read_eight_bit("linear"), eight_bit_rows("linear"), 66, word(1), "beyond the end"),
    (read_eight_bit("linear"), eight_bit_rows("linear"), 64, word(1e-30), "a scale"),
    (
      read_eight_bit("mantissa", exponent_offset=1),
      eight_bit_rows("mantissa", exponent_offset=1),
      64,
      word(10),
      "a scale must be 15",
    ),
    (read_floats((4, 2)), float_rows((4, 2)), 0, 1 << 7, "bits 7 to 7 of a code"),
    (read_floats((5, 2)), float_rows((5, 2)), 127, 1, "fill the last tile"),
    (read_floats((5, 2), 126), float_rows((5, 2), 126), 0, 0x7C, "that of a number"),
    (read_natural, NATURAL, 127, 1, "fill the last tile"),
    (read_levels, LEVELS, -1, word(0.5), "the last of them 1"),
    (read_levels, LEVELS, -2, word(0.3), "multiples of 1/256"),
    (read_levels, LEVELS, -4, word(0.75), "increasing"),
  ],
)
def test_what_no_encoder_sends_is_refused(read, rows, place, value, reason):
  read(rows)  # one word makes the difference
  rows = rows.copy()
  rows[0, place] = value
  with pytest.raises(ValueError, match=reason):
    read(rows)


@pytest.mark.parametrize(
  "read, rows",
  [
    (read_one_bit, ONE_BIT),
    (read_column, COLUMN),
    (read_ternary("2bit"), ternary_rows("2bit")),
    (read_eight_bit("linear"), eight_bit_rows("linear")),
    (read_floats((5, 2)), float_rows((5, 2))),
    (read_sign("mean"), SIGNS["mean"]),
    (read_sign("one"), SIGNS["one"]),
    (read_natural, NATURAL),
    (read_levels, LEVELS),
  ],
)
def test_rows_of_another_shape_are_refused(read, rows):
  with pytest.raises(ValueError, match="the rows must have the shape"):
    read(rows[:, 1:])
  with pytest.raises(ValueError, match="must be uint32"):
    read(rows.astype(np.int64))


def test_floats_under_a_byte_of_nan_are_all_nan():
  values = read_floats((5, 2), 255)(float_rows((5, 2)))
  chex.assert_shape(values, (SIZE,))
  assert np.isnan(values).all()
