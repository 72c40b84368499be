"""Lossless bfloat16: every bit pattern arrives, and a full list is never seen."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp import parallel
from gradcomp._src.codecs.floats.lossless import Halves
from gradcomp._src.exchange.collectives import REPEAT
from gradcomp._src.kernels import lossless
from gradcomp._src.testing.modes import lowered as lowered_step
from gradcomp.codecs import Dense, Lossless
from tests.plugins.slow_cases import slow
from tests.specs import lossless as oracle
from tests.support import laws, modes
from tests.support.assertions import assert_same_bits, says
from tests.support.cases import zero as cases

encode_rows = jax.jit(lossless.encode_rows)
roundtrip = jax.jit(Lossless().roundtrip)
roundtrips = jax.jit(jax.vmap(Lossless().roundtrip))


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
  """Wider numbers are rounded. Of NaN, casts of NumPy keep the sign alone."""
  x = rows_of_all_kinds()
  expected = oracle.encode(x)
  rows = encode_rows(jax.jit(lossless.numbers)(np.uint32(x.view(np.uint16))))
  np.testing.assert_array_equal(rows, expected)
  assert 0.3 < (expected[:, -1] == 0xFFFFFFFE).mean() < 0.7  # of the rows are full
  patterns = np.random.default_rng(8).integers(0, 2**32, 2**16, np.uint32)
  near = np.arange(2**12, dtype=np.uint32) * 0x8000 + 0x3F80_0000  # with all ties
  x = np.concatenate([patterns, near]).view(np.float32)
  x = np.where(np.isnan(x), np.float32(0), x)
  np.testing.assert_array_equal(encode_rows(x), oracle.encode(x))


def test_a_row_lists_ten_escapes():
  for count in (10, 11):
    x = np.ones(1024, ml_dtypes.bfloat16)
    x[7 : 7 + count] = 2.0**-14
    expected = np.float32(x) if count == 10 else np.full(1024, np.nan)
    np.testing.assert_array_equal(np.asarray(roundtrip(x), np.float32), expected)


# A step that does not fit is sent again as plain words, and has their bits everywhere.


def wide(x, count=600):
  """The array, with more exponents in its first row than a list holds."""
  x = np.array(x)
  x.flat[:count] *= (2.0 ** -np.arange(count).clip(0, 60)).astype(x.dtype)
  return x


def gradients(workers, dtype=ml_dtypes.bfloat16):
  """Each worker's of three steps; in the second the lists of the last are full."""
  rng = np.random.default_rng(workers)
  draw = lambda n: rng.standard_normal((workers, n)).astype(dtype)
  trees = [{"a": draw(9000), "b": draw(9000), "c": draw(40)} for _ in range(3)]
  trees[1]["a"][-1] = wide(trees[1]["a"][-1])
  found = np.isnan(np.float32(roundtrips(trees[1]["a"]))).any(axis=1)
  assert found.tolist() == [False] * (workers - 1) + [True]
  return trees


# Two of every run, and each place and each exchange twice.
PLACES = [("shard_map", 2, "all_gather"), ("shard_map", 4, "two_shot")]
PLACES += slow(
  *(("shard_map", 8, "hierarchical"), ("shard_map_unchecked", 4, "all_gather")),
  *(("shard_map_unchecked", 2, "ring"), ("pmap", 4, "two_shot"), ("pmap", 8, "ring")),
  *(("vmap", 4, "hierarchical"), ("vmap", 2, "two_shot"), ("auto", 4, "ring")),
  *(("auto", 2, "all_gather"), ("explicit", 8, "two_shot")),
  ("explicit", 4, "hierarchical"),
)


@pytest.mark.parametrize("mode, workers, exchange", PLACES)
def test_a_step_has_the_bits_of_plain_words(mode, workers, exchange):
  """Its mean and its state, also where one worker's lists are full in one step."""
  txs = [laws.compressed(x, exchange, min_leaf_size=0) for x in (Lossless(), Halves())]
  given = gradients(workers)
  assert_same_bits(*[modes.run_with_state(mode, tx, given) for tx in txs])


@pytest.mark.parametrize(
  "mode", ["shard_map_unchecked", *slow("shard_map", "auto", "explicit", "vmap")]
)
@pytest.mark.parametrize("limits", [(31_000, 41_000), (15_000, 19_000)])
def test_a_repeat_sends_the_same_messages(mode, limits):
  """A plan of its own bytes would have other owners. Two leaves are one, or two."""
  make = lambda x, n: laws.compressed(x, "two_shot", "error", message_bytes=n)
  txs, given = map(make, (Lossless(), Halves()), limits), gradients(4, np.float32)
  assert_same_bits(*[modes.run_with_state(mode, tx, given) for tx in txs])


