"""Every transformation is what optax, flax and JAX expect of a good citizen."""

import functools
import operator
import pickle

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
from gradcomp._src.transforms.low_rank import PowerSGD
from gradcomp.codecs import QSGD, TopK
from tests.plugins.slow_cases import slow
from tests.support.assertions import assert_equal
from tests.support.cases import inner
from tests.support.cases.citizen import FACTORIES, error4

PLAIN = ("dense", "qsgd4-error")  # without and with a residual
every_transformation = pytest.mark.parametrize(
  "name", [*PLAIN, *slow(*(name for name in FACTORIES if name not in PLAIN))]
)
REMEMBERING = [
  QSGD(bits=3, bucket_size=32, levels="nonuniform"),
  TopK(density=0.1, selection="sampled"),
  PowerSGD(rank=1),
]
KEEP_RESIDUAL = ("qsgd4-error", "qsgd8-nearest", "dense-bfloat16")
# A leaf to compress, an odd one, a small one, a scalar and an empty one.
SHAPES = {"m": (32, 32), "odd": (3, 5, 43), "b": (5,), "s": (), "empty": (0, 3)}
NORMAL = np.random.default_rng(0).standard_normal
draw = lambda: {name: jnp.asarray(NORMAL(x), jnp.float32) for name, x in SHAPES.items()}
pick = lambda tree, *names: {name: tree[name] for name in names}
THREE = [draw() for _ in range(3)]
negated = functools.partial(jax.tree.map, np.negative)
scale = optax.scale(-1.0)


def steps(tx, grads):
  """The outputs and states of a transformation, one for each tree of gradients."""
  chex.clear_trace_counter()  # it counts by name
  update = jax.jit(chex.assert_max_traces(tx.update, n=1))
  state, outputs, states = tx.init(grads[0]), [], []
  for tree in grads:
    output, state = update(tree, state)
    outputs.append(output)
    states.append(state)
  return jax.device_get(outputs), states


@functools.cache
def plain(name):
  """Three steps without any wrapper, which compile once."""
  return steps(FACTORIES[name](), THREE)


@functools.cache
def alone(name, *leaves):
  """The first step of a tree that has only these leaves."""
  return steps(FACTORIES[name](), [pick(THREE[0], *leaves)])[0][0]


def zero_residual(name):
  """Shaped like the leaves, scalars as (1,); None where no residual is kept."""
  zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape or (1,)), THREE[0])
  return zeros if name in KEEP_RESIDUAL else None


HOLES = {"a": None, "x": optax.MaskedNode(), "z": [None, {}]}
STATIC = ("bits", "bucket_size", "min_leaf_size", "refit_every")
MASK = {"odd": True, "s": True, "b": False, "m": False, "empty": False}
LABELS = {name: "own" if kept else "dense" for name, kept in MASK.items()}
NOTHING = dict.fromkeys(MASK, False)
ZEROS = optax.tree.zeros_like(THREE[0])
inject, inner_state = optax.inject_hyperparams, operator.attrgetter("inner_state")
CODEC, KEPT = QSGD(bucket_size=32, bits=4), {"feedback": "error", "min_leaf_size": 100}
COMPRESS = inject(gradcomp.compress)(codec=CODEC, feedback="error", key=0)
QSGD4 = inject(gradcomp.qsgd, static_args=STATIC)(bits=4, bucket_size=32, **KEPT)

named = lambda tx: optax.named_chain(("compress", tx), ("negate", scale))
# What is around a transformation, which outputs are expected, and where its state is.
AROUND = {
  "chain": (lambda tx: optax.chain(tx, scale), negated, operator.itemgetter(0)),
  "named_chain": (named, negated, operator.itemgetter("compress")),
  # The mean of two equal gradients is exact: the second step emits what one would.
  "MultiSteps": (
    lambda tx: optax.MultiSteps(tx, every_k_schedule=2),
    lambda outputs: [x for y in outputs for x in (ZEROS, y)],
    operator.attrgetter("inner_opt_state"),
  ),
  "nothing": (lambda tx: optax.masked(tx, NOTHING), lambda _: THREE, None),
  "flatten": (optax.flatten, lambda _: flattened(), None),
  # A codec passes as it is; integers that make shapes are to be named static.
  "inject_hyperparams of compress": (lambda _: COMPRESS, list, inner_state),
  "inject_hyperparams of qsgd": (lambda _: QSGD4, list, inner_state),
}


def flattened():
  outputs, _ = steps(error4(), [ravel_pytree(x)[0] for x in THREE])
  return jax.device_get([*map(ravel_pytree(THREE[0])[1], outputs)])


