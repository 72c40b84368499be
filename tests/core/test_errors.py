"""Every bad input raises an error that names the argument, the rule and the value.

It names the cure too, where there is one. Messages are for people, so the tests ask for
the parts that a person needs, not for whole sentences.
"""

import contextlib
import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import QSGD, Dense, EightBit, FloatCast, OneBit, Ternary, TopK
from gradcomp.exchange import Auto, Hierarchical, TwoShot
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import says

WORKERS = 4
GRADS = {"w": np.linspace(-1, 1, 8 * 256, dtype=np.float32).reshape(8, 256)}
residual4 = gradcomp.qsgd(bits=4, axis_name="data", feedback="error")


def in_shard_map(f, *args, **options):
  return jax.jit(jax.shard_map(f, mesh=modes.mesh(WORKERS), **options))(*args)


def update_once(tx, grads):
  """``update`` with a state that it made for these gradients."""
  return tx.update(grads, tx.init(grads))[0]


@pytest.mark.parametrize("make", [QSGD, gradcomp.qsgd])
@pytest.mark.parametrize("bits", [0, 9, 17, -1, 4.0, True, None, "4", [4]], ids=repr)
def test_bits(make, bits):
  """A float that equals an integer too: it would fail later, in a shape."""
  with pytest.raises(ValueError, match=says("`bits`", "1 to 8 or 16", repr(bits))):
    make(bits=bits, levels="uniform")


def test_integers_of_numpy_are_integers():
  codec = QSGD(bits=np.int64(4), bucket_size=np.int32(64))
  assert codec == QSGD(bits=4, bucket_size=64)
  assert hash(codec) == hash(QSGD(bits=4, bucket_size=64))


@pytest.mark.parametrize("make", [QSGD, gradcomp.qsgd])
def test_one_bit_has_no_room_for_a_sign(make):
  parts = ("`bits`", "at least 2", "sign_magnitude", "1", 'levels="uniform"')
  with pytest.raises(ValueError, match=says(*parts)):
    make(bits=1)
  make(bits=1, levels="uniform")


@pytest.mark.parametrize("value", ["gossip", "", None, True, ["auto"]], ids=repr)
@pytest.mark.parametrize("make", [gradcomp.qsgd, gradcomp.dense])
def test_exchange(make, value):
  choices = ("auto", "all_gather", "two_shot", "psum", "ring", "hierarchical", "local")
  with pytest.raises(ValueError, match=says("`exchange`", *choices, repr(value))):
    make(exchange=value)


@pytest.mark.parametrize("value", ["none", "", True, False, 1, ["error"]], ids=repr)
@pytest.mark.parametrize("make", [gradcomp.qsgd, gradcomp.dense])
def test_feedback(make, value):
  parts = ("`feedback`", '"auto"', '"error"', "None", repr(value))
  with pytest.raises(ValueError, match=says(*parts)):
    make(feedback=value)


@pytest.mark.parametrize("dtype", [jnp.int8, np.float64, "float8", None, 3], ids=repr)
@pytest.mark.parametrize("make", [Dense, gradcomp.dense])
def test_dense_dtype(make, dtype):
  parts = ("`dtype`", "float32, bfloat16 or float16", repr(dtype))
  with pytest.raises(ValueError, match=says(*parts)):
    make(dtype=dtype)


@pytest.mark.parametrize("size", [-1, 1.5, True, "large"], ids=repr)
def test_min_leaf_size(size):
  with pytest.raises(ValueError, match=says("`min_leaf_size`", repr(size))):
    gradcomp.qsgd(min_leaf_size=size)


@pytest.mark.parametrize("codec", [QSGD, "qsgd", None, 4], ids=repr)
def test_a_codec_is_an_instance(codec):
  """The class has every attribute that is asked for, as a true property object."""
  with pytest.raises(TypeError, match=says("`codec`", repr(codec))):
    gradcomp.compress(codec)


STATIC = ["bits", "bucket_size", "min_leaf_size", "refit_every"]


