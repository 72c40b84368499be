"""Every transformation is what optax, flax and JAX expect of a good citizen.

A new transformation is one more line in ``FACTORIES`` of cases/citizen.py. Gradients
pass through a wrapper as they would without it, bit for bit: whatever compiles the
codecs, the bits agree.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.flatten_util import ravel_pytree

import gradcomp
from gradcomp.codecs import QSGD
from tests.support.assertions import assert_equal
from tests.support.cases.citizen import (
  FACTORIES,
  KEEP_RESIDUAL,
  REMEMBERING,
  gradients,
  pick,
)


def every(*plain):
  """Parametrizes a test by transformations, of which plain runs have those named."""
  marks = {True: (), False: pytest.mark.slow}
  return pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks[name in plain]) for name in FACTORIES]
  )


# Without and with a residual.
every_transformation = every("dense", "qsgd4-error")
every_output = every("qsgd4-error")  # of tests that do the same for both


def signs():
  """1,024 numbers of magnitude 1, whose norm is 32: every codec is exact on them."""
  rng = np.random.default_rng(3)
  return {"m": jnp.asarray(rng.choice([-1.0, 1.0], (32, 32)), jnp.float32)}


def steps(tx, grads):
  """The outputs and states of a transformation, one for each tree of gradients."""
  chex.clear_trace_counter()  # it counts by name
  update = jax.jit(chex.assert_max_traces(tx.update, n=1))
  state, outputs, states = tx.init(grads[0]), [], []
  for tree in grads:
    output, state = update(tree, state)
    outputs.append(output)
    states.append(state)
  return outputs, states


def zero_residual(name):
  """Shaped like the leaves, scalars as (1,); None where no residual is kept."""
  zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape or (1,)), gradients())
  return zeros if name in KEEP_RESIDUAL else None


@functools.cache
def plain(name):
  """Three steps without any wrapper, which compile once."""
  return steps(FACTORIES[name](), [gradients(seed) for seed in range(3)])


@functools.cache
def alone(name, *leaves):
  """The first step of a tree that has only these leaves."""
  return steps(FACTORIES[name](), [pick(gradients(), *leaves)])[0][0]


@every_transformation
def test_takes_no_parameters_and_any_extra_argument(name):
  tx, grads = FACTORIES[name](), gradients()
  assert isinstance(tx, optax.GradientTransformationExtraArgs)
  state = tx.init(grads)
  extra = dict(value=jnp.float32(1), value_fn=print, anything=None)
  expected = plain(name)[0][0], plain(name)[1][0]
  with_all = jax.jit(lambda g, s: tx.update(g, s, g, **extra))
  assert_equal(with_all(grads, state), expected)
  without = jax.jit(lambda g, s: tx.update(g, s, params=None))
  assert_equal(without(grads, state), expected)


@every_transformation
def test_compresses_what_is_large_and_nothing_else(name):
  """So that the tests below compare what a codec has touched."""
  grads, output = gradients(), plain(name)[0][0]
  for leaf in ("m", "odd"):
    assert np.array_equal(output[leaf], grads[leaf]) == (name == "dense")
  assert_equal(pick(output, "b", "s", "empty"), pick(grads, "b", "s", "empty"))


@every_transformation
def test_dtypes_return_and_sums_are_in_float32(name):
  tx, grads = FACTORIES[name](), gradients()
  cast = functools.partial(jax.tree.map, lambda x, kind: np.asarray(x).astype(kind))
  for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
    typed = cast(grads, dict.fromkeys(grads, dtype))
    args = typed, tx.init(typed)
    assert jax.eval_shape(tx.update, *args) == jax.eval_shape(lambda *args: args, *args)
  kinds = dict(m=jnp.bfloat16, odd=jnp.float16, b=jnp.float16, s=jnp.float32)
  kinds["empty"] = jnp.bfloat16
  mixed = cast(grads, kinds)
  update = jax.jit(tx.update)
  got, state = update(mixed, tx.init(mixed))
  wide = cast(mixed, dict.fromkeys(kinds, jnp.float32))
  expected, expected_state = jax.device_get(update(wide, tx.init(wide)))
  assert_equal(got, cast(expected, kinds))
  if getattr(expected_state, "residual", None) is not None:
    # It is float32 for all, and keeps what the cast of the mean loses.
    keep = lambda r, x, kind: r + (x - x.astype(kind).astype(x.dtype)).reshape(r.shape)
    kept = jax.tree.map(keep, expected_state.residual, expected, kinds)
    expected_state = expected_state._replace(residual=kept)
  assert_equal(state, expected_state)
  large = jnp.full((2, 1024), 49152, jnp.float16)  # a sum of two is infinite
  tx = FACTORIES[name](axis_name="data")
  average = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")
  assert_equal(jax.jit(average)(large), large)


@every_transformation
def test_state_is_stable_under_scan_and_cond(name):
  tx, grads = FACTORIES[name](), [gradients(seed) for seed in range(3)]
  stacked = jax.tree.map(lambda *xs: np.stack(xs), *grads)

  def step(state, tree):
    keep = lambda state: (optax.tree.zeros_like(tree), state)
    output, state = jax.lax.cond(
      state.count >= 0, lambda state: tx.update(tree, state), keep, state
    )
    return state, output

  state, outputs = jax.jit(lambda s, g: jax.lax.scan(step, s, g))(
    tx.init(grads[0]), stacked
  )
  expected, states = plain(name)
  assert_equal(outputs, jax.tree.map(lambda *xs: np.stack(xs), *expected))
  assert_equal(state, states[-1])
  assert int(state.count) == 3


# A codec that rounds to nearest keeps a residual unasked.
@every("dense", "qsgd4-error", "qsgd8-nearest")
def test_init_takes_abstract_parameters(name):
  tx, grads = FACTORIES[name](), gradients()
  state, abstract = tx.init(grads), jax.eval_shape(lambda: grads)
  assert_equal(tx.init(abstract), state)
  assert_equal(jax.jit(tx.init)(grads), state)
  assert jax.eval_shape(tx.init, abstract) == jax.eval_shape(lambda: state)
  assert_equal(state.residual, zero_residual(name))


@every_output
def test_init_takes_numpy_arrays_and_numbers(name):
  """As optax's own do; ``jax.grad`` makes arrays of both."""
  params = {"m": np.ones((32, 32), np.float32), "s": np.float32(1)}
  state = FACTORIES[name]().init(params)
  assert_equal(state, FACTORIES[name]().init(jax.tree.map(jnp.asarray, params)))


