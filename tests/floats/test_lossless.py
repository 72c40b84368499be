"""Lossless bfloat16: every bit pattern arrives, and a full list is never seen."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import gradcomp
from gradcomp._src.codecs.floats.lossless import Halves
from gradcomp._src.kernels import lossless
from gradcomp.codecs import Lossless
from tests.plugins.slow_cases import slow
from tests.specs import lossless as oracle


def bits(x):
  return np.asarray(x).view(np.uint16)


def test_every_bit_pattern_arrives():
  patterns = np.arange(2**16, dtype=np.uint16).reshape(-1, 8)
  # Others have the same exponent; ones stand beside NaN and infinities.
  power = patterns[:, :1] & 0x7F80
  x = np.where(power == 0x7F80, np.uint16(0x3F80), power).repeat(1024, axis=1)
  x[:, 500:508] = patterns

  @jax.jit
  def roundtrip(x):
    rows = lossless.encode_rows(lossless.numbers(x))
    return jax.lax.bitcast_convert_type(lossless.decode_rows(rows), jnp.uint32)

  came = roundtrip(jnp.uint32(x))
  np.testing.assert_array_equal(came.reshape(x.shape), np.uint32(x) << 16)


def rows_of_all_kinds():
  """Rows of bfloat16: gradients, all patterns, few escapes and many, at both ends."""
  rng = np.random.default_rng(7)
  rows = [rng.standard_normal(1024) * 2.0 ** rng.integers(-20, 20) for _ in range(20)]
  for number in range(24):
    rows.append(np.ones(1024))
    places = rng.choice(1024, number, replace=False)
    rows[-1][places] = 2.0 ** -rng.integers(14, 100, number)
  rows += [np.zeros(1024), np.full(1024, np.inf), np.full(1024, 2.0**-130)]
  rows = np.float32(rows).astype(ml_dtypes.bfloat16).view(np.uint16)
  patterns = rng.permutation(2**16).astype(np.uint16).reshape(-1, 1024)
  # NaN and infinities beside numbers of one exponent: these rows are not full.
  own = np.where(rng.random((40, 1024)) < 0.008, patterns[:40] | 0x7F80, 0x3F80)
  return np.concatenate([rows, patterns, np.uint16(own)]).view(ml_dtypes.bfloat16)


def test_rows_are_the_oracles():
  x = rows_of_all_kinds()
  rows = jax.jit(lossless.encode_rows)(lossless.numbers(jnp.uint32(bits(x))))
  expected = oracle.encode(x)
  np.testing.assert_array_equal(rows, expected)
  full = expected[:, -1] == 0xFFFFFFFE
  assert 0.3 < full.mean() < 0.7


def test_wider_numbers_are_rounded_as_the_oracles():
  """But for NaN, of which casts of NumPy keep the sign alone."""
  patterns = np.random.default_rng(8).integers(0, 2**32, 2**16, np.uint32)
  near = np.arange(2**12, dtype=np.uint32) * 0x8000 + 0x3F80_0000  # with all ties
  x = np.concatenate([patterns, near]).view(np.float32)
  x = np.where(np.isnan(x), np.float32(0), x)
  rows = lossless.encode_rows(jnp.asarray(x))
  np.testing.assert_array_equal(rows, oracle.encode(x))


@pytest.mark.parametrize("small", [10, 11])
def test_a_row_lists_ten_escapes(small):
  x = np.ones(1024, ml_dtypes.bfloat16)
  x[7 : 7 + small] = 2.0**-14
  came = jax.jit(Lossless().roundtrip)(x)
  if small == 10:
    np.testing.assert_array_equal(bits(came), bits(x))
  else:
    assert np.isnan(np.float32(came)).all()


def gradients(workers, *, wide):
  """Each worker's; those of the last do not fit its lists if they are wide."""
  rng = np.random.default_rng(workers)
  x = rng.standard_normal((workers, 5000)).astype(np.float32)
  if wide:
    x[-1, :600] *= 2.0 ** rng.integers(-30, 0, 600)
  b = np.ones((workers, 3), ml_dtypes.bfloat16)
  return {"w": x.astype(ml_dtypes.bfloat16), "b": b}


def two_steps(codec, exchange, grads):
  options = dict(feedback=None, exchange=exchange, min_leaf_size=0)
  tx = gradcomp.compress(codec, axis_name="data", **options)
  state = tx.init(grads)
  for _ in range(2):
    updates, state = tx.update(grads, state)
  return updates


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
  "exchange, typed",
  [
    ("two_shot", True),
    *slow(("two_shot", False), ("all_gather", True), ("ring", True)),
  ],
)
def test_the_mean_is_that_of_plain_words(exchange, wide, typed):
  """Also where one worker's lists are full."""
  mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
  grads = gradients(4, wide=wide)
  full = np.isnan(np.float32(jax.vmap(Lossless().roundtrip)(grads["w"]))).any()
  assert full == wide

  def mean(codec):
    own = lambda x: two_steps(codec, exchange, jax.tree.map(lambda x: x[0], x))
    specs = dict(in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
    mapped = jax.shard_map(own, mesh=mesh, check_vma=typed, **specs)
    return jax.jit(mapped)(grads)

  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)),
    mean(Lossless()),
    mean(Halves()),
  )


@pytest.mark.parametrize("codec", slow(Lossless()), ids=repr)
def test_the_laws_of_codecs_hold(codec):
  gradcomp.testing.check_codec(codec)


def test_explain_shows_the_usual_step():
  tx = gradcomp.compress(Lossless(), axis_name="data", feedback=None)
  grads = {"w": jnp.ones((64, 64), jnp.bfloat16)}
  shown = str(gradcomp.explain(tx, grads, workers=4))
  assert "12.38" in shown
  assert "Halves" not in shown