class TestInjectedHyperparameters(chex.TestCase):
  """inject_hyperparams turns integers into arrays, traced ones under jit."""

  @chex.variants(with_jit=True, without_jit=True)
  def test_those_that_make_shapes_are_static(self):
    for name in STATIC:
      static = set(STATIC) - {name}
      make = optax.inject_hyperparams(gradcomp.qsgd, static_args=static)
      message = says(f"`{name}`", "static_args")
      with self.subTest(name), pytest.raises(ValueError, match=message):
        self.variant(make(min_leaf_size=3).init)(GRADS)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.bool_])
@pytest.mark.parametrize("make", [gradcomp.qsgd, gradcomp.dense])
def test_gradients_that_are_not_floats(make, dtype):
  grads = {"layer": [GRADS["w"], {"ids": jnp.ones(3, dtype)}]}
  parts = ("`updates`['layer'][1]['ids']", "complex float", jnp.dtype(dtype).name)
  with pytest.raises(TypeError, match=says(*parts)):
    update_once(make(), grads)


def test_gradients_of_integers():
  """What jax.grad(..., allow_int=True) returns for a table of indices."""
  grads = jax.grad(lambda p: jnp.sum(p["w"]), allow_int=True)({"w": 1.0, "ids": 2})
  parts = ("`updates`['ids']", "complex float", "float0")
  with pytest.raises(TypeError, match=says(*parts)):
    update_once(gradcomp.qsgd(), grads)


@pytest.mark.parametrize("value", [1.5, 2, True], ids=repr)
@pytest.mark.parametrize("make", [gradcomp.qsgd, gradcomp.wrappers.clip_by_local_norm])
def test_gradients_that_are_no_arrays(make, value):
  tx = make(2)
  state = tx.init({"w": jnp.ones(3), "b": jnp.ones([])})
  parts = ("`updates`['b']", "an array", repr(value), "jnp.asarray")
  with pytest.raises(TypeError, match=says(*parts)):
    tx.update({"w": jnp.ones(3), "b": value}, state)


DIFFERENTIATED = ("`updates`", "differentiated", "no derivative", "stop_gradient")


@pytest.mark.parametrize(
  "codec",
  [
    Dense(),
    QSGD(),
    TopK(density=1 / 2),
    *slow(Dense(dtype=jnp.bfloat16), OneBit(), Ternary(), EightBit(), FloatCast()),
  ],
)
def test_gradients_through_an_update(codec):
  """Zeros for some codecs, and an assertion of Pallas for others, would say nothing."""
  tx = gradcomp.compress(codec, min_leaf_size=0)
  total = lambda x: jnp.sum(update_once(tx, {"w": x})["w"])
  x = jax.ShapeDtypeStruct((128,), jnp.float32)
  for transform in (jax.grad, jax.jacfwd, lambda f: jax.grad(jax.jit(f))):
    with pytest.raises(TypeError, match=says(*DIFFERENTIATED)):
      jax.eval_shape(transform(total), x)
  jax.eval_shape(jax.grad(lambda x: total(jax.lax.stop_gradient(x))), x)


@pytest.mark.parametrize("codec", [QSGD(), QSGD(rounding="nearest"), Dense()])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.complex64])
def test_encode_takes_real_floats(codec, dtype):
  parts = ("`x`", "real float", jnp.dtype(dtype).name)
  with pytest.raises(TypeError, match=says(*parts)):
    codec.encode(jnp.ones(3, dtype), key=jax.random.key(0))


def test_stochastic_encode_needs_a_key():
  parts = ("`key`", "stochastic", "jax.random.key(", 'rounding="nearest"')
  with pytest.raises(ValueError, match=says(*parts)):
    QSGD().encode(jnp.ones(3))
  QSGD(rounding="nearest").encode(jnp.ones(3))


def test_key_that_lacks_for_1_bit():
  """The cure works; without the norm "rms" all elements would be the largest."""
  codec = QSGD(bits=1, levels="uniform")
  parts = ("`key`", "stochastic", 'choose norm="rms" and rounding="nearest"')
  with pytest.raises(ValueError, match=says(*parts)):
    codec.encode(jnp.ones(3))
  dataclasses.replace(codec, norm="rms", rounding="nearest").encode(jnp.ones(3))
  with pytest.raises(ValueError, match=r"random.key\(seed\)\.$"):
    gradcomp.codecs.RandomK(density=0.5).encode(jnp.ones(3))