@pytest.mark.parametrize("around", AROUND)
def test_a_wrapper_changes_no_bit(around):
  wrap, expected, inside = AROUND[around]
  outputs, states = plain("qsgd4-error")
  given = [x for x in THREE for _ in range(2 if around == "MultiSteps" else 1)]
  got, found = steps(wrap(error4()), given)
  assert_equal(got, expected(outputs))
  if inside is not None:
    assert_equal(inside(found[-1]), states[-1])


def test_what_is_no_array_passes_through():
  (output,), _ = steps(error4(), [THREE[0] | HOLES])
  assert_equal(output, plain("qsgd4-error")[0][0] | HOLES)


@every_transformation
def test_it_compresses_what_is_large_and_nothing_else(name):
  """So that the tests here compare what a codec has touched."""
  grads, output = THREE[0], plain(name)[0][0]
  for leaf in ("m", "odd"):
    assert np.array_equal(output[leaf], grads[leaf]) == (name == "dense")
  assert_equal(pick(output, "b", "s", "empty"), pick(grads, "b", "s", "empty"))


@every_transformation
def test_state_is_stable_under_scan_and_cond(name):
  """And extra arguments, parameters among them, change nothing."""
  tx, extra = FACTORIES[name](), dict(value=jnp.float32(1), anything=None)
  assert isinstance(tx, optax.GradientTransformationExtraArgs)

  def step(state, tree):
    keep = lambda state: (optax.tree.zeros_like(tree), state)
    update = lambda state: tx.update(tree, state, tree, value_fn=print, **extra)
    return jax.lax.cond(state.count >= 0, update, keep, state)[::-1]

  stacked = lambda trees: jax.tree.map(lambda *xs: np.stack(xs), *trees)
  scan = jax.jit(lambda state, grads: jax.lax.scan(step, state, grads))
  state, outputs = scan(tx.init(THREE[0]), stacked(THREE))
  expected, states = plain(name)
  assert_equal(outputs, stacked(expected))
  assert_equal(state, states[-1])
  assert int(state.count) == 3


# A codec that rounds to nearest keeps a residual unasked.
@pytest.mark.parametrize("name", [*PLAIN, "qsgd8-nearest"])
def test_init_takes_abstract_parameters_arrays_and_numbers(name):
  """Also NumPy's, as optax's own do; ``jax.grad`` makes arrays of both."""
  tx, grads = FACTORIES[name](), THREE[0]
  state, abstract = tx.init(grads), jax.eval_shape(lambda: grads)
  assert_equal(tx.init(abstract), state)
  assert_equal(tx.init(jax.device_get(grads) | {"s": np.float32(1)}), state)
  assert_equal(jax.jit(tx.init)(grads), state)
  assert_equal(state.residual, zero_residual(name))


@pytest.mark.parametrize(
  "tree", [{}, None, (), [None], optax.MaskedNode(), {"e": np.zeros((0, 3))}], ids=str
)
def test_trees_without_anything_to_send(tree):
  tx = error4(axis_name="data")
  update = lambda tree: tx.update(tree, tx.init(tree))[0]
  output = jax.vmap(update, in_axes=None, axis_name="data", axis_size=2)(tree)
  assert jax.tree.structure(output) == jax.tree.structure(tree)


@every_transformation
def test_masked_and_partition(name):
  tx, grads = FACTORIES[name](), THREE[0]
  expected = {**pick(grads, "b", "m", "empty"), **alone(name, "odd", "s")}
  (output,), (state,) = steps(optax.masked(tx, MASK), [grads])
  assert_equal(output, jax.device_get(expected))
  residual = state.inner_state.residual
  assert len(jax.tree.leaves(residual)) == (2 if name in KEEP_RESIDUAL else 0)
  by_label = optax.partition({"own": tx, "dense": gradcomp.dense()}, LABELS)
  assert_equal(steps(by_label, [grads])[0], [output])


@every_transformation
def test_apply_if_finite_after_it(name):
  guarded = optax.chain(FACTORIES[name](), optax.apply_if_finite(scale, 5))
  bad = THREE[1] | {"m": np.where(np.arange(32) == 4, np.nan, THREE[1]["m"])}
  outputs, states = steps(guarded, [THREE[0], bad, THREE[2]])
  assert_equal(outputs[1], jax.device_get(ZEROS))
  assert [int(state[1].notfinite_count) for state in states] == [0, 1, 0]
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(states[2][0]))
  if name not in KEEP_RESIDUAL:  # the third step does not know of the second one
    assert_equal(outputs[2], negated(plain(name)[0][2]))


