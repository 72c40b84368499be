"""Owners round means to nearest, and send what that loses with the next mean."""

import dataclasses
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import QSGD, Dense, EightBit, Natural, OneBit, Ternary
from gradcomp.exchange import Auto, Hierarchical, TwoShot
from tests.support import laws, modes
from tests.support.cases import recipe

WORKERS = 3
FOUR_BITS = QSGD(bits=4, bucket_size=32)


def steps(count, size=1100, workers=WORKERS):
  given = laws.gaussian((count, workers, size), seed=count)
  return [{"w": jnp.asarray(step)} for step in given]


def transformation(codec, exchange, feedback=None):
  return laws.compressed(codec, exchange, feedback, min_leaf_size=0)


def run(codec, exchange, given, feedback=None):
  """Each step's mean, and the arrays that owners keep behind the last one."""
  tx = transformation(codec, exchange, feedback)
  outputs, _, owned = modes.run_all("vmap", tx, given)
  owned = [np.asarray(x) for arrays in (owned or {}).values() for x in arrays]
  return np.stack([np.asarray(out["w"][0]) for out in outputs]), owned


def started(tx, params):
  """The shapes of the state that is made inside a map."""
  return jax.eval_shape(jax.vmap(tx.init, axis_name="data"), params)


def test_owners_round_at_random_what_would_all_be_zeros():
  """An l2 norm with few levels: to nearest, no element of a mean would ever be sent."""
  codec = QSGD(bits=2, bucket_size=128, norm="l2")
  assert codec.to_nearest() == codec
  means, owned = run(codec, "two_shot", steps(2))
  assert not owned
  assert np.all(np.any(means, axis=1))


def test_a_step_has_half_the_error():
  """Relative to the mean's square, of 8 workers; 0.073 with random draws."""
  given = steps(1, size=2**19, workers=8)
  mean = np.asarray(given[0]["w"]).mean(axis=0)
  (output,), _ = run(QSGD(bits=4), "two_shot", given)
  assert np.square(output - mean).sum() / np.square(mean).sum() <= 0.037


def test_one_bit_stays_random_and_keeps_nothing_without_feedback():
  """To nearest it has no value near zero, and random errors would add up."""
  given = steps(2)
  codec = QSGD(bits=1, bucket_size=32, levels="uniform")
  output, kept = run(codec, "two_shot", given)
  forgotten, _ = run(codec, TwoShot(feedback=False), given)
  assert not kept
  np.testing.assert_array_equal(output, forgotten)
  _, kept = run(codec, "two_shot", given, feedback="error")
  assert kept


LOSSY = OneBit(), QSGD(rounding="nearest"), Dense(dtype=jnp.bfloat16)


@pytest.mark.parametrize("codec", [*LOSSY, Dense(), Ternary()], ids=laws.name)
@pytest.mark.parametrize("exchange", [TwoShot(), Hierarchical(group_size=1)])
def test_owners_keep_where_something_is_lost(exchange, codec):
  if codec == Ternary() and isinstance(exchange, Hierarchical):
    return  # which is refused
  state = started(transformation(codec, exchange), jnp.zeros((WORKERS, 2048)))
  assert bool(state.server_residual) == (codec in LOSSY)


def test_a_state_from_outside_the_map_still_works():
  """Nobody knew the number of workers there: the means are rounded at random."""
  given, params = steps(1), {"w": jnp.zeros(1100)}
  tx = transformation(FOUR_BITS, "two_shot")
  state = tx.init(params)
  assert state.server_residual is None
  update = jax.jit(jax.vmap(tx.update, in_axes=(0, None), axis_name="data"))
  with pytest.warns(UserWarning, match="3 workers of 'data', whose second") as caught:
    output, after = update(given[0], state)
  assert len(caught) == 1
  assert "exchange.TwoShot(feedback=False)" in str(caught[0].message)
  update(given[0], state)  # is traced already
  forgotten, _ = run(FOUR_BITS, TwoShot(feedback=False), given)
  np.testing.assert_array_equal(output["w"][0], forgotten[0])
  assert after.server_residual is None
  explained = gradcomp.explain(tx, params, workers=WORKERS, opt_state=state)
  assert "Owners forget" in str(explained)
  assert explained.forgets
  assert not explained.bytes_kept


def told(tx, params, workers):
  """Returns the warning of an update with a state from outside of the map; traced."""
  state = jax.eval_shape(tx.init, params)
  copied = lambda x: jax.ShapeDtypeStruct((workers, *x.shape), x.dtype)
  update = jax.vmap(tx.update, in_axes=(0, None), axis_name="data")
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
      jax.eval_shape(update, jax.tree.map(copied, params), state)
    except ValueError as error:
      return str(error)
  return "".join(str(x.message) for x in caught)


@pytest.mark.parametrize("name", sorted(recipe.RECIPES))
@pytest.mark.parametrize("exchange", ["auto", "two_shot"])
def test_a_line_is_one_method_or_says_what_is_lost(name, exchange):
  """Wherever ``init`` was called: by an error where workers keep something, too."""
  params = {"w": jnp.zeros((512, 512))}
  try:
    tx = recipe.make(name, axis_name="data", exchange=exchange)
  except ValueError:
    return  # it has no such exchange
  inside = started(tx, {"w": jax.ShapeDtypeStruct((8, 512, 512), jnp.float32)})
  loses = inside.server_residual is not None
  assert ("whose second stage loses" in told(tx, params, 8)) == loses