WRONG_KEYS = {
  "rbg": (lambda: jax.random.key(0, impl="rbg"), "uint32[4]"),
  "batch": (lambda: jax.random.split(jax.random.key(0)), "uint32[2, 2]"),
  "signed": (lambda: jnp.zeros(2, jnp.int32), "int32[2]"),
  "float": (lambda: jnp.float32(1.5), "float32[]"),
  "vector": (lambda: np.arange(3, dtype=np.uint32), "uint32[3]"),
}


@pytest.mark.parametrize("name", WRONG_KEYS)
def test_keys_are_one_threefry_key(name):
  make, value = WRONG_KEYS[name]
  parts = ("`key`", "threefry2x32", value, 'impl="threefry2x32"')
  with pytest.raises(ValueError, match=says(*parts)):
    QSGD().encode(jnp.ones(3), key=make())
  with pytest.raises(ValueError, match=says(*parts)):
    gradcomp.qsgd(key=make()).init(GRADS)


@pytest.mark.parametrize("seed", [0, 2**31, 2**32 - 1, -1])
def test_seeds_are_what_jax_takes(seed):
  expected = jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))
  np.testing.assert_array_equal(gradcomp.qsgd(key=seed).init(GRADS).key, expected)


UNBOUND = ("`axis_name`", "jax.shard_map, jax.pmap or jax.vmap", "'data'", "not bound")


def test_unbound_axis():
  cures = ("make_train_step", "jax.set_mesh(jax.make_mesh(...))", "axis_name=None")
  parts = (*UNBOUND, *cures)
  with pytest.raises(ValueError, match=says(*parts)):
    update_once(residual4, GRADS)
  with pytest.raises(ValueError, match=says(*UNBOUND)):
    gradcomp.defer_reduction(GRADS, axis_name="data")
  with pytest.raises(ValueError, match=says(*parts)):
    gradcomp.value_and_grad(jnp.sum, axis_name="data")(GRADS["w"])
  another = jax.vmap(functools.partial(update_once, residual4), axis_name="model")
  with pytest.raises(ValueError, match=says(*UNBOUND)):
    another({"w": GRADS["w"][None]})


def test_a_misspelt_axis_gets_the_names_that_exist():
  grads = jnp.ones((WORKERS, 8))
  parts = ("'date'", "not bound", "('data',)", "name one of these")
  with pytest.raises(ValueError, match=says(*parts)):
    tx = gradcomp.qsgd(axis_name="date")
    in_shard_map(lambda g: update_once(tx, g), grads, in_specs=P("data"), out_specs=P())
  with jax.set_mesh(modes.mesh(WORKERS)), pytest.raises(ValueError, match=says(*parts)):
    gradcomp.value_and_grad(jnp.sum, axis_name="date")(grads)


@pytest.mark.parametrize("set_mesh", [True, False], ids=["set_mesh", "placed"])
def test_auto_axes_in_plain_jit(set_mesh):
  """The mesh that most programs have; the arrays say it if jax.set_mesh does not."""
  mesh = modes.mesh(WORKERS)
  x = jax.device_put(jnp.ones((8, 64)), jax.NamedSharding(mesh, P()))
  function = functools.partial(update_once, residual4)
  parts = (*UNBOUND, "plain jax.jit", "gradcomp.value_and_grad(", "all workers")
  with jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext():
    with pytest.raises(ValueError, match=says(*parts)):
      jax.jit(function)(x)


@pytest.mark.parametrize("mode", ["shard_map", "shard_map_unchecked", "pmap"])
def test_no_axis_name_inside_a_map(mode):
  parts = ("`axis_name`", "('data',)", "None", "axis_name=", 'exchange="local"')
  typed, data = mode == "shard_map", P("data")
  run = lambda f, x: in_shard_map(f, x, in_specs=data, out_specs=data, check_vma=typed)
  if mode == "pmap":
    run = lambda f, x: jax.pmap(f, axis_name="data")(x.reshape(WORKERS, 2, -1))
  with pytest.raises(ValueError, match=says(*parts)):
    run(functools.partial(update_once, gradcomp.qsgd()), GRADS["w"])
  local = functools.partial(update_once, gradcomp.qsgd(exchange="local"))
  assert run(local, GRADS["w"]).size == GRADS["w"].size


