"""Pairs the library's formats and casts with the oracle's, and makes a wide leaf."""

import numpy as np

from gradcomp import floats
from gradcomp.codecs import FloatCast
from tests.specs.float_cast import Cast
from tests.specs.floats import Format


def name(part):
  return "-".join(map(str, part)) if isinstance(part, tuple) else str(part)


def library(fmt):
  return floats.FloatFormat(fmt.e, fmt.m, **fmt.options)


def codec_of(fmt, rounding="nearest_even", scale="auto", **options):
  exponent, mantissa = fmt
  options |= {"rounding": rounding, "scale": scale}
  return FloatCast(exponent_bits=exponent, mantissa_bits=mantissa, **options)


def cast_of(codec, byte=None):
  """The oracle's description of a codec."""
  fmt = Format(codec.exponent_bits, codec.mantissa_bits)
  scale = 1.0 if codec.scale == "auto" else codec.scale
  return Cast(fmt, codec.rounding, byte, scale, codec.addends)


def wide_leaf(size, seed=0, spread=12):
  """Elements of many sizes, of both signs, and zeros."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal(size) * 2.0 ** rng.integers(-spread, spread, size)
  x[3], x[5] = 0.0, -0.0
  return x.astype(np.float32)
