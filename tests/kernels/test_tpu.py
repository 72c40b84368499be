"""Forms for TPUs give the reference's bits, and programs have them where they can."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gradcomp._src.kernels import block_float, block_top, one_bit
from gradcomp._src.kernels.common import (
  deviation,
  fitted_levels,
  rotation,
  scales,
  selection,
)
from gradcomp._src.kernels.gpu import dispatch, self_check
from gradcomp._src.kernels.quantize import eight_bit, fitted, qsgd, reference
from gradcomp._src.kernels.tpu import lines, sums
from gradcomp.codecs import QSGD, BlockTop, EightBit, OneBit, Payload, Ternary
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits, assert_same_floats

pytestmark = pytest.mark.bits
KERNEL = "tpu_custom_call"


def values(tile, size):
  """Normal numbers of many magnitudes, with tiles of zeros, constants and others."""
  rng = np.random.default_rng(size)
  x = (rng.standard_normal(size) ** 3).astype(np.float32)
  each = tile // 8
  for k, number in enumerate((0.0, -0.0, 0.3, -0.1, np.inf, np.nan, 1e36, 1e-36)):
    part = x[k * each : (k + 1) * each]
    if k < 4:
      part[:] = number
    elif k < 6:
      part[each // 3] = number
    else:
      part *= number
  return x


@pytest.fixture(autouse=True)
def ragged(monkeypatch):
  """Makes blocks of 8 tiles, so that a ninth is a block that ends early."""
  monkeypatch.setattr(lines, "_ELEMENTS", 1)
  monkeypatch.setattr(lines, "_DECODED", 1)


def both(module, name, x, own=None, **options):
  """Returns what the form for TPUs and the reference make of the same operand."""
  tpu = functools.partial(getattr(module.tpu, name), **options, **(own or {}))
  reference = functools.partial(getattr(module.reference, name), **options)
  return jax.jit(tpu)(x), jax.jit(reference)(x)


@pytest.mark.parametrize(
  "size, keep, rest",
  [
    (64, True, 77),
    *slow((32, True, 0), (64, False, 0), (96, True, 5), (128, False, 33)),
    *slow((128, True, 0), (160, True, 9), (256, True, 257)),
  ],
)
def test_one_bit_has_the_bits_of_the_reference(size, keep, rest):
  """Buckets of a part of a line, of one and of several, and a partial tile."""
  form, tile = one_bit.Form(size, keep), one_bit.WORD * size
  x, own = values(tile, 9 * tile + rest), {"interpret": True}
  got, rows = both(one_bit, "encode_rows", x, own, form=form)
  assert_same_bits(got, rows)
  several = jnp.stack([rows[0], rows[0][::-1]])
  assert_same_bits(*both(one_bit, "decode_rows", several, own, bucket_size=size))


@pytest.mark.parametrize(
  "size, count, bits, keep, rest",
  [
    (32, 2, 8, True, 77),
    *slow(
      (64, 1, 2, True, 77),
      (8, 4, 2, True, 5),
      (8, 1, 8, False, 0),
      (16, 2, 32, True, 9),
    ),
    *slow((32, 3, 32, True, 0), (128, 1, 2, True, 1), (256, 2, 32, False, 3)),
    *slow((2048, 1, 8, True, 1)),
  ],
)
def test_block_top_has_the_bits_of_the_reference(size, count, bits, keep, rest):
  """Blocks of a part of a line, of one and of several; codes of all widths."""
  form = block_top.Form(size, count, bits, keep)
  x, own = values(form.tile_size, 9 * form.tile_size + rest), {"interpret": True}
  got, rows = both(block_top, "encode_rows", x, own, form=form)
  assert_same_bits(got, rows)
  several = jnp.stack([rows[0], rows[0][::-1]])
  assert_same_bits(*both(block_top, "decode_rows", several, own, form=form))


@pytest.mark.parametrize(
  "element, scale, size, rest",
  [
    ("e4m3", "e8m0", 32, 77),
    *slow(("e2m1", "e4m3", 16, 0), ("e3m2", "e8m0", 16, 5), ("e2m3", "e4m3", 32, 9)),
    *slow(("e5m2", "e4m3", 32, 1), ("e2m1", "e8m0", 32, 33)),
  ],
)
def test_block_float_has_the_bits_of_the_reference(element, scale, size, rest):
  """To nearest and at random, also with five codes a word, and a partial tile."""
  form = block_float.Form(element, scale, size, rest % 2 == 1)
  tile = form.planes * form.bucket_size
  x = values(tile, 9 * tile + rest)
  x *= np.where(np.arange(x.size) // tile % 3 == 2, np.float32(2.0**-112), 1)
  shared = np.float32([[0.3], [0.0], [form.least_shared]] * 4)[: -(-x.size // tile)]
  shared = shared if scale == "e4m3" else None
  dither = np.uint32([3, 5, 0xFFFFFFFF]) if form.up else None
  got, plain = (
    jax.jit(functools.partial(module.encode_rows, form=form, **own))
    for module, own in (
      (block_float.tpu, {"interpret": True}),
      (block_float.reference, {}),
    )
  )
  assert_same_bits(got(x, shared, dither)[0], plain(x, shared, dither)[0])
  rows = np.random.default_rng(rest).integers(0, 1 << 32, (2, 9, form.row_words))
  if shared := scale == "e4m3":
    rows[..., -shared:] = (
      np.float32([0, np.nan, 3e-5]).view(np.uint32).repeat(3)[:, None]
    )
  rows = jnp.asarray(rows, jnp.uint32)
  # Which NaN a product of two is, compilers choose.
  own = {"interpret": True}
  assert_same_floats(*both(block_float, "decode_rows", rows, own, form=form))


@pytest.mark.parametrize("groups", [9, *slow(1, 16)])
def test_sums_of_a_deviation_have_the_bits_of_the_reference(groups):
  x, scale = values(2048, 2048 * groups), np.float32(0.25)
  got = jax.jit(functools.partial(sums.of_groups, interpret=True))(x, x[-1], scale)
  assert_same_bits(got, jax.jit(deviation.sums_of_groups)(x, x[-1], scale))


@pytest.mark.parametrize(
  "size, planes, bucket, rows",
  [(32, 16, 512, 8), *slow((8, 8, 128, 21), (32, 8, 1024, 16), (8, 32, 256, 9))],
)
def test_rotations_have_the_bits_of_the_reference(size, planes, bucket, rows):
  """Both ways; groups of one and of several vectors, and a block that ends early."""
  tiles = values(planes * bucket, rows * planes * bucket).reshape(rows, -1)
  for forward in (True, False):
    options = dict(planes=planes, size=size, forward=forward)
    kernel = functools.partial(rotation.by_kernel, interpret=True, **options)
    reference = functools.partial(rotation.transform, **options)
    assert_same_bits(jax.jit(kernel)(tiles), jax.jit(reference)(tiles))


def payloads(codec, size, rows):
  """Two payloads of all codes, with scales of any size, of zero and not finite."""
  rng, count = np.random.default_rng(rows), codec.row_words - size
  words = rng.integers(0, 1 << 32, (2, rows, size), np.uint32)
  numbers = rng.uniform(1e-3, 1e3, (2, rows, count)).astype(np.float32)
  numbers[0, :3] = np.array([0.0, np.nan, np.inf], np.float32)[:, None]
  return np.concatenate([words, numbers.view(np.uint32)], axis=2)


@pytest.mark.parametrize(
  "codec, rows",
  [
    (EightBit(bucket_size=256), 21),
    *slow((EightBit(), 8), (EightBit(dtype="dynamic_map", bucket_size=128), 9)),
    *slow((EightBit(bucket_size=64), 8), (EightBit(dtype="mantissa"), 3)),
  ],
)
def test_codes_looked_up_have_the_bits_of_the_reference(codec, rows):
  """A scale a row or a bucket, a block that ends early, and what no kernel takes."""
  form = codec._form
  given = payloads(codec, form.bucket_size, rows)
  kernel = functools.partial(eight_bit.decode_by_lookup, form=form, interpret=True)
  reference = functools.partial(eight_bit.reference_decode_rows, form=form)
  assert_same_bits(jax.jit(kernel)(given), jax.jit(reference)(given))


@pytest.mark.parametrize(
  "codec, rows",
  [
    (QSGD(bits=4, bucket_size=128), 9),
    *slow((QSGD(bits=7), 8), (QSGD(bits=8, bucket_size=None), 21)),
    *slow((QSGD(bits=2, bucket_size=128, levels="uniform"), 8)),
    *slow((QSGD(bits=1, bucket_size=256, levels="uniform"), 9), (QSGD(bits=16), 8)),
  ],
)
def test_levels_have_the_bits_of_the_reference(codec, rows):
  """Words of 32 codes to three, the last with bits that are not used."""
  form = codec._form
  given = payloads(codec, form.bucket_size, rows)
  kernel = functools.partial(qsgd.decode_by_kernel, form=form, interpret=True)
  decode = functools.partial(reference.decode_rows, form=form)
  assert_same_bits(jax.jit(kernel)(given), jax.jit(decode)(given))


@pytest.mark.parametrize(
  "bits, bucket, rows", [(2, 128, 9), *slow((4, 256, 8), (3, 128, 21), (2, 64, 8))]
)
def test_fitted_levels_have_the_bits_of_the_reference(bits, bucket, rows):
  """Each row with its own, which stand behind the scales."""
  codec = QSGD(bits=bits, bucket_size=bucket, levels="nonuniform")
  given, sizes = payloads(codec, bucket, rows), dict(bits=bits, bucket_size=bucket)
  kernel = functools.partial(fitted.decode_by_kernel, interpret=True, **sizes)
  decode = functools.partial(fitted_levels.decode_rows, **sizes)
  assert_same_bits(jax.jit(kernel)(given), jax.jit(decode)(given))


@pytest.mark.parametrize("bucket", [512, *slow(128, 1024, 384, 96)])
def test_lengths_of_planes_have_the_bits_of_the_reference(bucket):
  """Also of buckets of three vectors or of a part of one, and of a partial tile."""
  x = values(8 * bucket, 8 * bucket * 3 + 77)
  options = dict(planes=8, bucket_size=bucket, norm="l2")
  got = jax.jit(functools.partial(scales._norms_of_planes, **options))(x)
  norms = jax.jit(functools.partial(scales.bucket_norms, **options))
  assert_same_bits(got, norms(x))


@pytest.mark.parametrize("size", [128 * 40, 128 * 40 + 77])
def test_lines_of_a_sample_have_the_bits_of_the_reference(size):
  """At every place of a row, and at the end of the last one."""
  x = values(1024, size)
  start = np.append(np.arange(0, size - 16, 97), size - 16).astype(np.int32)
  got = jax.jit(selection._lines_by_rows)(x, start)
  assert_same_bits(got, jax.jit(selection._lines_by_slices)(x, start))


@pytest.mark.parametrize(
  "codec",
  [
    OneBit(),
    BlockTop(),
    Ternary(rounding="nearest"),
    QSGD(rotate=32, rounding="nearest"),
  ],
)
def test_a_program_for_tpus_has_the_kernel_where_xla_does_not_partition_it(codec):
  mesh = modes.mesh(2)
  x = jax.ShapeDtypeStruct((2 * 32768,), jnp.float32)

  def lowered(function, spec):
    like = x.update(sharding=NamedSharding(mesh, spec))
    traced = jax.jit(function).trace(like)
    return traced.lower(lowering_platforms=("tpu",)).as_text()

  encode = lambda x: codec.encode(x, key=None).rows
  manual = jax.shard_map(encode, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
  assert KERNEL in lowered(manual, P("data"))
  assert KERNEL in jax.jit(encode).trace(x).lower(lowering_platforms=("tpu",)).as_text()
  assert KERNEL not in lowered(encode, P("data"))  # JAX would refuse it


@pytest.mark.parametrize("codec", [EightBit(), QSGD()])
def test_a_program_for_tpus_decodes_one_payload_by_the_kernel(codec):
  rows = jax.ShapeDtypeStruct((16, codec.row_words), jnp.uint32)
  decode = lambda rows: codec.payload_tiles(Payload(rows))
  for function in (decode, lambda rows: codec.sums.mean(rows[None], 1.0)):
    traced = jax.jit(function).trace(rows)
    assert KERNEL in traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("codec", [OneBit(bucket_size=8192), BlockTop(block_size=4096)])
def test_a_tile_too_large_for_a_kernel_is_encoded_by_the_reference(codec):
  x = jax.ShapeDtypeStruct((2**20,), jnp.float32)
  traced = jax.jit(lambda x: codec.encode(x).rows).trace(x)
  assert KERNEL not in traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.fixture
def tpu(monkeypatch):
  """Lets this process have a TPU, and know no kernel."""
  monkeypatch.setattr(self_check, "_tpus", lambda: jax.devices()[:1])
  monkeypatch.setitem(self_check._ELEMENTS, "tpu", 1 << 12)
  monkeypatch.setattr(self_check, "_known", {})
  monkeypatch.setattr(self_check, "_taken", {})
  monkeypatch.setattr(self_check, "_seconds", lambda *_: [1.0, 2.0])
  dispatch._warn_once.cache_clear()


@pytest.mark.parametrize("right", [True, False])
def test_a_kernel_for_tpus_is_tried_before_a_program_takes_it(right, tpu, monkeypatch):
  """Encoders and decoders; a wrong one gives way to the reference, with a warning."""
  codec = OneBit(bucket_size=64)
  x = jax.ShapeDtypeStruct((64 * codec.tile_size,), jnp.float32)
  encode = lambda x: codec.encode(x).rows
  decode = lambda rows: one_bit.decode_rows(rows, bucket_size=64)
  rows = jax.ShapeDtypeStruct((64, codec.row_words), jnp.uint32)
  found = []

  def compare(kernel, reference, operands, device):
    found.append(operands)
    return "" if right else "gives other bits"

  monkeypatch.setattr(self_check, "compare", compare)
  jax.clear_caches()
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    texts = [
      jax.jit(f).trace(y).lower(lowering_platforms=("tpu",)).as_text()
      for f, y in ((encode, x), (decode, rows))
    ]
  assert [KERNEL in text for text in texts] == [right, right]
  assert len(found) == 2 and (caught == []) is right
  _, (words,) = found
  exponent = words & 0x7F800000
  assert words.shape[1:] == rows.shape[1:]
  assert not ((exponent == 0) | (exponent == 0x7F800000)).any()


@pytest.mark.parametrize(
  "codec", [OneBit(bucket_size=96), *slow(OneBit(bucket_size=160)), BlockTop(bits=32)]
)
def test_blocks_of_any_codec_lower_for_tpus(codec, monkeypatch):
  """They have a multiple of 8 rows, also of tiles that are no power of two."""
  monkeypatch.undo()  # blocks are as large as in programs
  x = jax.ShapeDtypeStruct((600 * codec.tile_size,), jnp.float32)
  encode = lambda x: codec.encode(x).rows
  rows = jax.eval_shape(encode, x)
  for function, given in ((encode, x), (codec.decode_rows, rows)):
    text = jax.jit(function).trace(given).lower(lowering_platforms=("tpu",)).as_text()
    assert KERNEL in text


NEAREST = {"rounding": "nearest"}


@pytest.mark.parametrize(
  "make",
  [
    functools.partial(QSGD, **NEAREST),
    EightBit,
    *slow(
      OneBit,
      BlockTop,
      functools.partial(QSGD, bucket_size=128, levels="nonuniform", **NEAREST),
      functools.partial(QSGD, rotate=32, **NEAREST),
      functools.partial(Ternary, **NEAREST),
    ),
  ],
)
def test_a_codec_without_kernels_has_none_on_tpus(make):
  """Neither to encode nor to decode; and one that chooses has some."""
  kernels = []
  for codec in (make(), make(implementation="xla")):
    x = jax.ShapeDtypeStruct((16 * codec.tile_size,), jnp.float32)
    payload = jax.eval_shape(codec.encode, x)
    ways = (codec.encode, x), (functools.partial(codec.decode, like=x), payload)
    programs = [jax.jit(function).trace(given) for function, given in ways]
    texts = [x.lower(lowering_platforms=("tpu",)).as_text() for x in programs]
    kernels.append(sum(text.count(KERNEL) for text in texts))
  assert kernels[0] and not kernels[1]