def loss_fn(params, batch):
  return jnp.mean((batch @ params["w"]) ** 2)


BATCH = np.ones((8, 8), np.float32)
REDUCED = (
  "`updates`['w']",
  "'data'",
  "jax.grad",
  "already all-reduced",
  "gradcomp.value_and_grad",
  "gradcomp.defer_reduction",
)


@pytest.mark.parametrize("make", [gradcomp.qsgd, gradcomp.dense])
def test_gradients_that_are_reduced_already(make):
  tx = optax.chain(make(axis_name="data"), optax.sgd(0.1))

  def step(params, batch):
    return tx.update(jax.grad(loss_fn)(params, batch), tx.init(params))[0]

  with pytest.raises(ValueError, match=says(*REDUCED)):
    in_shard_map(step, GRADS, BATCH, in_specs=(P(), P("data")), out_specs=P())


@pytest.mark.parametrize("cure", ["value_and_grad", "defer_reduction"])
def test_the_cures_of_reduced_gradients(cure):
  def step(params, batch):
    if cure == "value_and_grad":
      _, grads = gradcomp.value_and_grad(loss_fn, axis_name="data")(params, batch)
    else:
      grads = jax.grad(loss_fn)(
        gradcomp.defer_reduction(params, axis_name="data"), batch
      )
    return update_once(residual4, grads)

  in_shard_map(step, GRADS, BATCH, in_specs=(P(), P("data")), out_specs=P())


RESIDUAL = ("`state.residual`['w']", "(8, 256)", "(2, 256)", "state_specs", "set_mesh")


def test_state_made_outside_the_mesh():
  """Its residual is one worker's, and is cut as if it were all workers'."""
  state = residual4.init(GRADS)
  specs = gradcomp.state_specs(state, axis_name="data")
  update = lambda grads, state: residual4.update({"w": grads["w"][0]}, state)[0]
  stacked = {"w": np.stack([GRADS["w"]] * WORKERS)}
  with pytest.raises(ValueError, match=says(*RESIDUAL)):
    in_shard_map(update, stacked, state, in_specs=(P("data"), specs), out_specs=P())


def train_step(optimizer=residual4, rows=8, batch=None, mesh=None, axis_name="data"):
  """One step of make_train_step, with a state that was made outside the mesh."""
  params = {"w": jnp.ones((rows, 256))}
  batch = jnp.ones((8, rows)) if batch is None else batch
  step = gradcomp.make_train_step(
    lambda params, batch: loss_fn(params, batch["x"] if type(batch) is dict else batch),
    optimizer,
    axis_name=axis_name,
    mesh=modes.mesh(WORKERS) if mesh is None else mesh,
  )
  return step(params, optimizer.init(params), batch)


@pytest.mark.parametrize("rows", [8, 9])
def test_state_made_outside_the_mesh_of_a_train_step(rows):
  """Whether or not the workers divide the leaf, on which JAX fails by itself."""
  with pytest.raises(ValueError, match=says("residual", "['w']", "set_mesh")):
    train_step(rows=rows)


def test_multi_steps_around_the_exchange_in_a_train_step():
  """Its sums differ between workers; init outside the map cannot make them so."""
  with pytest.raises(ValueError, match="MultiSteps"):
    train_step(optax.MultiSteps(gradcomp.qsgd(axis_name="data"), 2))


dense4 = gradcomp.dense(axis_name="data")
UNSEEN = ("`optimizer`", "equal on all workers", "['w']", "no exchange", "set_to_zero")
WRONG_ORDERS = {
  "apply_if_finite": (
    optax.apply_if_finite(dense4, 5),
    ("`opt_state`", "optax.apply_if_finite", "gradcomp.skip_nonfinite", "behind"),
  ),
  "masked": (optax.masked(dense4, {"w": False}), UNSEEN),
  "none": (optax.identity(), UNSEEN),
}