@every_output
def test_what_is_no_array_passes_through(name):
  tx, holes = FACTORIES[name](), {"a": None, "x": optax.MaskedNode(), "z": [None, {}]}
  output = steps(tx, [{**gradients(), **holes}])[0][0]
  assert_equal(output, {**plain(name)[0][0], **holes})


@every_output
@pytest.mark.parametrize(
  "tree", [{}, None, (), [None], optax.MaskedNode(), {"e": jnp.zeros((0, 3))}], ids=str
)
def test_trees_without_anything_to_send(name, tree):
  tx = FACTORIES[name]()
  assert_equal(steps(tx, [tree, tree])[0], [tree, tree])
  tx = FACTORIES[name](axis_name="data")
  update = lambda tree: tx.update(tree, tx.init(tree))[0]
  output = jax.vmap(update, in_axes=None, axis_name="data", axis_size=2)(tree)
  assert jax.tree.structure(output) == jax.tree.structure(tree)


@every_output
def test_chains(name):
  tx, grads = FACTORIES[name](), gradients()
  expected = jax.tree.map(np.negative, plain(name)[0][0])
  (output,), _ = steps(optax.chain(tx, optax.scale(-1.0)), [grads])
  assert_equal(output, expected)
  named = optax.named_chain(("compress", tx), ("negate", optax.scale(-1.0)))
  (output,), (state,) = steps(named, [grads])
  assert_equal(output, expected)
  assert_equal(state["compress"], plain(name)[1][0])


