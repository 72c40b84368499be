"""Steps that Lossless sends again: they have the bits of plain words everywhere."""

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
from gradcomp._src.testing.modes import lowered as lowered_step
from gradcomp.codecs import Dense, Lossless
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits, says


def wide(x, count=600):
  """The array, with more exponents in its first row than a list holds."""
  x = np.array(x)
  x.flat[:count] *= (2.0 ** -np.arange(count).clip(0, 60)).astype(x.dtype)
  return x


roundtrips = jax.jit(jax.vmap(Lossless().roundtrip))


def gradients(workers, steps, *, full, dtype=ml_dtypes.bfloat16):
  """Each worker's, ``[N, ...]``; in the second step the last's lists are full, or not.

  The leaves of 9000 are cut into messages elsewhere at 12 bits than at 16.
  """
  rng = np.random.default_rng(workers)
  draw = lambda n: rng.standard_normal((workers, n)).astype(dtype)
  trees = [{"a": draw(9000), "b": draw(9000), "c": draw(40)} for _ in range(steps)]
  if full:
    trees[1]["a"][-1] = wide(trees[1]["a"][-1])
    found = np.isnan(np.float32(roundtrips(trees[1]["a"]))).any(axis=1)
    assert found.tolist() == [False] * (workers - 1) + [True]
  return trees


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
  "mode, workers, exchange",
  [
    ("shard_map", 2, "all_gather"),
    ("shard_map", 4, "two_shot"),
    *slow(
      *[("shard_map", n, x) for n in (2, 8) for x in ("two_shot", "ring")],
      *[
        (mode, 4, exchange)
        for mode in ("shard_map_unchecked", "pmap", "vmap", "auto", "explicit")
        for exchange in ("all_gather", "two_shot", "ring", "hierarchical")
      ],
      ("shard_map", 8, "hierarchical"),
    ),
  ],
)
def test_a_step_has_the_bits_of_plain_words(mode, workers, exchange, full):
  """Its mean and its state, also where one worker's lists are full in one step."""
  given = gradients(workers, 3, full=full)
  where = modes.grouped(exchange)
  options = dict(axis_name="data", exchange=where, feedback=None, min_leaf_size=0)
  runs = [
    modes.run_with_state(mode, gradcomp.compress(codec, **options), given)
    for codec in (Lossless(), Halves())
  ]
  assert_same_bits(*runs)


@pytest.mark.parametrize(
  "mode", ["shard_map_unchecked", *slow("shard_map", "auto", "explicit", "vmap")]
)
@pytest.mark.parametrize("limits", [(31_000, 41_000), (15_000, 19_000)])
def test_a_repeat_sends_the_same_messages(mode, limits):
  """A plan of its own bytes would have other owners. Two leaves are one, or two."""
  given = gradients(4, 3, full=True, dtype=np.float32)
  options = dict(axis_name="data", feedback="error", exchange="two_shot")
  cut = gradcomp.compress(Lossless(), message_bytes=limits[0], **options)
  apart = gradcomp.compress(Halves(), message_bytes=limits[1], **options)
  runs = [modes.run_with_state(mode, tx, given) for tx in (cut, apart)]
  assert_same_bits(*runs)


def in_two_axes(tx, x, typed=True):
  """The mean over ``data`` of ``x[data, model]``, which differs over ``model``."""
  mesh = jax.make_mesh(x.shape[:2], ("data", "model"), axis_types=(AxisType.Auto,) * 2)

  def step(x):
    own = {"w": x[0, 0]}
    return tx.update(own, tx.init(own))[0]["w"][None]

  places = dict(in_specs=P("data", "model"), out_specs=P("model"), check_vma=typed)
  return jax.jit(jax.shard_map(step, mesh=mesh, **places)).lower(x)


@pytest.mark.parametrize("typed", [True, *slow(False)])
@pytest.mark.parametrize("exchange", ["ring", *slow("two_shot", "all_gather")])
def test_devices_of_other_axes_take_the_same_branch(exchange, typed):
  """They ask each other, or a permutation would wait for those that repeat nothing."""
  x = np.random.default_rng(0).standard_normal((2, 2, 5000)).astype(ml_dtypes.bfloat16)
  x[1, 1] = wide(x[1, 1])
  options = dict(axis_name="data", exchange=exchange, feedback=None, min_leaf_size=0)
  steps = [
    in_two_axes(gradcomp.compress(codec, **options), x, typed)
    for codec in (Lossless(), Halves())
  ]
  asked = [
    c
    for c in gradcomp.wire_report(steps[0]).collectives
    if REPEAT in c.scope and c.kind == "all-reduce"
  ]
  assert asked
  assert_same_bits(*[step.compile()(x) for step in steps])