@pytest.mark.parametrize("name", WRONG_ORDERS)
def test_what_stands_around_the_exchange_or_in_its_place(name):
  optimizer, parts = WRONG_ORDERS[name]
  with pytest.raises(ValueError, match=says(*parts)):
    train_step(optax.chain(optimizer, optax.sgd(0.1)))


@pytest.mark.parametrize("size", [256, 4096])
@pytest.mark.parametrize(
  "codec", [QSGD(), Dense(dtype=jnp.bfloat16)], ids=["qsgd", "bfloat16"]
)
def test_psum_cannot_add_codes(codec, size):
  """A mistake whatever the leaves: 256 elements would travel dense and hide it."""
  parts = ("`exchange`", '"psum"', type(codec).__name__, '"auto"', "gradcomp.dense()")
  with pytest.raises(ValueError, match=says(*parts)):
    tx = gradcomp.compress(codec, axis_name="data", exchange="psum")
    jax.vmap(functools.partial(update_once, tx), axis_name="data")(jnp.ones((2, size)))


def test_state_of_another_feedback():
  """Else feedback would be off, and nobody told. More than is needed is no mistake."""
  state = gradcomp.qsgd(feedback=None).init(GRADS)
  with pytest.raises(
    ValueError, match=says("`state.residual`", "must be kept", "ErrorFeedback")
  ):
    gradcomp.qsgd(feedback="error").update(GRADS, state)
  state = gradcomp.qsgd(feedback="error").init(GRADS)
  gradcomp.qsgd(feedback=None).update(GRADS, state)


@pytest.mark.parametrize(
  "axis_name", [(), 3, ("data", 3), ("data", "data"), ["data"]], ids=repr
)
def test_axis_names_are_names(axis_name):
  with pytest.raises(ValueError, match=says("`axis_name`", "tuple", repr(axis_name))):
    gradcomp.qsgd(axis_name=axis_name)


@pytest.mark.parametrize("exchange", ["ring", "hierarchical"])
def test_partial_sums_have_no_shared_scale(exchange):
  parts = ("`exchange`", exchange, "share_scale=True", '"psum"', "share_scale=False")
  with pytest.raises(ValueError, match=says(*parts)):
    exchange = modes.grouped(exchange)
    gradcomp.qsgd(axis_name="data", share_scale=True, exchange=exchange)


@pytest.mark.parametrize(
  "axis_name, group_size", [("data", None), (("a", "b"), 2), (("a", "b", "c"), None)]
)
def test_hierarchical_needs_groups(axis_name, group_size):
  parts = ("`axis_name`", "two axes", "group_size=", repr(axis_name))
  with pytest.raises(ValueError, match=says(*parts)):
    gradcomp.qsgd(axis_name=axis_name, exchange=Hierarchical(group_size=group_size))


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True], ids=repr)
def test_group_size(value):
  with pytest.raises(ValueError, match=says("`group_size`", "1 or more", repr(value))):
    Hierarchical(group_size=value)


@pytest.mark.parametrize("exchange", ["gossip", TwoShot, None, 3], ids=repr)
def test_exchanges_are_objects_or_short_forms(exchange):
  parts = ("`exchange`", "two_shot", "TwoShot()", repr(exchange))
  with pytest.raises(ValueError, match=says(*parts)):
    gradcomp.qsgd(axis_name="data", exchange=exchange)


def test_groups_that_workers_do_not_fill():
  tx = gradcomp.qsgd(axis_name="data", exchange=Hierarchical(group_size=3))
  with pytest.raises(
    ValueError, match=says("`group_size`", "divide", "4 workers", "3")
  ):
    jax.vmap(lambda g: update_once(tx, g), axis_name="data")(jnp.ones((4, 64, 64)))


@pytest.mark.parametrize("value", [-1, 1.5, "9", True], ids=repr)
def test_message_bytes(value):
  with pytest.raises(ValueError, match=says("`message_bytes`", "bytes", repr(value))):
    gradcomp.qsgd(message_bytes=value)


