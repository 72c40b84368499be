"""Mosaic kernels lower without a GPU and, interpreted, give the reference's bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp._src.kernels import one_bit
from gradcomp._src.kernels.common import dithers, planes
from gradcomp._src.kernels.quantize import mosaic, qsgd, reference
from tests.plugins.slow_cases import slow
from tests.support import laws

plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")

needs_interpreter = pytest.mark.skipif(
  not hasattr(plgpu, "InterpretGPUParams"),
  reason="this version of JAX does not interpret Mosaic GPU kernels",
)

WIDTHS = [
  (1, "uniform"),
  (2, "sign_magnitude"),
  (3, "sign_magnitude"),
  (4, "uniform"),
  (4, "sign_magnitude"),
  (8, "sign_magnitude"),
  (16, "sign_magnitude"),
]


def lowered(f, *args):
  return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def values(size, bucket_size):
  """Normal values, a bucket of zeros, one of a constant, an infinity and a NaN."""
  x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
  x[:bucket_size] = 0
  x[bucket_size : 2 * bucket_size] = -0.1
  x[-1], x[-bucket_size - 1] = np.nan, -np.inf
  return jnp.asarray(x)


def assert_same(got, want):
  np.testing.assert_array_equal(np.asarray(got[0]), np.asarray(want[0]))
  np.testing.assert_array_equal(np.asarray(got[1]), np.asarray(want[1]))


@pytest.mark.parametrize("columns", ["inside", *slow("one", "each")])
@pytest.mark.parametrize(
  "bits, levels",
  [
    pytest.param(*width, marks=() if width[0] == 4 else pytest.mark.slow)
    for width in WIDTHS
  ],
)
def test_qsgd_lowers_for_cuda(bits, levels, columns):
  count = planes.planes_per_word(bits)
  x = jax.ShapeDtypeStruct((2 * count * 512 + 5,), jnp.float32)
  each = {"inside": 0, "one": 1, "each": count}[columns]
  scale = jax.ShapeDtypeStruct((3, each), jnp.float32) if each else None
  # Both ways with each width, and with each kind of scale.
  keep = (bits + each) % 2 == 0
  dither = dithers.dither(laws.KEY, 3)
  for drawn in (None, dither) if bits == 4 else (dither if keep else None,):
    form = qsgd.Form(bits=bits, bucket_size=512, levels=levels, keep=keep)
    encode = functools.partial(mosaic.encode_rows, form=form)
    assert "mosaic_gpu" in lowered(encode, x, scale, drawn)


@pytest.mark.parametrize(
  "bucket_size, keep",
  [
    (128, True),
    *slow((128, False), (512, False), (512, True)),
  ],
)
def test_one_bit_lowers_for_cuda(bucket_size, keep):
  x = jax.ShapeDtypeStruct((65 * bucket_size,), jnp.float32)
  form = one_bit.Form(bucket_size, keep)
  encode = functools.partial(one_bit.mosaic.encode_rows, form=form)
  assert "mosaic_gpu" in lowered(encode, x)


@needs_interpreter
@pytest.mark.parametrize(
  "bits, levels, columns",
  [
    *[(*width, "inside") for width in WIDTHS],
    *[(bits, "uniform", columns) for bits in (8, 16) for columns in ("one", "each")],
  ],
)
def test_qsgd_gives_the_bits_of_the_reference(bits, levels, columns):
  count, bucket_size = planes.planes_per_word(bits), 512 if bits == 16 else 128
  x = values(count * bucket_size * (1 if bits == 1 else 2) + 77, bucket_size)
  scale = None
  if columns != "inside":
    scale = jnp.abs(values(3 * count, 2)).reshape(3, count)
    scale = scale[:, :1] if columns == "one" else scale
  form = qsgd.Form(bits=bits, bucket_size=bucket_size, levels=levels, keep=True)
  drawn = None if columns == "one" else dithers.dither(laws.KEY, 3)
  interpret = plgpu.InterpretGPUParams()
  kernel = functools.partial(mosaic.encode_rows, interpret=interpret, form=form)
  found = jax.jit(kernel)(x, scale, drawn)
  expected = functools.partial(reference.encode_rows, form=form)
  assert_same(found, jax.jit(expected)(x, scale, drawn))


@needs_interpreter
def test_one_bit_gives_the_signs_of_the_reference_and_nearly_its_means():
  bucket_size = 128
  x = values(33 * bucket_size + 77, bucket_size)
  form = one_bit.Form(bucket_size, keep=True)
  interpret = plgpu.InterpretGPUParams()
  kernel = functools.partial(one_bit.mosaic.encode_rows, interpret=interpret, form=form)
  rows, residual = jax.jit(kernel)(x)
  want, _ = jax.jit(functools.partial(one_bit.reference.encode_rows, form=form))(x)
  words, means = np.split(np.asarray(rows), [bucket_size], axis=1)
  want_words, want_means = np.split(np.asarray(want), [bucket_size], axis=1)
  np.testing.assert_array_equal(words, want_words)
  bound = (bucket_size / 128 + 40) * 2.0**-24  # says one_bit/mosaic.py
  np.testing.assert_allclose(
    means.view(np.float32), want_means.view(np.float32), rtol=bound, atol=0
  )
  sent = one_bit.decode_rows(rows, bucket_size).reshape(-1)[: x.size]
  np.testing.assert_array_equal(np.asarray(residual), np.asarray(x - sent))


REFUSED = [
  (64 * 32, 64, "powers of two from 128"),
  (192 * 32, 192, "powers of two from 128"),
  (4096 * 32, 4096, "powers of two from 128"),
  (1024 * 32, 1024, "at most 16384 elements"),
  (128 * 32 - 1, 128, "at least one tile"),
]


@pytest.mark.parametrize("size, bucket_size, rule", REFUSED)
def test_sizes_without_a_kernel_are_refused(size, bucket_size, rule):
  with pytest.raises(ValueError, match=rule):
    form = one_bit.Form(bucket_size)
    one_bit.encode_rows(jnp.zeros(size), form=form, implementation="mosaic")
  with pytest.raises(ValueError, match=rule):
    form = qsgd.Form(bits=1, bucket_size=bucket_size, levels="uniform")
    x = jnp.zeros(size)
    qsgd.encode_rows(x, None, None, form=form, implementation="mosaic")


@pytest.mark.parametrize("implementation", [None, "mosaic"])
def test_only_its_name_selects_it_and_only_where_it_runs(implementation, monkeypatch):
  called = []

  def encode(*args, **kwargs):
    called.append(args)
    return one_bit.reference.encode_rows(*args, **kwargs)

  monkeypatch.setattr(one_bit.mosaic, "encode_rows", encode)
  x = jnp.zeros(4096)
  if implementation is None:
    jax.eval_shape(functools.partial(one_bit.encode_rows, form=one_bit.Form(128)), x)
  elif jax.default_backend() != "gpu":
    with pytest.raises(ValueError, match="needs a GPU"):
      one_bit.encode_rows(x, form=one_bit.Form(128), implementation="mosaic")
  assert not called


def test_types_of_shard_map_pass_through():
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((2,), ("data",), auto, devices=jax.devices("cpu")[:2])
  spec = jax.sharding.PartitionSpec("data")
  form = one_bit.Form(128, keep=True)
  encode = functools.partial(one_bit.mosaic.encode_rows, form=form)
  f = jax.shard_map(encode, mesh=mesh, in_specs=spec, out_specs=(spec, spec))
  rows, residual = jax.eval_shape(f, jnp.zeros(2 * 4096))
  assert rows.shape == (2, 128 + 64) and residual.shape == (2 * 4096,)