@pytest.mark.parametrize("typed", [True, *slow(False)])
@pytest.mark.parametrize("exchange", ["ring", *slow("two_shot", "all_gather")])
def test_devices_of_other_axes_take_the_same_branch(exchange, typed):
  """They ask each other, or a permutation would wait for those that repeat nothing."""
  x = np.random.default_rng(0).standard_normal((2, 2, 5000)).astype(ml_dtypes.bfloat16)
  x[1, 1] = wide(x[1, 1])
  mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  places = dict(in_specs=P("data", "model"), out_specs=P("model"), check_vma=typed)

  def lowered(codec):
    tx = laws.compressed(codec, exchange, min_leaf_size=0)
    step = lambda x: tx.update(x[0], tx.init(x[0]))[0]
    return jax.jit(jax.shard_map(step, mesh=mesh, **places)).lower(x)

  steps = lowered(Lossless()), lowered(Halves())
  sent = gradcomp.wire_report(steps[0]).collectives
  assert [c for c in sent if REPEAT in c.scope and c.kind == "all-reduce"]
  assert_same_bits(*[step.compile()(x) for step in steps])


def test_workers_alone_ask_nobody_and_explain_shows_the_usual_step():
  tx = gradcomp.compress(Lossless(), axis_name="data", exchange="all_gather")
  params = {"w": jnp.ones(5000, jnp.bfloat16)}
  lowered = lowered_step(tx, params, axis_name="data", workers=2)
  kinds = [c.kind for c in gradcomp.wire_report(lowered).collectives]
  assert kinds == ["all-gather"] * 2
  shown = str(gradcomp.explain(tx, {"w": jnp.ones((64, 64), jnp.bfloat16)}, workers=4))
  assert "12.38" in shown and "Halves" not in shown


def collectives(codec, x):
  """What one worker gets of each collective of ``float32[4096]`` over ``data``."""
  given, both = dict(axis_name="data", codec=codec), dict(params=codec, grads=codec)
  ring = [(i, (i + 1) % 4) for i in range(4)]
  residual = parallel.gather_residual(x, axis_name="data")
  weight = functools.partial(parallel.gather, axis_name="data", **both)
  whole, pull = jax.vjp(lambda x, own: weight(x, residual=own), x, residual)
  return {
    "gather": (whole, pull(jnp.tile(x, 4) * (1 + jax.lax.axis_index("data")))),
    "all_gather": parallel.all_gather(x, **given),
    "psum": parallel.psum(x, **given),
    "psum_scatter": parallel.psum_scatter(x, **given),
    "ppermute": parallel.ppermute(x, perm=ring, **given),
    "all_to_all": parallel.all_to_all(x, split_axis=0, concat_axis=0, **given),
    "reshard": parallel.reshard(x, residual=jnp.zeros_like(x), **given),
  }


@pytest.mark.parametrize("typed", [True, *slow(False)])
def test_collectives_of_models_have_the_bits_of_plain_words(typed):
  narrow = np.random.default_rng(0).standard_normal((4, 4096)).astype(np.float32)
  full = narrow.copy()
  full[2] = wide(full[2])
  assert np.isnan(roundtrips(full)).any() and not np.isnan(roundtrips(narrow)).any()
  mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
  places = dict(in_specs=P("data"), out_specs=P("data"), check_vma=typed)

  def mapped(codec):
    own = lambda x: jax.tree.map(lambda y: y[None], collectives(codec, x[0]))
    program = jax.jit(jax.shard_map(own, mesh=mesh, **places))
    return jax.device_get([program(x) for x in (narrow, full)])

  found = mapped(Lossless())
  assert_same_bits(found, mapped(Halves()))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


@pytest.mark.parametrize("part", ["grads", "params"])
def test_zero_has_the_bits_of_plain_words(part):
  """The list of a gradient, or of an update, is full."""
  given = gradients(4, np.float32)
  if part == "params":
    given[1]["a"] = np.stack([wide(x, 9000) for x in given[1]["a"]])

  def run(codec):
    codecs = {"grads": Dense(), "params": Dense()} | {part: codec}
    tx = parallel.zero(optax.sgd(1.0), axis_name="data", min_leaf_size=0, **codecs)
    params = jax.tree.map(lambda x: np.zeros_like(x[0]), given[0])
    return cases.last("shard_map", tx, params, given)

  found = run(Lossless())
  assert_same_bits(found, run(Halves()))
  assert all(np.isfinite(np.float32(x)).all() for x in jax.tree.leaves(found))


def test_scans_refuse_it():
  body = lambda x, w: (w * x, None)
  scan = functools.partial(parallel.scan, body, axis_name="data", codec=Lossless())
  ones = lambda *shape: np.ones(shape, np.float32)
  grad = jax.grad(lambda w: scan(ones(1024), w)[0].sum())
  shards = functools.partial(scan, ones(4), params=Lossless(), axis=0)
  for call, x in ((grad, ones(2, 2, 1024)), (shards, ones(2, 3, 2))):
    with pytest.raises(ValueError, match=says("must send all numbers the first time")):
      jax.vmap(call, axis_name="data")(x)
