"""A table of optax's optimizers for zero and local steps, and trainings by these.

Each is equal to the same without this library, or is refused by zero in words that
``REFUSED`` has a part of.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

import gradcomp
from gradcomp.codecs import Dense
from tests.support.cases.zero import tree

N = 2
STEPS = 3
CODECS = dict(grads=Dense(), params=Dense(), axis_name="data")
SHAPES = {"kernel": (6, 50), "bias": (50,), "one": ()}
RATE = optax.linear_schedule(0.1, 0.02, 4)


first_params = functools.partial(tree, 0, SHAPES)
# Of each worker: the gradient of its loss at p is ``p - target``.
targets = functools.partial(tree, 1, SHAPES, N)
by_rank = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
by_size = lambda params: jax.tree.map(lambda x: x.size > 60, params)
named = lambda path, _: "slow" if path[-1].key == "bias" else "fast"
by_name = lambda params: jax.tree_util.tree_map_with_path(named, params)
GROUPS = {"fast": optax.adam(0.1), "slow": optax.sgd(0.01, 0.9)}
MASK = {"kernel": True, "bias": False, "one": False}
DECAYED = dict(weight_decay=0.5, learning_rate=RATE)
BY_RANK = optax.adamw(mask=by_rank, **DECAYED)
rated = lambda space, *names: {x: getattr(space, x)(0.1) for x in names}

# Of one kind of leaves.
PLAIN = {
  "adam": optax.adam(RATE),
  "adam, bfloat16 moments": optax.adam(RATE, mu_dtype=jnp.bfloat16),
  "adamw, injected": optax.inject_hyperparams(optax.adamw)(RATE, weight_decay=0.1),
  **rated(optax, "adagrad", "adadelta", "adamax", "adan", "adabelief", "amsgrad"),
  **rated(optax, "lion", "nadamw", "radam"),
  "rmsprop": optax.rmsprop(0.1, centered=True, momentum=0.9),
  "rprop": optax.rprop(0.1),
  "sgd": optax.sgd(RATE, 0.9, nesterov=True),
  "sign": optax.sign_sgd(0.1),
  "yogi": optax.yogi(0.1),
  "optimistic": optax.optimistic_gradient_descent(0.1),
  **rated(contrib, "ademamix", "adopt"),
  "cocob": contrib.cocob(),
  "clip": optax.chain(optax.clip(0.5), optax.ema(0.9), optax.sgd(0.1)),
  "not negative": optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative()),
  "every second": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
  "apply every": optax.chain(optax.apply_every(2), optax.sgd(0.1)),
  "schedule free": contrib.schedule_free(optax.sgd(0.1), 0.1),
  "schedule free adamw": contrib.schedule_free_adamw(0.1),
}

# Of several: they look at ranks, sizes, paths or names.
LOOKING = {
  "mask by rank": BY_RANK,
  "mask by size": optax.adamw(mask=by_size, **DECAYED),
  "mask as a tree": optax.adamw(mask=MASK, **DECAYED),
  "lion, mask by rank": optax.lion(mask=by_rank, **DECAYED),
  "injected mask": optax.inject_hyperparams(optax.adamw, static_args="mask")(
    mask=by_rank, **DECAYED
  ),
  "masked": optax.chain(optax.masked(optax.trace(0.9), by_rank), optax.sgd(0.1)),
  "masked twice": optax.masked(optax.masked(optax.adam(0.1), MASK), by_rank),
  "frozen": optax.chain(optax.masked(optax.set_to_zero(), MASK), optax.sgd(0.1)),
  "labels by name": optax.partition(GROUPS, by_name),
  "labels as a tree": optax.partition(
    GROUPS, {"kernel": "fast", "bias": "slow", "one": "fast"}
  ),
  "every second, masked": optax.MultiSteps(BY_RANK, 2).gradient_transformation(),
  "schedule free, masked": contrib.schedule_free(
    optax.adamw(mask=by_rank, b1=0.0, **DECAYED), 0.1
  ),
}

WHOLE = {
  "trust ratio": optax.chain(optax.scale_by_trust_ratio(), optax.sgd(0.1)),
  **rated(optax, "lamb", "lars", "fromage", "novograd"),
  "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=4),
  "adafactor, not factored": optax.adafactor(0.1),
  "muon": contrib.muon(0.1),
  "global norm": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
  "adaptive clipping": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
  "centralize": optax.chain(optax.centralize(), optax.sgd(0.1)),
  **rated(contrib, "prodigy", "dog"),
  "dowg": contrib.dowg(),
  "dadapt": contrib.dadapt_adamw(0.1),
  "mechanize": contrib.mechanize(optax.sgd(0.1)),
  "if finite": optax.apply_if_finite(optax.sgd(0.1), 3),
}

NOISE = optax.chain(optax.add_noise(0.1, 0.1, key=jax.random.key(0)), optax.sgd(0.1))

REFUSED = dict.fromkeys(WHOLE, "each element by itself") | {
  "adafactor": "trees like its parameters",
  "adafactor, not factored": "each element by itself",
}


def fast(params):
  """What gradients are of: lookahead has a pair of parameters."""
  return getattr(params, "fast", params)


def _trained(tx, gradient, steps, params, *goals, of=lambda function: function):
  """Parameters behind steps by ``gradient(params, state, *goals)``; ``of`` maps."""

  def step(params, state, *goals):
    updates, state = tx.update(gradient(params, state, *goals), state, params)
    return optax.apply_updates(params, updates), state

  step, state = jax.jit(of(step)), jax.jit(of(tx.init))(params)
  for _ in range(steps):
    params, state = step(params, state, *goals)
  return fast(params)


def train(tx, steps=STEPS, place=lambda params: params):
  """The parameters of N workers of vmap, each with the gradients of its own loss."""
  own = lambda params, state: gradcomp.local.local_params(fast(params), state)
  away = lambda params, state, goal: optax.tree.sub(own(params, state), goal)
  params = jax.tree.map(lambda x: np.stack([x] * N), place(first_params()))
  of = functools.partial(jax.vmap, axis_name="data")
  return _trained(tx, away, steps, params, targets(), of=of)


def plain(tx, steps=STEPS, place=lambda params: params):
  """The same with the mean of all gradients, by optax alone."""
  goal = jax.tree.map(lambda x: np.mean(x, axis=0), targets())
  away = lambda params, _: optax.tree.sub(fast(params), goal)
  return _trained(tx, away, steps, place(first_params()))


def rounds(inner, outer=None, every=2):
  """Local steps of N workers by optax alone, from all their gradients, ``[N, ...]``."""
  outer = optax.sgd(1.0) if outer is None else outer
  stacked = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * N), tree)

  def init(params):
    own = stacked(params)
    moved = optax.tree.zeros_like(own)
    return jnp.int32(0), moved, jax.vmap(inner.init)(own), outer.init(params)

  def update(grads, state, params):
    count, moved, inner_state, outer_state = state
    own = optax.tree.add(stacked(params), moved)
    steps, inner_state = jax.vmap(inner.update)(grads, inner_state, own)
    moved = optax.tree.add(moved, steps)
    change = jax.tree.map(lambda x: -x.mean(axis=0), moved)
    updates, then = outer.update(change, outer_state, params)
    ends = (count + 1) % every == 0
    at_end = lambda x, y: jax.tree.map(lambda x, y: jnp.where(ends, x, y), x, y)
    updates = at_end(updates, optax.tree.zeros_like(params))
    moved = at_end(optax.tree.zeros_like(moved), moved)
    return updates, (count + 1, moved, inner_state, at_end(then, outer_state))

  return optax.GradientTransformation(init, update)


def by_hand(tx, displacement, steps=4, place=lambda params: params):
  """Trains by such rounds; ``displacement(state)`` is how far workers are from all."""

  def away(params, state):
    own = jax.tree.map(jnp.add, fast(params), displacement(state))
    return optax.tree.sub(own, targets())

  return _trained(tx, away, steps, place(first_params()))


def assert_close(got, expected):
  """Up to the rounding of sums, and of ``p + (m - p)`` for ``m``."""
  chex.assert_trees_all_close(jax.tree.map(lambda x: x[0], got), expected, atol=2e-5)