@every_output
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_clip_by_global_norm(name, first):
  order = [optax.clip_by_global_norm(8.0), FACTORIES[name]()]
  (output,), _ = steps(optax.chain(*(order if first else order[::-1])), [signs()])
  assert_equal(output, jax.tree.map(lambda x: x / 4, signs()))  # 32 is clipped to 8


@every_transformation
def test_masked_and_partition(name):
  tx, grads = FACTORIES[name](), gradients()
  chosen, others = ("odd", "s"), ("b", "m", "empty")
  expected = {**pick(grads, *others), **alone(name, *chosen)}
  mask = {leaf: leaf in chosen for leaf in grads}
  (output,), (state,) = steps(optax.masked(tx, mask), [grads])
  assert_equal(output, expected)
  residual = state.inner_state.residual
  count = len(chosen) if name in KEEP_RESIDUAL else 0
  assert len(jax.tree.leaves(residual)) == count
  labels = {leaf: "compressed" if mask[leaf] else "dense" for leaf in grads}
  by_label = {"compressed": tx, "dense": gradcomp.dense()}
  assert_equal(steps(optax.partition(by_label, labels), [grads])[0][0], expected)
  nothing = optax.masked(tx, jax.tree.map(lambda _: False, mask))
  assert_equal(steps(nothing, [grads])[0][0], grads)


@every_output
def test_flatten(name):
  flat, unravel = ravel_pytree(gradients())
  (expected,), (flat_state,) = steps(FACTORIES[name](), [flat])
  (output,), (state,) = steps(optax.flatten(FACTORIES[name]()), [gradients()])
  assert_equal(output, unravel(expected))
  assert_equal(state, flat_state)


@every_output
def test_multi_steps(name):
  """The mean of two equal gradients is exact: the second step emits what one would."""
  tx = optax.MultiSteps(FACTORIES[name](), every_k_schedule=2)
  grads = [gradients(0), gradients(0), gradients(1), gradients(1)]
  outputs, states = steps(tx, grads)
  zeros = optax.tree.zeros_like(grads[0])
  assert_equal(outputs, [zeros, plain(name)[0][0], zeros, plain(name)[0][1]])
  assert_equal(states[-1].inner_opt_state, plain(name)[1][1])


@every_transformation
def test_apply_if_finite_after_it(name):
  guarded = optax.chain(FACTORIES[name](), optax.apply_if_finite(optax.scale(-1.0), 5))
  bad = gradients(1)
  bad["m"] = bad["m"].at[3, 4].set(jnp.nan)
  outputs, states = steps(guarded, [gradients(0), bad, gradients(2)])
  assert_equal(outputs[1], optax.tree.zeros_like(bad))
  assert [int(state[1].notfinite_count) for state in states] == [0, 1, 0]
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(states[2][0]))
  if name not in KEEP_RESIDUAL:  # the third step does not know of the second one
    assert_equal(outputs[2], jax.tree.map(np.negative, plain(name)[0][2]))


@pytest.mark.parametrize("factory", [gradcomp.compress, gradcomp.qsgd])
def test_inject_hyperparams(factory):
  """A codec passes as it is; integers that make shapes are to be named static."""
  if factory is gradcomp.compress:
    make = optax.inject_hyperparams(factory)
    tx = make(codec=QSGD(bits=4, bucket_size=32), feedback="error", key=0)
  else:
    static = ("bits", "bucket_size", "min_leaf_size", "refit_every")
    make = optax.inject_hyperparams(factory, static_args=static)
    tx = make(bits=4, bucket_size=32, min_leaf_size=100, feedback="error")
  outputs, states = steps(tx, [gradients(seed) for seed in range(3)])
  assert_equal(outputs, plain("qsgd4-error")[0])
  assert_equal(states[-1].inner_state, plain("qsgd4-error")[1][-1])