@pytest.mark.parametrize("value", [None, 1, "yes"], ids=repr)
@pytest.mark.parametrize("make", [Auto, TwoShot, Hierarchical])
def test_feedback_of_owners(make, value):
  with pytest.raises(ValueError, match=says("`feedback`", "bool", repr(value))):
    make(feedback=value)


@pytest.mark.parametrize("value", [None, 1, "yes"], ids=repr)
@pytest.mark.parametrize("make", [QSGD, gradcomp.qsgd])
def test_share_scale(make, value):
  with pytest.raises(ValueError, match=says("`share_scale`", "bool", repr(value))):
    make(share_scale=value)


def test_sums_that_no_integer_holds():
  """40,000 workers of 16 bits: found when the exchange is planned."""
  tx = gradcomp.qsgd(16, levels="uniform", share_scale=True, axis_name="data")
  with pytest.raises(ValueError, match=says("`codec`", "2**31", "40000", "fewer bits")):
    gradcomp.explain(tx, {"w": jnp.zeros((512, 512))}, workers=40_000)


def test_codec_of_a_policy_whose_sums_no_integer_holds():
  """The error names this codec, and not the policy that has it."""
  wide = QSGD(bits=16, levels="uniform", share_scale=True)
  rules = [("a", QSGD(bits=4, share_scale=True)), ("b", wide)]
  tx = gradcomp.compress(gradcomp.codecs.Policy(rules), axis_name="data")
  leaves = {name: jnp.zeros((512, 512)) for name in "ab"}
  match = f"with {re.escape(str(wide))}; use fewer bits"
  with pytest.raises(ValueError, match=match):
    gradcomp.explain(tx, leaves, workers=40_000)


def test_state_of_an_unknown_number_of_workers():
  """Made outside a map and a mesh; the second stage of four workers keeps residuals."""
  state = residual4.init({"w": jnp.ones((64, 512))})
  parts = (
    "`state.server_residual`",
    "4 workers",
    "set_mesh",
    "replicable(optimizer, axis_name='data', workers=4)",
  )
  with pytest.raises(ValueError, match=says(*parts)):
    jax.vmap(lambda g: residual4.update({"w": g}, state)[0], axis_name="data")(
      jnp.ones((4, 64, 512))
    )


def test_state_of_another_number_of_workers():
  tx = gradcomp.qsgd(axis_name="data", feedback="error", exchange="two_shot")
  grads = {"w": jnp.ones((4, 64, 512))}
  four = jax.vmap(tx.init, axis_name="data")(grads)
  two = jax.tree.map(lambda x: x[:2], (grads, four))
  parts = ("`state.server_residual`", "(4, 8, 512)", "(2, 8, 512)", "as many workers")
  with pytest.raises(ValueError, match=says(*parts)):
    jax.vmap(lambda g, s: tx.update(g, s), axis_name="data")(*two)


@pytest.mark.parametrize("mode", ["train_step", "explicit"])
@pytest.mark.parametrize("made_for", [8, 2, 1])
def test_a_state_says_how_many_workers_it_was_made_for(mode, made_for):
  """A state of 1 is what init makes outside the mesh."""
  tx = gradcomp.qsgd(axis_name="data", feedback="error", exchange=Auto(feedback=False))
  params, mesh = {"w": jnp.zeros((8, 256))}, modes.mesh(WORKERS, AxisType.Explicit)
  with jax.set_mesh(modes.mesh(made_for, AxisType.Explicit)):
    state = jax.device_get(tx.init(params))
  specs = gradcomp.state_specs(state, axis_name="data")
  grad_fn = gradcomp.value_and_grad(loss_fn, axis_name="data")
  with jax.set_mesh(mesh):
    state = jax.device_put(state, jax.tree.map(lambda p: NamedSharding(mesh, p), specs))
    batch, params = jax.device_put((BATCH, params), (P("data"), P()))
    parts = ["`state.residual`['w']", f"for {made_for} worker", "not for 4", "set_mesh"]
    if mode == "explicit":
      step = lambda p, s, x: tx.update(grad_fn(p, x)[1], s)
    else:
      step = gradcomp.make_train_step(loss_fn, tx, axis_name="data", mesh=mesh)
      if made_for == 1:  # whose parts cannot be those of all, and it says so first
        parts = ["residual", "4 workers", "set_mesh"]
    with pytest.raises(ValueError, match=says(*parts)):
      jax.eval_shape(step, params, state, batch)


