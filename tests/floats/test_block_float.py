"""BlockFloat sends the Microscaling specification's bits, and NVFP4's."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from gradcomp._src.testing.noise import mean_is_the_leaf
from gradcomp.codecs import BlockFloat
from tests.errors import table
from tests.plugins.slow_cases import slow
from tests.specs import block_float as oracle
from tests.specs import planes
from tests.support import laws
from tests.support.assertions import assert_same_floats

MXFP4 = dict(element="e2m1")
NVFP4 = dict(element="e2m1", scale="e4m3", block_size=16)
FIELDS = itertools.product(oracle.DTYPES, ("e8m0", "e4m3"), (16, 32))
FORMATS = [dict(element=e, scale=s, block_size=size) for e, s, size in FIELDS]
FORMATS.remove(NVFP4)
ELEMENTS = ["e2m1", *slow("e4m3", "e5m2", "e3m2", "e2m3")]
every_element = pytest.mark.parametrize("element", ELEMENTS)
every_rounding = pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
of_fields = lambda *x: pytest.mark.parametrize("fields", [NVFP4, *slow(*x)], ids=str)


def layout(codec):
  return dict(element=codec.element, scale=codec.scale, block_size=codec.block_size)


def wide(codec, binades):
  """Two tiles and a part of a third, with blocks of very different sizes, and zeros."""
  x = laws.gaussian(2 * codec.tile_size + 77)
  rng = np.random.default_rng(7)
  each = rng.integers(-binades, binades, -(-x.size // 16), endpoint=True)
  x = np.ldexp(x, each.repeat(16)[: x.size])
  x[5], x[6], x[32:64] = 0, -0.0, 0
  x[64:80] = [6, 7, -7, 7.5, 2.5, -2.5, 0.25, 0.75, 1e-3, 5, 3.5, 1.25, 1.75, 0, 1, -5]
  return np.float32(x)


def small(codec):
  """Numbers that need the least scale of a tensor, and blocks of the smallest ones."""
  x = wide(codec, 3) * np.float32(2.0**-118)
  x[-32:] *= np.float32(2.0**-6)
  return np.where(np.abs(x) < 2.0**-126, np.float32(0), x)


@every_rounding
@pytest.mark.parametrize("fields", [MXFP4, NVFP4, *slow(*FORMATS)], ids=str)
def test_rows_are_the_oracles(fields, rounding):
  """Codes and scales to the bit, and the page's decoder reads the values."""
  codec = BlockFloat(rounding=rounding, **fields)
  key = np.asarray(laws.KEY) if codec.needs_key else None
  every = [wide(codec, n) for n in ((90, 3) if codec.scale == "e8m0" else (12, 3))]
  for x in (*every, small(codec)):
    payload = laws.encoder(codec)(jnp.asarray(x), laws.KEY)
    rows = oracle.encode(x, key=key, **layout(codec))
    np.testing.assert_array_equal(payload.rows, rows)
    read = oracle.decode(rows, x.size, **layout(codec))
    assert_same_floats(laws.decoder(codec, x.shape)(payload), read)


@every_rounding
@of_fields(*(x for x in FORMATS if x["block_size"] == 32))
def test_small_tensors_keep_their_precision(fields, rounding):
  """Down to 2**-126, which is the distance of numbers there."""
  codec = BlockFloat(rounding=rounding, **fields)
  x = laws.gaussian(codec.tile_size)
  expected = np.abs(laws.round_trip(codec, x) - x).max()
  for power in (-100, -110, -118, -124):
    scale = np.float32(2.0**power)
    given = np.where(np.abs(x * scale) < 2.0**-126, np.float32(0), x * scale)
    lost = np.abs(np.float64(laws.round_trip(codec, given)) - given).max()
    # A scale that is rounded up is at most twice as large as the block needs.
    assert lost <= 2 * expected * scale + 2.0**-126


@every_element
def test_every_code_under_every_power_of_two(element):
  """Decoded values are those of ml_dtypes, times a scale of ml_dtypes."""
  codec = BlockFloat(element=element)
  numbers = oracle.numbers(element)
  codes = np.resize(np.arange(numbers.size), codec.tile_size).astype(np.uint32)
  rows = planes.pack(codes, oracle.bits_of(element), planes.ROW_WORDS)
  words = np.arange(256, dtype=np.uint32)[:, None] * np.uint32(0x01010101)
  words = words.repeat(codec.row_words - 128, axis=1)
  rows = np.concatenate([rows.repeat(256, axis=0), words], axis=1)
  found = jax.jit(codec.decode_rows)(rows).reshape(256, -1)
  scales = np.arange(256).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
  with np.errstate(invalid="ignore"):
    value = numbers[codes] * scales.astype(np.float64)[:, None]
  # What float32 does not hold: no encoder sends it, but for 2**128, rounded up.
  most = np.finfo(np.float32).max
  value = np.where(np.isfinite(numbers[codes]), np.clip(value, -most, most), value)
  value = np.where(np.abs(value) < 2.0**-126, np.copysign(0, value), value)
  assert_same_floats(found, np.float32(value))