@pytest.mark.parametrize(
  "exchange", [Auto(), TwoShot(), Hierarchical(group_size=2)], ids=laws.name
)
def test_who_asked_owners_to_forget_is_not_told(exchange):
  """Nor is one worker, who has nobody to send anything to."""
  params = {"w": jnp.zeros((512, 512))}
  make = lambda exchange: gradcomp.qsgd(axis_name="data", exchange=exchange)
  text = told(make(exchange), params, 4)
  assert f"exchange.{type(exchange).__name__}(feedback=False)" in text
  asked = dataclasses.replace(exchange, feedback=False)
  assert not told(make(asked), params, 4)
  if exchange != Hierarchical(group_size=2):
    assert not told(make(exchange), params, 1)


ON_MESH = {
  "compress": gradcomp.qsgd(bits=4, axis_name="data", feedback="error"),
  "zero": gradcomp.parallel.zero(
    optax.adam(0.1), grads=QSGD(bits=4), params=QSGD(bits=4), axis_name="data"
  ),
  "local_steps": gradcomp.local.local_steps(
    optax.sgd(0.1), optax.sgd(0.7), every=2, codec=QSGD(bits=4), axis_name="data"
  ),
}


@pytest.mark.parametrize(
  "name, kind", [*((name, "Auto") for name in ON_MESH), ("compress", "Explicit")]
)
def test_init_counts_the_workers_of_the_mesh_of_its_parameters(name, kind):
  """Without ``jax.set_mesh`` it makes the state that it makes under it."""
  mesh = jax.make_mesh((4,), ("data",), axis_types=(getattr(AxisType, kind),))
  init = optax.chain(ON_MESH[name], optax.scale(1.0)).init
  params = jax.device_put({"w": np.ones((256, 512))}, NamedSharding(mesh, P()))
  with jax.set_mesh(mesh):
    expected = init(params)
  state = init(params)
  chex.assert_trees_all_equal(state, expected)
  places = lambda tree: jax.tree.map(lambda x: x.sharding, tree)
  assert places(state) == places(expected)
  assert jax.sharding.get_abstract_mesh().empty
  # Where JAX traces, no mesh can be set.
  traced = jax.vmap(lambda x: x + ON_MESH["compress"].init(params).count)
  assert not traced(jnp.zeros(2)).any()


def test_explain_counts_what_owners_keep():
  tx = transformation(FOUR_BITS, "two_shot")
  params = {"w": jnp.zeros(1100)}
  state = started(tx, {"w": jnp.zeros((WORKERS, 1100))})
  explained = gradcomp.explain(tx, params, workers=WORKERS)
  (kept,) = state.server_residual[("data",)]
  assert explained.bytes_kept == 4 * kept.size // WORKERS
  assert f"{explained.bytes_kept:,} bytes" in str(explained)
  assert gradcomp.explain(tx, params, workers=WORKERS, opt_state=state) == explained


def test_owners_of_layers_in_a_scan_keep_nothing_without_feedback():
  """No place of ``init`` would change that, and so nothing is advised."""
  params = {"w": jnp.zeros((3, 256, 512))}
  tx = gradcomp.parallel.compress_in_scan(QSGD(bits=4), axis_name="data")
  explained = gradcomp.explain(tx, params, workers=4, opt_state=tx.init(params))
  assert {leaf.exchange for leaf in explained.leaves} == {"two_shot"}
  assert (explained.forgets, explained.bytes_kept) == (False, 0)


def test_a_mean_that_is_not_finite_is_not_kept():
  given = steps(2)
  bad = given[1]["w"].at[1, 40].set(jnp.nan)
  _, (before,) = run(FOUR_BITS, "two_shot", given[:1])
  output, (after,) = run(FOUR_BITS, "two_shot", [given[0], {"w": bad}])
  assert np.isnan(output[1][32:64]).all()
  assert np.isfinite(after).all()
  assert np.array_equal(after.reshape(-1)[32:64], before.reshape(-1)[32:64])
  assert not np.array_equal(after, before)


@pytest.mark.parametrize(
  "codec",
  [
    FOUR_BITS,
    Ternary(bucket_size=32, share_scale=False),
    EightBit(bucket_size=32, rounding="stochastic"),
    Natural(),
    Dense(dtype=jnp.bfloat16, rounding="stochastic"),
  ],
  ids=laws.name,
)
def test_nearest_values_of_negative_numbers_are_negative_ones(codec):
  """Also of numbers in the middle between two values: 14 is seven steps of 4 bits."""
  x = np.random.default_rng(0).integers(-14, 15, codec.tile_size).astype(np.float32)
  trip = lambda x: laws.round_trip(codec.to_nearest(), x, None)
  np.testing.assert_array_equal(trip(-x), -trip(x))


def test_switching_may_leave_what_only_owners_keep():
  """Without feedback. With it, what waits would be lost."""
  dense = gradcomp.dense(axis_name="data")
  first = lambda x: gradcomp.qsgd(axis_name="data", exchange="two_shot", feedback=x)
  make = lambda feedback: gradcomp.wrappers.switch([1], [first(feedback), dense])
  params = jnp.zeros((WORKERS, 2048))
  started(make(None), params)
  with pytest.raises(ValueError, match="must keep the residuals of owners"):
    started(make("error"), params)