@every_transformation
def test_state_is_found_and_mapped_by_name(name):
  tx, grads = FACTORIES[name](), THREE[0]
  expected, adam = zero_residual(name), optax.adam(1e-3)
  for wrapped in (
    tx,
    optax.named_chain(("compress", tx), ("adam", adam)),
    optax.MultiSteps(optax.chain(tx, adam), 2),
    optax.apply_if_finite(optax.masked(tx, True), 3),
  ):
    assert_equal(optax.tree.get(wrapped.init(grads), "residual"), expected)
  chained = optax.chain(tx, optax.trace(0.9))
  state = chained.init(grads)
  mapped = optax.tree.map_params(chained, lambda leaf: np.asarray(leaf) + 1, state)
  ones = functools.partial(jax.tree.map, jnp.ones_like)
  assert_equal(mapped[0], state[0]._replace(residual=ones(expected)))
  assert_equal(mapped[1].trace, ones(grads))


def test_state_survives_pickle_and_flax_hands_it_on():
  """``apply_gradients`` hands over no extra argument."""
  tx, (outputs, states) = error4(), plain("qsgd4-error")
  optimizer = optax.chain(tx, scale)
  state = TrainState.create(apply_fn=None, params=THREE[2], tx=optimizer)
  again = pickle.loads(pickle.dumps(jax.device_get(states[1])))
  state = state.replace(opt_state=(again, state.opt_state[1]))
  state = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, THREE[2])
  assert_equal(state.params, jax.tree.map(np.subtract, THREE[2], outputs[2]))
  assert_equal(state.opt_state[0], states[2])


def test_nnx_optimizer():
  """nnx wraps every array in a Variable and hands over keyword arguments."""
  grads = pick(THREE[0], "m")
  model = nnx.Dict(m=nnx.Param(jnp.zeros((32, 32))))
  optimizer = nnx.Optimizer(model, optax.chain(error4(), scale), wrt=nnx.Param)

  @nnx.jit
  def step(model, optimizer):
    tree = nnx.grad(lambda model: jnp.sum(model["m"][...] * grads["m"]))(model)
    optimizer.update(model, tree, value=1.0)

  step(model, optimizer)
  assert_equal(model["m"][...], jnp.asarray(-alone("qsgd4-error", "m")["m"]))
  assert optax.tree.get(optimizer.opt_state, "residual") is not None


@pytest.mark.parametrize("codec", REMEMBERING, ids=lambda x: type(x).__name__)
def test_optax_maps_no_memory(codec):
  chained = optax.chain(gradcomp.compress(codec, min_leaf_size=1), scale)
  state = chained.init(pick(THREE[0], "m") | {"b": jnp.ones(3)})
  mapped = optax.tree.map_params(chained, lambda leaf: leaf + 1, state)
  assert_equal(mapped[0].memory, state[0].memory)
  assert jax.tree.leaves(state[0].memory)


OPTIMIZERS = inner.PLAIN | inner.WHOLE | {"polyak": optax.polyak_sgd(1.0)}
EXCHANGES = {
  "qsgd": gradcomp.qsgd(8, bucket_size=32, min_leaf_size=0),
  "eight_bit": gradcomp.eight_bit(min_leaf_size=0),
  "dense": gradcomp.dense(),
}


@functools.cache
def losses(name, dtype, exchange):
  """The first and the last loss of a parabola of 128 numbers of many magnitudes."""
  goal = np.linspace(-1, 1, 128).reshape(8, 16) ** 3 * (1 + 1j)
  goal = jnp.asarray(goal if dtype == "complex64" else goal.real, dtype)
  optimizer = optax.with_extra_args_support(OPTIMIZERS[name])
  optimizer = optax.chain(EXCHANGES[exchange], optimizer) if exchange else optimizer
  objective = lambda params: jnp.sum(jnp.abs(params - goal) ** 2)

  def step(carry, _):
    params, state = carry
    value, grads = jax.value_and_grad(objective)(params)
    updates, state = optimizer.update(jnp.conj(grads), state, params, value=value)
    return (optax.apply_updates(params, updates), state), value

  params = goal[::-1] + 1
  scan = jax.jit(lambda carry: jax.lax.scan(step, carry, None, 200))
  values = scan((params, optimizer.init(params)))[1]
  return float(values[0]), float(values[-1])


@pytest.mark.parametrize(
  "name, dtype",
  [("adam", "complex64"), *slow(*((name, "float32") for name in OPTIMIZERS))],
)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_optimizer_trains_behind_an_exchange(name, dtype, exchange):
  """As well as without, to a hundredth of the way."""
  if (name, exchange) == ("rprop", "qsgd"):
    pytest.skip("its steps grow by the signs of gradients, and here they are noise")
  first, last = losses(name, dtype, exchange)
  assert last < losses(name, dtype, None)[1] + 0.01 * first