nonuniform = functools.partial(gradcomp.qsgd, levels="nonuniform")


@pytest.mark.parametrize("bits", [2, 4])
def test_levels_fitted_for_other_bits(bits):
  state = nonuniform(6 - bits).init(GRADS)
  parts = (
    "`state.memory.shared",
    "the shapes",
    f"bits={bits}",
    "got",
    "this transformation",
  )
  with pytest.raises(ValueError, match=says(*parts)):
    nonuniform(bits).update(GRADS, state)


@pytest.mark.parametrize("other", [optax.adam(0.1), optax.trace(0.9)])
def test_state_of_another_transformation(other):
  state = other.init(GRADS)
  parts = (
    "`state`",
    "gradcomp.state.CompressState",
    type(state).__name__,
    "optax.chain",
  )
  with pytest.raises(TypeError, match=says(*parts)):
    gradcomp.qsgd().update(GRADS, state)


@pytest.mark.parametrize(
  "value", [0, -2, 1.5, None, (), (2, 0), (2, 2, 2), {}, {"data": 0}], ids=repr
)
def test_explain_workers(value):
  with pytest.raises(ValueError, match=says("`workers`", "1 or more")):
    gradcomp.explain(gradcomp.qsgd(), GRADS, workers=value)


@pytest.mark.parametrize("axes", ["('data',)", "()"], ids=["another", "no_mesh"])
def test_train_step_on_an_axis_that_the_mesh_does_not_have(axes):
  mesh = None if axes == "()" else modes.mesh(2)
  parts = ("`axis_name`", "axis of the mesh", "'model'", axes, "mesh=", "jax.set_mesh")
  with pytest.raises(ValueError, match=says(*parts)):
    gradcomp.make_train_step(loss_fn, residual4, axis_name="model", mesh=mesh)


@pytest.mark.parametrize("rows", [1, 6, 9])
def test_batches_that_workers_cannot_share(rows):
  parts = ("`batch`['x']", "4 workers", "equally", f"({rows}, 8)")
  dense = gradcomp.dense(axis_name="data")
  with pytest.raises(ValueError, match=says(*parts)):
    train_step(dense, batch={"x": jnp.ones((rows, 8))})


@pytest.mark.parametrize("scalar", [jnp.float32(1), 1.0, np.int64(3)], ids=repr)
def test_scalars_in_a_batch(scalar):
  parts = ("`batch`['rate']", "4 workers", "()")
  dense = gradcomp.dense(axis_name="data")
  with pytest.raises(ValueError, match=says(*parts)):
    train_step(dense, batch={"x": jnp.ones((8, 8)), "rate": scalar})


def test_train_step_of_another_axis_than_the_transformation():
  with pytest.raises(ValueError, match=says("`axis_name`", "'model'", "not bound")):
    train_step(gradcomp.dense(axis_name="model"))


@pytest.mark.parametrize("call", ["value_and_grad", "make_train_step"])
def test_parameters_that_are_not_floats(call):
  """They have no gradient. JAX would refuse a counter without its name."""
  params = {"w": 2.0, "layer": [jnp.zeros(3, jnp.int32)]}
  name = {"value_and_grad": "argument 0 of `loss_fn`", "make_train_step": "`params`"}
  parts = (name[call], "['layer'][0]", "int32[3]", "jnp.asarray")
  with pytest.raises(TypeError, match=says(*parts)):
    if call == "make_train_step":
      tx = gradcomp.dense(axis_name="data")
      options = {"axis_name": "data", "mesh": modes.mesh(WORKERS)}
      gradcomp.make_train_step(loss_fn, tx, **options)(params, tx.init(params), BATCH)
    else:
      grad_fn = gradcomp.value_and_grad(loss_fn, axis_name="data")
      jax.vmap(grad_fn, axis_name="data", in_axes=(None, 0))(params, BATCH[:, None])
