"""RedSync loses nothing while its density changes, and trains as momentum does."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.mesh.shard_maps import unreduce
from gradcomp.codecs import QSGD, RandomK, TopK
from gradcomp.exchange import Hierarchical
from tests.specs import sparse, top_k
from tests.support import modes
from tests.support.assertions import says
from tests.support.sparse_steps import N, check_conservation, gradients, trail

redsync = functools.partial(
  gradcomp.redsync, axis_name="data", exchange="all_gather", min_leaf_size=64
)


def inner_trail(tx, steps):
  """As :func:`trail` of a switch: the states of what it switches."""
  return [(output, state.inner) for output, state in trail(tx, steps)]


def test_switch_changes_the_density_in_one_compilation():
  """Dense until step 2, then sparse, then sparser; residuals and momentum go on."""
  densities, steps = [1, 0.25, 0.02], gradients(7)
  tx = gradcomp.wrappers.switch([2, 4], [redsync(d, 0.9) for d in densities])
  passed = inner_trail(tx, steps)  # which asserts that there is one program
  check_conservation(passed, steps, 0.9, True, sparse=lambda step: step >= 2)
  sent = [np.count_nonzero(output["w"][0]) for output, _ in passed]
  waiting = [np.count_nonzero(state.residual["w"]) for _, state in passed]
  k = [top_k.entries_of(d, 630) for d in densities]
  assert sent[:2] == [630, 630] and waiting[:2] == [0, 0]
  assert all(k[1] <= count <= 4 * k[1] for count in sent[2:4])
  assert all(k[2] <= count <= 4 * k[2] for count in sent[4:])
  assert min(waiting[2:]) > 0
  kept = [state.memory.own[("data",)][1] for _, state in passed]
  assert [int(own.used[0, 0]) for own in kept] == [0, 0, k[1], k[1], k[2], k[2], k[2]]
  assert [int(state.count[0]) for _, state in passed] == list(range(1, 8))


def test_a_residual_that_nothing_keeps_is_sent():
  """Once and for all, by a part without feedback: nothing is lost."""
  steps = gradients(3)
  plain = gradcomp.dense(axis_name="data", exchange="psum", feedback=None)
  tx = gradcomp.wrappers.switch(
    [1, 2], [redsync(0.02, None), plain, redsync(0.02, None)]
  )
  passed = inner_trail(tx, steps)
  check_conservation(passed, steps, None, False)
  waiting = [np.count_nonzero(state.residual["w"]) for _, state in passed]
  assert waiting[0] > 600 and waiting[1] == 0 and waiting[2] > 600


@pytest.mark.parametrize(
  "boundaries, parts",
  [
    ([0], ("`boundaries`", "ascending", "[0]")),
    ([-1], ("`boundaries`", "ascending", "[-1]")),
    ([2, 2], ("`boundaries`", "ascending", "[2, 2]")),
    ([3, 2], ("`boundaries`", "ascending", "[3, 2]")),
    ([1.5], ("`boundaries`", "ascending", "1.5")),
    ([True], ("`boundaries`", "ascending", "True")),
    ([5, 2**31], ("`boundaries`", "below 2**31", "[5, 2147483648]")),
    (3, ("`boundaries`", "ascending", "3")),
    ([], ("`transformations`", "one more", "0 boundaries", "2")),
    ([1, 2], ("`transformations`", "one more", "2 boundaries", "2")),
  ],
  ids=str,
)
def test_bad_boundaries(boundaries, parts):
  with pytest.raises(ValueError, match=says(*parts)):
    gradcomp.wrappers.switch(boundaries, [optax.identity(), optax.identity()])


@pytest.mark.parametrize(
  "other",
  [
    optax.trace(0.9),
    optax.scale_by_adam(),
    gradcomp.compress(TopK(), exchange=Hierarchical(group_size=2), axis_name="data"),
    redsync(0.02, exchange="two_shot"),
  ],
  ids=["trace", "adam", "hierarchical", "two_shot"],
)
def test_states_that_do_not_fit_together(other):
  params = {"w": jnp.ones((9, 70))}
  tx = gradcomp.wrappers.switch([3], [redsync(0.02), other])
  init = jax.vmap(lambda p: tx.init(params), axis_name="data")
  with pytest.raises(ValueError, match=says("`transformations`", "must keep")):
    init(jnp.arange(N))


def test_a_parameter_may_be_named_like_what_owners_keep():
  """Only their own residuals must not wait through a transformation without them."""
  params = {".server_residual": jnp.ones((9, 70))}
  gradcomp.wrappers.switch([3], [redsync(0.02), redsync(0.02, None)]).init(params)


def clipped_mean(gradient, limit):
  parts = [sparse.clip([x[i] for x in gradient.values()], limit) for i in range(N)]
  return [np.mean(leaves, axis=0) for leaves in zip(*parts, strict=True)]


def clipping(max_norm, rule):
  return optax.chain(
    gradcomp.wrappers.clip_by_local_norm(max_norm, axis_name="data", rule=rule),
    gradcomp.dense(axis_name="data"),
  )


@pytest.mark.parametrize(
  "place, rule, limit",
  [
    ("vmap", "own", 20),
    ("shard_map", "root", 10),
    (modes.AUTO, "root", 10),
    (modes.EXPLICIT, "own", 20),
    (modes.EXPLICIT, "share", 40),
  ],
  ids=str,
)
def test_local_clipping(place, rule, limit):
  """Of each worker's whole gradient; some are below the limit, one is zero."""
  (gradient,) = gradients(1)
  gradient = {
    name: x * np.float32([1, 0.01, 30, 0]).reshape(N, *[1] * (x.ndim - 1))
    for name, x in gradient.items()
  }
  tx = clipping(20.0, rule)  # a normal gradient here has a norm of about 35
  update = lambda g: tx.update(g, tx.init(g))[0]
  if place == "vmap":
    output = jax.jit(jax.vmap(update, axis_name="data"))(gradient)
    output = jax.tree.map(lambda x: x[0], output)
  elif place == "shard_map":
    local = lambda g: update(jax.tree.map(lambda x: x[0], g))
    mesh = modes.mesh(N)
    output = jax.jit(
      jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P())
    )(gradient)
  elif place == modes.AUTO:
    rows = jax.device_put(gradient, NamedSharding(modes.mesh(N), P("data")))
    output = jax.jit(lambda g: update(gradcomp.PerWorker(g, "data")))(rows)
  else:
    mesh = modes.mesh(N, AxisType.Explicit)
    addends = jax.tree.map(lambda x: x / np.float32(N), gradient)
    addends = jax.device_put(addends, NamedSharding(mesh, P("data")))
    output = jax.jit(lambda g: update(unreduce(g, "data")))(addends)
  for x, expected in zip(
    jax.tree.leaves(output), clipped_mean(gradient, limit), strict=True
  ):
    # A norm of 1,263 squares, a factor and a mean of four: elements are below 4.
    np.testing.assert_allclose(x, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_shares_are_clipped_as_in_deep_gradient_compression(workers):
  """Its threshold is that of a sum, to which each worker adds a share."""
  rng = np.random.default_rng(workers)
  sizes = np.geomspace(8, 0.5, workers)[:, None]  # of norms near 16
  parts = [rng.standard_normal((workers, n)).astype(np.float32) for n in (200, 56)]
  parts = [np.float32(sizes) * x for x in parts]
  tx = clipping(20.0, "share")
  update = lambda g: tx.update(g, tx.init(g))[0]
  got = jax.jit(jax.vmap(update, axis_name="data"))(parts)
  shares = [[x[i] / np.float64(workers) for x in parts] for i in range(workers)]
  clipped = [np.sqrt(sum((x**2).sum() for x in s)) > 20 * workers**-0.5 for s in shares]
  assert any(clipped) and (workers == 1 or not all(clipped))
  for x, expected in zip(got, sparse.clipped_sum(shares, 20.0), strict=True):
    # A norm of 256 squares, two factors and a mean of eight, each within an ulp of
    # elements below 8.
    np.testing.assert_allclose(x[0], expected, rtol=0, atol=4e-6)


@pytest.mark.parametrize(
  "rule, alike, apart",
  [("own", 1, 1 / 2), ("share", 2, 1), ("root", 1 / 2, 1 / 4)],
)
def test_the_norm_of_the_mean(rule, alike, apart):
  """Of four workers that agree, which is the most, and of independent ones."""
  tx = clipping(3.0, rule)
  update = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data"))
  for gradient, norm in ((np.ones((N, N)), alike), (np.eye(N), apart)):
    mean = update(np.float32(100 * gradient))[0]
    # Norms of four squares, and means of four: some ulps.
    np.testing.assert_allclose(np.linalg.norm(mean), 3 * norm, rtol=1e-6)


def test_redsync_clips_in_front_of_momentum():
  """Of the first step, sent and waiting are Nesterov's (1 + m) g of clipped g."""
  steps = gradients(1)
  ((output, (_, state)),) = trail(redsync(0.05, 0.9, max_norm=1.0), steps)
  sent = N * np.float64(output["w"][0])
  waiting = np.float64(state.residual["w"]).sum(axis=0)
  expected = 1.9 * N * clipped_mean(steps[0], 1.0)[-1]
  # Sums of four elements below 0.3.
  np.testing.assert_allclose(sent + waiting, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_clipped_gradient_that_is_not_finite_stays_as_it_is(bad):
  tx = gradcomp.wrappers.clip_by_local_norm(1.0)
  tree = [jnp.array([1.0, bad, 2.0]), jnp.array([0.5])]
  chex.assert_trees_all_equal(tx.update(tree, tx.init(tree))[0], tree)


@pytest.mark.parametrize("size", [1e-37, 1e-23, 1.0, 2e19, 3e38])
def test_no_finite_gradient_overflows_or_escapes_clipping(size):
  """Squares of numbers above 1.8e19 would overflow, of those below 1e-23 vanish."""
  x = np.float32(size) * np.float32([0.6, -0.8, 0.0])
  tx = gradcomp.wrappers.clip_by_local_norm(size / 4)
  (clipped,), _ = tx.update([jnp.asarray(x)], None)
  # A norm of three squares, and three products: each within an ulp.
  np.testing.assert_allclose(clipped, x / np.float32(4), rtol=2.0**-21)
  (kept,), _ = gradcomp.wrappers.clip_by_local_norm(2 * min(size, 1e38)).update(
    [x / 4], None
  )
  np.testing.assert_array_equal(kept, x / 4)


@pytest.mark.parametrize("selection", ["auto", "sampled"])
def test_the_state_keeps_its_dtypes_in_double_precision(selection):
  """Or a scan over steps would not be one, and a second step would compile again."""
  tx = gradcomp.compress(TopK(density=0.01, selection=selection), min_leaf_size=64)
  tree = {"w": jnp.ones((100, 100)), "b": jnp.ones(1)}
  with jax.enable_x64(True):
    state = tx.init(tree)
    after = jax.eval_shape(tx.update, tree, state)[1]
  chex.assert_trees_all_equal_shapes_and_dtypes(after, state)


@pytest.mark.parametrize(
  "codec, exchange, selects",
  [
    (TopK(density=0.05, selection="sampled"), "two_shot", True),
    (TopK(density=0.05), "all_gather", True),
    (RandomK(density=0.05), "psum", False),
  ],
  ids=["sampled-two_shot", "auto-all_gather", "RandomK-psum"],
)
def test_states_are_stacked_under_a_mesh(codec, exchange, selects):
  """What a worker has of its own is sharded over the axis, all else is replicated."""
  tx = gradcomp.compress(
    codec, axis_name="data", exchange=exchange, feedback="momentum", min_leaf_size=64
  )
  params = {"b": jnp.ones(3), "w": jnp.ones((10, 70))}
  with jax.set_mesh(modes.mesh(N)):
    state = tx.init(params)
  specs = gradcomp.state_specs(state, axis_name="data")
  chex.assert_shape([state.velocity["w"], state.residual["w"]], (4 * 10, 70))
  assert specs.velocity["w"] == specs.residual["w"] == P("data")
  assert specs.count == specs.key == P()
  if not selects:
    assert state.memory is None and specs.memory is None
    return
  rows = N if exchange == "two_shot" else 1
  chex.assert_shape(state.memory.own[("data",)][1].used, (N * rows,))
  assert all(spec == P("data") for spec in specs.memory.own[("data",)][1])
  assert bool(state.server_residual) == (exchange == "two_shot")
  local = jax.vmap(lambda _: tx.init(params), axis_name="data")(jnp.arange(N))
  chex.assert_shape(local.memory.own[("data",)][1].used, (N, rows))


def test_without_a_map_or_a_mesh_nothing_is_selected_again():
  """Nobody knows the workers; only what uses thresholds again needs them."""
  params = {"w": jnp.ones((10, 70))}
  gradient = {"w": jnp.ones((N, 10, 70))}
  for selection in ("exact", "sampled"):
    tx = redsync(0.05, selection=selection)
    state = tx.init(params)
    assert state.memory is None
    local = lambda g, tx=tx, state=state: tx.update(g, state)[0]
    update = jax.jit(jax.vmap(local, axis_name="data"))
    if selection == "exact":
      assert jnp.count_nonzero(update(gradient)["w"][0]) == 35
      continue
    with pytest.raises(ValueError, match=says("`memory`", "thresholds", "got none")):
      update(gradient)


FEATURES, STEPS = 256, 400


@functools.cache
def problem():
  """Noisy least squares, of which each worker has its own part: features, targets."""
  rng = np.random.default_rng(0)
  x = rng.standard_normal((N, 256, FEATURES)).astype(np.float32)
  y = x @ rng.standard_normal(FEATURES) + 3 * rng.standard_normal((N, 256))
  return jnp.asarray(x), jnp.asarray(y, jnp.float32)


def train(exchange, sgd):
  """The loss over all workers' data, after training from zero."""
  x, y = problem()
  loss = lambda w, x, y: jnp.mean((x @ w - y) ** 2)
  optimizer = optax.chain(exchange, sgd)

  @functools.partial(jax.vmap, axis_name="data")
  def run(x, y):
    def step(carry, _):
      w, state = carry
      updates, state = optimizer.update(jax.grad(loss)(w, x, y), state)
      return (optax.apply_updates(w, updates), state), None

    w = jnp.zeros(FEATURES)
    return jax.lax.scan(step, (w, optimizer.init(w)), length=STEPS)[0][0]

  w = jax.jit(run)(x, y)
  np.testing.assert_array_equal(w, jnp.broadcast_to(w[:1], w.shape))
  return float(jax.vmap(loss, in_axes=(None, 0, 0))(w[0], x, y).mean())


def test_redsync_trains_as_dense_momentum_does():
  """One in twenty elements at a time; without what waits, it does not."""
  rate = optax.cosine_decay_schedule(0.01, STEPS)
  dense = train(
    gradcomp.dense(axis_name="data"), optax.sgd(rate, momentum=0.9, nesterov=True)
  )
  for quantize in (None, "asq"):
    sparse = train(redsync(0.05, 0.9, quantize=quantize), optax.sgd(rate))
    assert sparse == pytest.approx(dense, rel=0.01), quantize
  lost = gradcomp.compress(
    TopK(density=0.05), axis_name="data", exchange="all_gather", feedback=None
  )
  assert train(lost, optax.sgd(rate, momentum=0.9, nesterov=True)) > 1.5 * dense


def test_momentum_of_a_bucket_that_is_not_finite_stays():
  """A codec that sends all elements masks no momentum, and keeps nothing of a NaN."""
  tx = gradcomp.compress(
    QSGD(bits=8, bucket_size=32, rounding="nearest"),
    feedback=gradcomp.MomentumFeedback(decay=0.5),
    min_leaf_size=0,
  )
  clean = jnp.linspace(1.0, 2.0, 256).reshape(8, 32)
  update = jax.jit(tx.update)
  _, before = update(clean, tx.init(clean))
  _, after = update(clean.at[2, 5].set(jnp.nan), before)
  expected = np.array(0.5 * clean + clean)
  expected[2] = clean[2]
  np.testing.assert_array_equal(before.velocity, clean)
  np.testing.assert_array_equal(after.velocity, expected)