def test_workers_alone_ask_nobody():
  tx = gradcomp.compress(Lossless(), axis_name="data", exchange="all_gather")
  params = {"w": jnp.ones(5000, jnp.bfloat16)}
  lowered = lowered_step(tx, params, axis_name="data", workers=2)
  kinds = [c.kind for c in gradcomp.wire_report(lowered).collectives]
  assert kinds == ["all-gather"] * 2


def exchanges(codec):
  """Functions of one worker's array, ``[4096]``, that send it over ``data``."""
  given = dict(axis_name="data", codec=codec)
  pairs = [(i, (i + 1) % 4) for i in range(4)]

  def gathered(x):
    residual = parallel.gather_residual(x, axis_name="data")
    way = dict(axis_name="data", params=codec, grads=codec)
    weight = lambda x, residual: parallel.gather(x, residual=residual, **way)
    whole, pull = jax.vjp(weight, x, residual)
    return whole, pull(jnp.tile(x, 4) * (1 + jax.lax.axis_index("data")))

  return {
    "all_gather": functools.partial(parallel.all_gather, **given),
    "psum": functools.partial(parallel.psum, **given),
    "psum_scatter": functools.partial(parallel.psum_scatter, **given),
    "ppermute": functools.partial(parallel.ppermute, perm=pairs, **given),
    "all_to_all": functools.partial(
      parallel.all_to_all, split_axis=0, concat_axis=0, **given
    ),
    "gather": gathered,
    "reshard": lambda x: parallel.reshard(x, residual=jnp.zeros_like(x), **given),
  }


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("typed", [True, *slow(False)])
@pytest.mark.parametrize(
  "name",
  ["gather", "ppermute"]
  + slow("all_gather", "psum", "psum_scatter", "all_to_all", "reshard"),
)
def test_collectives_of_models_have_the_bits_of_plain_words(name, typed, full):
  x = np.random.default_rng(0).standard_normal((4, 4096)).astype(np.float32)
  if full:
    x[2] = wide(x[2])
  assert np.isnan(roundtrips(x)).any() == full
  mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

  def mapped(codec):
    function = exchanges(codec)[name]
    own = lambda x: jax.tree.map(lambda y: y[None], function(x[0]))
    places = dict(in_specs=P("data"), out_specs=P("data"), check_vma=typed)
    return jax.tree.leaves(jax.jit(jax.shard_map(own, mesh=mesh, **places))(x))

  found = mapped(Lossless())
  assert_same_bits(found, mapped(Halves()))
  assert all(np.isfinite(x).all() for x in found)


@pytest.mark.parametrize("part", ["grads", "params"])
def test_zero_has_the_bits_of_plain_words(part):
  """The list of a gradient, or of an update, is full."""
  given = gradients(4, 3, full=True, dtype=np.float32)
  if part == "params":
    given[1]["a"] = np.stack([wide(x, 9000) for x in given[1]["a"]])

  def run(codec):
    codecs = {"grads": Dense(), "params": Dense()} | {part: codec}
    tx = parallel.zero(optax.sgd(1.0), axis_name="data", min_leaf_size=0, **codecs)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    params = jax.tree.map(lambda x: np.zeros_like(x[0]), given[0])
    with jax.set_mesh(mesh):
      state = tx.init(params)
    specs = gradcomp.state_specs(state, axis_name="data")

    places = dict(in_specs=(P("data"), specs, P()), out_specs=(P(), specs))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, **places)
    def step(gradient, state, params):
      own = jax.tree.map(lambda x: x[0], gradient)
      updates, state = tx.update(own, state, params)
      return optax.apply_updates(params, updates), state

    for gradient in given:
      params, state = step(gradient, state, params)
    return jax.tree.leaves((params, state))

  found = run(Lossless())
  assert_same_bits(found, run(Halves()))
  assert all(np.isfinite(np.float32(x)).all() for x in found)


def test_scans_refuse_it():
  body = lambda x, w: (w * x, None)
  scan = functools.partial(parallel.scan, body, axis_name="data", codec=Lossless())
  ones = lambda *shape: np.ones(shape, np.float32)
  grad = lambda w: jax.grad(lambda w: scan(ones(1024), w)[0].sum())(w)
  with pytest.raises(ValueError, match=says("must send any numbers at once")):
    jax.vmap(grad, in_axes=None, axis_size=2, axis_name="data")(ones(2, 1024))
  codecs = dict(axis_name="data", params=Lossless(), grads=Lossless())
  shards = functools.partial(parallel.scan_shards, body, ones(4), **codecs)
  with pytest.raises(ValueError, match=says("must send any numbers at once")):
    jax.vmap(shards, axis_name="data")(ones(2, 3, 2))
