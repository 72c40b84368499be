"""Forms for TPUs give the reference's bits, and programs have them where they can."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gradcomp._src.codecs.protocol import decoded
from gradcomp._src.codecs.sums.records import Payload
from gradcomp._src.kernels import block_float, block_top, one_bit, quantize, selection
from gradcomp._src.kernels.common import rotation, scales
from gradcomp._src.kernels.gpu import table
from gradcomp._src.kernels.tpu import lines
from gradcomp.codecs import QSGD, BlockFloat, BlockTop, EightBit, Leaf, OneBit, Ternary
from tests.plugins.slow_cases import slow
from tests.support import laws, modes
from tests.support.assertions import assert_same_bits

pytestmark = pytest.mark.bits
KERNEL = "tpu_custom_call"


def values(tile, size):
  """Normal numbers of many magnitudes, with tiles of zeros, constants and others."""
  x = laws.gaussian(size, size) ** 3
  parts = x[: tile // 8 * 8].reshape(8, -1)
  parts[:4] = np.float32([0.0, -0.0, 0.3, -0.1])[:, None]
  parts[4:6, tile // 24] = np.inf, np.nan
  parts[6:] *= np.float32([1e36, 1e-36])[:, None]
  return x


@pytest.fixture(autouse=True)
def ragged(monkeypatch):
  """Makes blocks of 8 tiles, so that a ninth ends early; and every kernel serve."""
  monkeypatch.setattr(table, "serves", lambda *_: True)
  monkeypatch.setattr(lines, "_ELEMENTS", 1)
  monkeypatch.setattr(lines, "_DECODED", 1)


def pair(form, reference, options, *operands):
  """A form for TPUs and its reference, with options, and what both are given."""
  return *(functools.partial(f, **options) for f in (form, reference)), operands


def interpreted(form):
  return functools.partial(form, interpret=True)


def both_ways(module):
  """The interpreted encoder and decoder of a module, each with its reference."""
  yield interpreted(module.encode_on_tpu), module.encode_reference
  yield interpreted(module.decode_on_tpu), module.decode_reference


def of_rows(module, form, tile, rest):
  """The encoder and the decoder of a module, for nine tiles and a part of one."""
  x, (encoders, decoders) = values(tile, 9 * tile + rest), both_ways(module)
  yield pair(*encoders, {"form": form}, x)
  rows = jax.jit(functools.partial(encoders[1], form=form))(x)[0]
  yield pair(*decoders, {"form": form}, jnp.stack([rows[0], rows[0][::-1]]))


def one_bit_rows(size, keep, rest):
  """Buckets of a part of a line, of one and of several, and a partial tile."""
  form = one_bit.Form(size, keep)
  return of_rows(one_bit, form, one_bit.WORD * size, rest)


def block_top_rows(size, count, bits, keep, rest):
  """Blocks of a part of a line, of one and of several; codes of all widths."""
  form = block_top.Form(size, count, bits, keep)
  return of_rows(block_top, form, form.planes * form.bucket_size, rest)


def block_float_rows(element, scale, size, rest):
  """To nearest and at random, also with five codes a word, and a partial tile."""
  form = block_float.Form(element, scale, size, rest % 2 == 1)
  tile = form.planes * form.bucket_size
  x = values(tile, 9 * tile + rest)
  x *= np.where(np.arange(x.size) // tile % 3 == 2, np.float32(2.0**-112), 1)
  shared = np.float32([[0.3], [0.0], [form.least_shared]] * 4)[: -(-x.size // tile)]
  shared = shared if scale == "e4m3" else None
  dither = np.uint32([3, 5, 0xFFFFFFFF]) if form.up else None
  (encoders, decoders), given = both_ways(block_float), {"form": form}
  first = lambda f: lambda *operands, form: f(*operands, form=form)[0]
  yield pair(*map(first, encoders), given, x, shared, dither)
  rows = np.random.default_rng(rest).integers(0, 1 << 32, (2, 9, form.row_words))
  if shared := scale == "e4m3":
    odd = np.float32([0, np.nan, 3e-5]).view(np.uint32)
    rows[..., -shared:] = odd.repeat(3)[:, None]
  # Which NaN a product of two is, compilers choose.
  one_nan = lambda y: jnp.where(y == y, y, jnp.nan)
  numbers = lambda f: lambda rows, form: one_nan(f(rows, form=form))
  yield pair(*map(numbers, decoders), given, rows.astype(np.uint32))


def sums_of_a_deviation(groups):
  x, form = values(2048, 2048 * groups), interpreted(scales.sums_by_kernel)
  yield pair(form, scales.sums_of_groups, {}, x, x[-1], np.float32(0.25))


def rotations(size, planes, bucket, rows):
  """Both ways; groups of one and of several vectors, and a block that ends early."""
  tiles = values(planes * bucket, rows * planes * bucket).reshape(rows, -1)
  for forward in (True, False):
    options = dict(planes=planes, size=size, forward=forward)
    yield pair(interpreted(rotation.by_kernel), rotation.transform, options, tiles)


def payloads(codec, rows):
  """Two payloads of all codes, with scales of any size, of zero and not finite."""
  size = codec.bucket_size or 512
  rng, count = np.random.default_rng(rows), codec.row_words - size
  words = rng.integers(0, 1 << 32, (2, rows, size), np.uint32)
  numbers = rng.uniform(1e-3, 1e3, (2, rows, count)).astype(np.float32)
  numbers[0, :3] = np.array([0.0, np.nan, np.inf], np.float32)[:, None]
  return np.concatenate([words, numbers.view(np.uint32)], axis=2)


def levels(codec, rows):
  """Words of 32 codes to three, and of a table; and what no kernel takes."""
  form, plain = interpreted(quantize.decode_on_tpu), quantize.decode_reference
  yield pair(form, plain, {"form": codec.form}, payloads(codec, rows))


def levels_of_rows(bits, bucket, rows):
  """Each row with its own fitted ones, which stand behind the scales."""
  codec = QSGD(bits=bits, bucket_size=bucket, levels="nonuniform")
  return levels(codec.bind(Leaf(())), rows)


def lengths_of_planes(bucket):
  """Also of buckets of three vectors or of a part of one, and of a partial tile."""
  options = dict(planes=8, bucket_size=bucket, norm="l2")
  x = values(8 * bucket, 8 * bucket * 3 + 77)
  yield pair(scales._norms_of_planes, scales.bucket_norms, options, x)


def lines_of_a_sample(size):
  """At every place of a row, and at the end of the last one."""
  start = np.append(np.arange(0, size - 16, 97), size - 16).astype(np.int32)
  forms = selection._lines_by_rows, selection._lines.__wrapped__
  yield pair(*forms, {}, values(1024, size), start)


# The arguments of each, of which plain runs have the first.
FORMS = {
  one_bit_rows: [
    *((64, True, 77), (32, True, 0), (64, False, 0), (96, True, 5)),
    *((128, False, 33), (128, True, 0), (160, True, 9), (256, True, 257)),
  ],
  block_top_rows: [
    *((32, 2, 8, True, 77), (64, 1, 2, True, 77), (8, 4, 2, True, 5)),
    *((8, 1, 8, False, 0), (16, 2, 32, True, 9), (32, 3, 32, True, 0)),
    *((128, 1, 2, True, 1), (256, 2, 32, False, 3), (2048, 1, 8, True, 1)),
  ],
  block_float_rows: [
    *(("e4m3", "e8m0", 32, 77), ("e2m1", "e4m3", 16, 0), ("e3m2", "e8m0", 16, 5)),
    *(("e2m3", "e4m3", 32, 9), ("e5m2", "e4m3", 32, 1), ("e2m1", "e8m0", 32, 33)),
  ],
  sums_of_a_deviation: [(9,), (1,), (16,)],
  rotations: [(32, 16, 512, 8), (8, 8, 128, 21), (32, 8, 1024, 16), (8, 32, 256, 9)],
  levels: [
    *((EightBit(bucket_size=256), 21), (EightBit(), 8), (EightBit(bucket_size=64), 8)),
    (EightBit(dtype="dynamic_map", bucket_size=128), 9),
    (EightBit(dtype="mantissa"), 3),
    *((QSGD(bits=4, bucket_size=128), 9), (QSGD(bits=7), 8), (QSGD(bits=16), 8)),
    (QSGD(bits=8, bucket_size=None), 21),
    (QSGD(bits=2, bucket_size=128, levels="uniform"), 8),
    (QSGD(bits=1, bucket_size=256, levels="uniform"), 9),
  ],
  levels_of_rows: [(2, 128, 9), (4, 256, 8), (3, 128, 21), (2, 64, 8)],
  lengths_of_planes: [(512,), (128,), (1024,), (384,), (96,)],
  lines_of_a_sample: [(128 * 40 + 77,), (128 * 40,)],
}


CASES = [(pairs, given) for pairs, every in FORMS.items() for given in every]
PLAIN = [(pairs, every[0]) for pairs, every in FORMS.items()]


@pytest.mark.parametrize(
  "pairs, given",
  PLAIN + slow(*(x for x in CASES if x not in PLAIN)),
  ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_a_form_for_tpus_has_the_bits_of_the_reference(pairs, given):
  for *both, operands in pairs(*given):
    assert_same_bits(*(jax.jit(f)(*operands) for f in both))


def lowered(function, *given):
  traced = jax.jit(lambda *given: function(*given)).trace(*given)
  return traced.lower(lowering_platforms=("tpu",)).as_text()


def tiles(codec, count):
  return jax.ShapeDtypeStruct((count * codec.tile_size,), jnp.float32)


NEAREST = functools.partial(QSGD, rounding="nearest")
E4M3 = BlockFloat(scale="e4m3")


@pytest.mark.parametrize(
  "codec", [OneBit(), BlockTop(), E4M3, Ternary(rounding="nearest"), NEAREST(rotate=32)]
)
def test_a_program_has_the_kernel_where_xla_does_not_partition_it(codec):
  mesh = modes.mesh(2)
  x = jax.ShapeDtypeStruct((2 * 32768,), jnp.float32)
  cut = x.update(sharding=NamedSharding(mesh, P("data")))
  encode = lambda x: codec.encode(x, key=None).rows
  manual = jax.shard_map(encode, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
  assert KERNEL in lowered(manual, cut)
  assert KERNEL in lowered(encode, x)
  few = jax.ShapeDtypeStruct((9 * codec.tile_size + 9,), jnp.float32)
  assert KERNEL in lowered(encode, few)  # beside a part of a tile
  assert KERNEL not in lowered(encode, cut)  # JAX would refuse it


@pytest.mark.parametrize("codec", [EightBit(), QSGD()])
def test_a_program_decodes_one_payload_by_the_kernel(codec):
  rows = jax.ShapeDtypeStruct((16, codec.row_words), jnp.uint32)
  assert KERNEL in lowered(lambda rows: decoded(codec, Payload(rows)), rows)
  assert KERNEL in lowered(lambda rows: codec.sums.mean(rows[None], 1.0), rows)


@pytest.mark.parametrize("codec", [OneBit(bucket_size=8192), BlockTop(block_size=4096)])
def test_a_tile_too_large_for_a_kernel_is_encoded_by_the_reference(codec):
  x = jax.ShapeDtypeStruct((2**20,), jnp.float32)
  assert KERNEL not in lowered(lambda x: codec.encode(x).rows, x)


def test_no_program_has_a_kernel_without_a_table_but_by_name(monkeypatch):
  """Encoders and decoders, and nobody has a table yet; a name is checked if asked."""
  monkeypatch.undo()
  codec = OneBit(bucket_size=64)
  x, rows = tiles(codec, 64), jax.ShapeDtypeStruct((64, codec.row_words), jnp.uint32)
  device = jax.sharding.AbstractDevice("TPU v9", num_cores=None, platform="tpu")
  there = jax.sharding.AbstractMesh((), (), abstract_device=device)
  table._warn_once.cache_clear()
  with jax.sharding.use_abstract_mesh(there):
    with pytest.warns(RuntimeWarning, match="on TPU v9: XLA runs the ref") as caught:
      texts = [lowered(*of) for of in both(codec, x, rows)]
  assert len(caught) == 1 and not any(KERNEL in text for text in texts)
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  forced = dataclasses.replace(codec, implementation="pallas")
  assert all(KERNEL in lowered(*of) for of in both(forced, x, rows))
  found = []
  monkeypatch.setenv("GRADCOMP_CHECK_KERNELS", "1")
  monkeypatch.setattr(table, "devices", lambda *_: jax.devices()[:1])
  monkeypatch.setattr(table, "_found", {})
  monkeypatch.setattr(table, "compare", lambda *given: found.append(given) or "")
  for function, given in both(forced, x, rows):
    jax.eval_shape(function, given)
  (*_, (first,), _), (*_, (words,), _) = found
  exponent = words & 0x7F800000
  assert (first.shape, words.shape) == (x.shape, rows.shape)
  assert not ((exponent == 0) | (exponent == 0x7F800000)).any()


def both(codec, x, rows):
  """The encoder and the decoder of a codec, with what each takes."""
  yield lambda x: codec.encode(x).rows, x
  yield codec.decode_rows, rows


@pytest.mark.parametrize(
  "codec", [OneBit(bucket_size=96), *slow(OneBit(bucket_size=160)), BlockTop(bits=32)]
)
def test_blocks_of_any_codec_lower(codec, monkeypatch):
  """They have a multiple of 8 rows, also of tiles that are no power of two."""
  monkeypatch.undo()  # blocks are as large as in programs
  monkeypatch.setattr(table, "serves", lambda *_: True)
  encode, x = lambda x: codec.encode(x).rows, tiles(codec, 600)
  assert KERNEL in lowered(encode, x)
  assert KERNEL in lowered(codec.decode_rows, jax.eval_shape(encode, x))


@pytest.mark.parametrize(
  "make",
  [NEAREST, EightBit, *slow(OneBit, BlockTop)]
  + slow(functools.partial(NEAREST, bucket_size=128, levels="nonuniform"))
  + slow(functools.partial(NEAREST, rotate=32))
  + slow(functools.partial(Ternary, rounding="nearest")),
)
def test_a_codec_without_kernels_has_none(make):
  """Neither to encode nor to decode; and one that chooses has some."""
  kernels = []
  for codec in (make(), make(implementation="xla")):
    x = tiles(codec, 16)
    payload = jax.eval_shape(codec.encode, x)
    decode = functools.partial(codec.decode, like=x)
    texts = lowered(codec.encode, x) + lowered(decode, payload)
    kernels.append(texts.count(KERNEL))
  assert kernels[0] and not kernels[1]