@every_element
def test_numbers_of_the_format_are_sent_as_they_are(element):
  """Also at random: they have no neighbors between which to choose."""
  numbers = oracle.numbers(element)
  numbers = numbers[np.isfinite(numbers)]
  numbers = np.resize(numbers, -(-numbers.size // 31) * 31).reshape(-1, 31)
  # The largest number fixes the scale of each block.
  blocks = np.insert(numbers, 0, oracle.largest(element), axis=1)
  x = np.float32(np.ldexp(blocks, np.arange(len(blocks))[:, None] * 3 - 20))
  for rounding in ("nearest", "stochastic"):
    codec = BlockFloat(element=element, rounding=rounding)
    assert_same_floats(laws.round_trip(codec, x), x)


def test_an_independent_package_agrees():
  """gfloat quantizes blocks by the specification; of its float32 numbers."""
  gfloat = pytest.importorskip("gfloat")
  formats = pytest.importorskip("gfloat.formats")
  for number, element in ((4, "e2m1"), (8, "e4m3")):
    info = getattr(formats, f"format_info_mxfp{number}_{element}")
    x = wide(BlockFloat(element=element), 20)[: 32 * 12].reshape(-1, 32)
    by = gfloat.compute_scale_amax
    expected = [gfloat.quantize_block(info, np.float64(block), by) for block in x]
    found = laws.round_trip(BlockFloat(element=element), x)
    np.testing.assert_array_equal(found, np.float32(expected))


@of_fields(MXFP4, {}, dict(element="e2m3"))
def test_stochastic_rounding_is_unbiased(fields):
  """Nothing is clipped: a block's scale is not below what its largest element needs."""
  codec = BlockFloat(rounding="stochastic", **fields)
  x = laws.gaussian(codec.tile_size)
  x[:32] = 7.9  # above the largest number under the specification's scale
  mean_is_the_leaf(codec, x)


def test_a_rotation_spreads_what_alone_is_far_larger():
  """The others of its block keep their signs, and are zeros without a rotation."""
  x = np.float32(np.random.default_rng(0).choice([-1, 1], 1024))
  x[100] = 40
  alone, spread = (BlockFloat(rotate=group, **MXFP4) for group in (None, 32))
  alone, spread = (laws.round_trip(codec, x)[96:128] for codec in (alone, spread))
  assert (alone == 0).sum() == 31
  assert (spread * x[96:128] > 0).all()


def test_blocks_at_the_ends_of_float32():
  """Subnormal blocks vanish, and the largest numbers stay finite."""
  most = np.finfo(np.float32).max
  x = np.float32([1e-40, 2.0**-126, 1e-37, most, -most]).repeat(32)
  for fields, rounding in ((MXFP4, "nearest"), (NVFP4, "stochastic")):
    found = laws.round_trip(BlockFloat(rounding=rounding, **fields), x)
    assert (found[:32] == 0).all() and np.isfinite(found).all()
    # Steps of the largest numbers are a third of them or less.
    assert (np.abs(found[96:]) >= most * (2 / 3)).all()


@of_fields({}, MXFP4, dict(element="e5m2"))
def test_operands_are_what_matrix_units_take(fields):
  """JAX takes their shapes and types, and their product is that of decoded arrays."""
  codec = BlockFloat(**fields)
  a, b = laws.gaussian((1, 24, 96)), laws.gaussian((1, 40, 96), seed=1)
  operand = jax.jit(codec.operand, static_argnames="like")
  found = []
  for x in (a, b):
    payload = laws.encoder(codec)(jnp.asarray(x), laws.KEY)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    elements, scales, factor = operand(payload, like=like)
    assert elements.dtype == oracle.DTYPES[codec.element]
    whole = np.repeat(np.float32(scales), codec.block_size, axis=-1)
    value = np.float32(elements) * (whole * np.float32(factor))
    assert_same_floats(value, laws.decoder(codec, x.shape)(payload))
    found.append((elements, scales))
  (a, a_scales), (b, b_scales) = found
  product = jax.eval_shape(jax.nn.scaled_matmul, a, b, a_scales, b_scales)
  assert product.shape == (1, 24, 40)


def operand(**fields):
  codec, x = BlockFloat(**fields), jax.ShapeDtypeStruct((3, 40), jnp.float32)
  codec.operand(jax.eval_shape(codec.encode, x), like=x)


ROWS = """
BlockFloat(block_size=16.0) -> `block_size` must be 16 or 32, got 16.0
BlockFloat(element="e2m1", rotate=16) -> `rotate` must be 8, 32, or None
BlockFloat(rotate=8) -> `element` must be "e2m1" with rotate=8, got
# Operands that no matrix unit takes.
operand() -> `like` must have a last axis
operand(element="e2m1", rotate=8) -> `rotate` must be None for matrix units
operand(element="e3m2") -> `element` must be one of
"""

test_errors = table.refused(ROWS, globals())