@every_transformation
def test_state_is_found_and_mapped_by_name(name):
  tx, grads = FACTORIES[name](), gradients()
  expected = zero_residual(name)
  for wrapped in (
    tx,
    optax.chain(tx, optax.adam(1e-3)),
    optax.named_chain(("compress", tx), ("adam", optax.adam(1e-3))),
    optax.MultiSteps(optax.chain(tx, optax.adam(1e-3)), 2),
    optax.apply_if_finite(optax.masked(tx, True), 3),
  ):
    assert_equal(optax.tree.get(wrapped.init(grads), "residual"), expected)
  chained = optax.chain(tx, optax.trace(0.9))
  state = chained.init(grads)
  mapped = optax.tree.map_params(chained, lambda leaf: np.asarray(leaf) + 1, state)
  ones = functools.partial(jax.tree.map, jnp.ones_like)
  assert_equal(mapped[0], state[0]._replace(residual=ones(expected)))
  assert_equal(mapped[1].trace, ones(grads))


@every_output
def test_state_survives_plain_numpy(name, tmp_path):
  outputs, states = plain(name)
  leaves, treedef = jax.tree.flatten(states[1])
  np.savez(tmp_path / "state.npz", *(np.asarray(leaf) for leaf in leaves))
  with np.load(tmp_path / "state.npz") as file:
    restored = jax.tree.unflatten(treedef, [file[key] for key in file])
  got = jax.jit(FACTORIES[name]().update)(gradients(2), restored)
  assert_equal(got, (outputs[2], states[2]))


@every_output
def test_flax_train_state(name):
  """``apply_gradients`` hands over no extra argument."""
  grads, optimizer = gradients(), optax.chain(FACTORIES[name](), optax.scale(-1.0))
  state = TrainState.create(apply_fn=None, params=grads, tx=optimizer)
  state = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, grads)
  assert_equal(state.params, jax.tree.map(np.subtract, grads, plain(name)[0][0]))
  assert_equal(state.opt_state[0], plain(name)[1][0])


@every_transformation
def test_nnx_optimizer(name):
  """nnx wraps every array in a Variable and hands over keyword arguments."""
  grads = pick(gradients(), "m")
  model = nnx.Dict(m=nnx.Param(jnp.zeros((32, 32))))
  chained = optax.chain(FACTORIES[name](), optax.scale(-1.0))
  optimizer = nnx.Optimizer(model, chained, wrt=nnx.Param)

  @nnx.jit
  def step(model, optimizer):
    tree = nnx.grad(lambda model: jnp.sum(model["m"][...] * grads["m"]))(model)
    optimizer.update(model, tree, value=1.0)

  step(model, optimizer)
  assert_equal(model["m"][...], -alone(name, "m")["m"])
  residual = optax.tree.get(optimizer.opt_state, "residual")
  assert (residual is not None) == (name in KEEP_RESIDUAL)


@pytest.mark.parametrize("codec", REMEMBERING, ids=lambda codec: type(codec).__name__)
def test_what_codecs_remember_passes_through_nnx_and_optax(codec):
  """Names of leaves differ between nnx's init and update, and have no shapes here."""
  chained = optax.chain(gradcomp.compress(codec, min_leaf_size=1), optax.scale(-1.0))
  model = nnx.Dict(m=nnx.Param(jnp.ones((32, 64))))
  optimizer = nnx.Optimizer(model, chained, wrt=nnx.Param)

  @nnx.jit
  def step(model, optimizer):
    optimizer.update(model, nnx.grad(lambda m: jnp.sum(m["m"][...] ** 3))(model))

  step(model, optimizer)
  assert not np.array_equal(model["m"][...], np.ones((32, 64)))
  params = {"m": jnp.ones((32, 64)), "b": jnp.ones(3)}
  state = chained.init(params)
  mapped = optax.tree.map_params(chained, lambda leaf: leaf + 1, state)
  assert_equal(mapped[0].memory, state[0].memory)
  assert jax.tree.leaves(state[0].memory)
