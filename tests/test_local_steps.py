"""local_steps: workers train alone for some steps, and exchange what they changed."""

import jax
import jax.numpy as jnp
import modes
import numpy as np
import optax
import pytest
from assertions import assert_same_bits
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from local_cases import LEAVES, N, Nesterov, diloco, local, sparseloco, streaming
from slow_cases import slow
from zero_cases import gradients, last, loss_fn, sharded, train, tree

import gradcomp
from gradcomp.codecs import QSGD, Dense, FloatCast, TopK

ADAM = optax.adamw(0.05, weight_decay=0.1)
NESTEROV = optax.sgd(0.7, 0.9, nesterov=True)
MODES = ["vmap", "pmap", "shard_map", "shard_map_unchecked", "explicit"]


def flat(params):
  """The parameters of each worker in one vector, ``[N, n]``, in the order of leaves."""
  leaves = jax.tree.leaves(params)
  return np.concatenate([np.reshape(x, (N, -1)) for x in leaves], axis=1)


def dyadic(steps):
  """Gradients whose sums are exact in any order: multiples of 2**-10 below 8."""
  cut = lambda x: jnp.round(x * 1024) / 1024
  return [jax.tree.map(cut, given) for given in gradients(steps, LEAVES)]


@pytest.mark.parametrize(
  "mode, inner",
  [
    ("vmap", "adam"),
    ("shard_map", "sgd"),
    *slow(("pmap", "sgd"), ("explicit", "sgd")),
  ],
)
def test_with_one_step_a_round_it_is_data_parallel_training(mode, inner):
  """Of the mean of the workers' updates, to the bit: either both add in one order, or
  sums are exact in any.
  """
  inner = {"adam": ADAM, "sgd": optax.sgd(0.5)}[inner]
  params, given = tree(0, LEAVES), dyadic(3)
  got, _ = last(mode, local(inner, optax.sgd(1.0), Dense(), every=1), params, given)

  def step(gradient, state, params):
    updates, state = inner.update(gradient, state, params)
    return optax.apply_updates(params, lax.pmean(updates, "data")), state

  step = jax.jit(jax.vmap(step, axis_name="data"))
  expected = jax.tree.map(lambda x: jnp.stack([x] * N), params)
  state = jax.vmap(inner.init)(expected)
  for gradient in given:
    expected, state = step(gradient, state, expected)
  for name in LEAVES:
    assert_same_bits(got[name], expected[name])


CODECS = {
  "dense": (Dense(), {}),
  "sparse": (TopK(density=0.05), {"feedback_decay": 0.95}),
  "random": (QSGD(bits=4, bucket_size=64), {"fragments": 2, "every": 4}),
  "streaming": (
    FloatCast(exponent_bits=3, mantissa_bits=0),
    {"fragments": 3, "delay": 1, "mixing": 0.5},
  ),
}


@pytest.mark.parametrize("name", ["sparse", *slow("dense", "random", "streaming")])
def test_all_modes_have_the_same_bits(name):
  """In each step, and so all workers have. It ends in the midst of a round.

  SGD rounds alike everywhere; XLA contracts the sums of other optimizers as it likes.
  """
  codec, options = CODECS[name]
  tx = local(optax.sgd(0.5), optax.sgd(1.0), codec, **options)
  params, given = tree(0, LEAVES), dyadic(7)
  expected = list(train("vmap", tx, params, given))
  for mode in MODES[1:]:
    for (got, state), (held, kept) in zip(
      train(mode, tx, params, given), expected, strict=True
    ):
      assert_same_bits(got, held)
      assert_same_bits(state.own.moved, kept.own.moved)
      for leaf in jax.tree.leaves(got):
        assert_same_bits(leaf, np.stack([leaf[0]] * N))


def run(tx, params, given):
  """The parameters of all after each step, in one vector, and the last state."""
  held = list(train("vmap", tx, params, given))
  return [flat(params)[0] for params, _ in held], held[-1][1]


def stacked(given):
  return [flat(gradient) for gradient in given]


def start_of(params):
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(params)])


# Sums of some ten float32 numbers below 16, each rounded by at most 2**-21.
CLOSE = {"atol": 1e-5, "rtol": 0}


def test_diloco_is_that_of_the_paper():
  params, given = tree(0, LEAVES), gradients(8, LEAVES)
  tx = local(optax.sgd(0.1), NESTEROV, Dense())
  got, _ = run(tx, params, given)
  outer = Nesterov(0.7, 0.9)
  expected = diloco(start_of(params), stacked(given), rate=0.1, every=3, outer=outer)
  np.testing.assert_allclose(got, expected, **CLOSE)


@pytest.mark.parametrize("senders", [False, True])
def test_sparseloco_is_that_of_the_paper(senders):
  shapes = {"v": (300,)}
  params, given = tree(0, shapes), gradients(10, shapes)
  codec = TopK(density=0.1, selection="exact")
  merge = "senders" if senders else "mean"
  tx = local(optax.sgd(0.1), optax.sgd(1.0), codec, feedback_decay=0.95, merge=merge)
  got, _ = run(tx, params, given)
  expected = sparseloco(
    start_of(params),
    stacked(given),
    rate=0.1,
    every=3,
    count=30,
    decay=0.95,
    senders=senders,
  )
  np.testing.assert_allclose(got, expected, **CLOSE)


@pytest.mark.parametrize("delay, mixing", [(2, 0.5), *slow((0, 1.0), (0, 0.25))])
def test_streaming_is_that_of_the_paper(delay, mixing):
  shapes = {"a": (40,), "b": (10, 3), "c": (35,)}
  params, given = tree(0, shapes), gradients(20, shapes)
  tx = local(
    optax.sgd(0.1), NESTEROV, Dense(), 6, fragments=3, delay=delay, mixing=mixing
  )
  got, _ = run(tx, params, given)
  expected = streaming(
    start_of(params),
    stacked(given),
    rate=0.1,
    every=6,
    parts=[slice(0, 40), slice(40, 70), slice(70, 105)],
    delay=delay,
    mixing=mixing,
    outers=[Nesterov(0.7, 0.9) for _ in range(3)],
  )
  np.testing.assert_allclose(got, expected, **CLOSE)


@pytest.mark.parametrize(
  "codec", [TopK(density=0.1), *slow(QSGD(bits=2, bucket_size=64))], ids=repr
)
def test_nothing_of_what_workers_did_is_lost(codec):
  """What was sent and what waits add up to all steps that all workers took."""
  params, given = tree(0, LEAVES), gradients(9, LEAVES)
  tx = local(optax.sgd(0.5), optax.sgd(1.0), codec, exchange="all_gather")
  got, state = run(tx, params, given)
  sent = N * (got[-1] - start_of(params))
  waits = flat(state.fragments[0].exchange.residual).sum(axis=0)
  did = -0.5 * np.sum(stacked(given), axis=(0, 1), dtype=np.float64)
  # Sums of 36 numbers below 4, and each addition rounds by at most 2**-20.
  np.testing.assert_allclose(sent - waits, did, atol=1e-4, rtol=0)


def test_resumed_in_the_midst_of_a_round_it_goes_on_with_the_same_bits():
  """From plain arrays of the whole state."""
  tx = local(ADAM, NESTEROV, TopK(density=0.05), 4, feedback_decay=0.95)
  params, state, mesh = sharded(tx, tree(0, LEAVES))
  shardings = jax.tree.map(
    lambda spec: jax.NamedSharding(mesh, spec), gradcomp.state_specs(state, "data")
  )
  step = gradcomp.make_train_step(
    loss_fn, tx, axis_name="data", mesh=mesh, donate=False
  )
  batches = np.random.default_rng(0).normal(size=(11, N)).astype(np.float32)

  def train_on(params, state, batches):
    for batch in batches:
      params, state, _ = step(params, state, batch)
    return params, state

  expected = train_on(params, state, batches)
  saved = jax.device_get(train_on(params, state, batches[:6]))
  restored = jax.device_put(saved[1], shardings)
  assert_same_bits(train_on(saved[0], restored, batches[6:]), expected)
  assert step._cache_size() <= 2  # once for arrays of NumPy's


def test_one_program_sends_in_a_branch_and_nothing_elsewhere():
  """Its bytes are those of the payload, as explain says them."""
  tx = local(optax.sgd(0.5), NESTEROV, QSGD(bits=4))
  params, state, mesh = sharded(tx, tree(0, {"w": (64, 512)}))
  step = gradcomp.make_train_step(loss_fn, tx, axis_name="data", mesh=mesh, report=True)
  batch = jnp.ones(N)
  report = gradcomp.wire_report(step.lower(params, state, batch))
  assert report.collectives and all(x.in_branch for x in report.collectives)
  found = gradcomp.explain(tx, params, workers=N)
  assert report.bytes_sent == found.bytes_sent
  assert "a round of 3 steps" in str(found) and "2.03 bits" in str(found)
  batch = jax.device_put(batch, jax.NamedSharding(mesh, jax.P("data")))
  for i in range(7):
    params, state, metrics = step(params, state, batch)
    assert (metrics["update_norm"] > 0) == (i % 3 == 2)
  assert metrics["loss"].shape == metrics["gradient_norm"].shape == (N,)
  np.testing.assert_allclose(metrics["bytes_sent"], found.bytes_sent / 3)
  assert step._cache_size() == 1


def test_inspect_measures_the_difference_in_a_step_that_sends_it():
  tx = local(optax.sgd(0.5), NESTEROV, TopK(density=0.1))
  params, state, mesh = sharded(tx, tree(0, {"w": (20, 50)}))
  step = gradcomp.make_train_step(loss_fn, tx, axis_name="data", mesh=mesh)
  errors = []
  for _ in range(3):
    params, state, metrics = step(params, state, jnp.ones(N), inspect=True)
    errors.append(float(metrics["inspection"].total.relative_error))
  assert np.isnan(errors[:2]).all() and 0 < errors[2] < 1


def test_what_is_not_finite_is_seen_and_does_not_stay_in_residuals():
  """It makes the parameter NaN on all workers; apply_if_finite drops the step."""
  params, given = tree(0, {"v": (300,)}), gradients(6, {"v": (300,)})
  bad = given[0]["v"].at[1, 7].set(jnp.nan)
  given = [{"v": bad}, *given[1:]]
  codec = TopK(density=0.1)
  got, state = last("vmap", local(optax.sgd(0.1), optax.sgd(1.0), codec), params, given)
  assert np.isnan(got["v"][:, 7]).all() and np.isfinite(got["v"][:, 8]).all()
  assert np.isfinite(state.fragments[0].exchange.residual["v"]).all()
  inner = optax.apply_if_finite(optax.sgd(0.1), 3)
  tx = local(inner, optax.sgd(1.0), codec)
  for mode in ("vmap", "shard_map"):
    got, state = last(mode, tx, params, given)
    assert np.isfinite(got["v"]).all()
    counts = state.own.inner_state.total_notfinite
    assert np.ravel(counts).tolist() == [0, 1, 0, 0]


def test_another_number_of_workers_goes_on_behind_an_exchange():
  """Residuals keep their sum, and new workers get the inner state of old ones."""
  tx = local(ADAM, NESTEROV, TopK(density=0.1))
  params = tree(0, {"w": (20, 50)})
  _, state = last("shard_map", tx, params, gradients(3, {"w": (20, 50)}))
  specs = gradcomp.state_specs(state, "data")
  whole = lambda x, spec: x.reshape(-1, *x.shape[2:]) if spec != P() else x[0]
  state = jax.tree.map(whole, state, specs)
  how = dict(optimizer=tx, params=params, axis_name="data", old_workers=N, workers=6)
  moved = gradcomp.reshard_state(state, **how)
  old, new = (x.own.inner_state[0].mu["w"] for x in (state, moved))
  assert_same_bits(new.reshape(6, -1), old.reshape(N, -1)[[0, 1, 2, 3, 0, 1]])
  old, new = (x.fragments[0].exchange.residual["w"] for x in (state, moved))
  assert_same_bits(new.reshape(6, -1).sum(0), old.reshape(N, -1).sum(0))
  away = jax.tree.map(lambda x: x + 1, state.own.by_axes[("data",)][0])
  own = {("data",): (away, state.own.inner_state)}
  state = state._replace(own=state.own._replace(by_axes=own))
  with pytest.raises(ValueError, match="must be that behind an exchange"):
    gradcomp.reshard_state(state, **how)


def test_a_record_says_what_the_state_belongs_to():
  def record(workers=N, **options):
    tx = local(ADAM, NESTEROV, TopK(density=0.1), **options)
    return gradcomp.state_record(tx, tree(0, LEAVES), workers=workers)

  gradcomp.check_record(record(), record(every=5))
  for what, saved in {
    "number of gradcomp transformations": record(fragments=3),
    "residual_decay": record(feedback_decay=0.5),
    "number of workers": record(workers=8),
    "delay": record(delay=1),
  }.items():
    with pytest.raises(ValueError, match=what):
      gradcomp.check_record(saved, record())


def test_each_worker_has_the_gradient_at_its_own_parameters():
  """Also in plain jit under Explicit axes, and typed as its own in shard_map."""
  params, target = tree(0, {"w": (5,)}), tree(1, {"w": (5,)}, N)
  tx = local(optax.sgd(0.25), optax.sgd(1.0), Dense(), every=2)

  def loss_fn(params, state, target):
    own = gradcomp.local_params(params, state)
    return jnp.sum((own["w"] - target["w"].reshape(5)) ** 2) / 2

  def step(target, state, params):
    grad_fn = gradcomp.value_and_grad(loss_fn, axis_name="data")
    _, grads = grad_fn(params, state, target)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  mean = jax.tree.map(lambda x: x.mean(axis=0), target)
  # Two steps of a quarter leave 9/16 of the distance to a worker's own target.
  expected = params["w"] * 9 / 16 + mean["w"] * 7 / 16
  got, _, mesh = sharded(tx, params, AxisType.Explicit)
  with jax.set_mesh(mesh):
    state = tx.init(got)
    cut = jax.device_put(target, jax.NamedSharding(mesh, P("data")))
    for _ in range(2):
      got, state = jax.jit(step)(cut, state, got)
  np.testing.assert_allclose(got["w"], expected, atol=1e-6, rtol=0)  # an ulp or two

  got, state, mesh = sharded(tx, params)
  specs = gradcomp.state_specs(state, "data")

  def local_step(target, state, params):
    own = gradcomp.local_params(params, state)
    assert jax.typeof(own["w"]).manual_axis_type.varying == {"data"}
    return step(target, state, params)

  mapped = jax.jit(
    jax.shard_map(
      local_step, mesh=mesh, in_specs=(P("data"), specs, P()), out_specs=(P(), specs)
    )
  )
  for _ in range(2):
    got, state = mapped(target, state, got)
  np.testing.assert_allclose(got["w"], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("codec", [QSGD(bits=8), *slow(Dense())], ids=repr)
def test_islands_average_in_every_step_and_step_alone_between(codec):
  """Two axes: a compressed exchange inside of the worker's optimizer."""
  mesh = jax.make_mesh((2, 2), ("island", "chip"), (AxisType.Auto,) * 2)
  inside = optax.chain(
    gradcomp.qsgd(bits=8, axis_name="chip", feedback="error", exchange="two_shot"),
    optax.sgd(0.25),
  )
  tx = gradcomp.local_steps(
    inside, optax.sgd(1.0), every=2, codec=codec, axis_name="island"
  )
  params = tree(0, {"w": (4, 256)})
  axes = "island", "chip"
  state = gradcomp.init_state(tx, params, axes, param_specs={"w": P()}, mesh=mesh)
  step = gradcomp.make_train_step(
    lambda params, target: jnp.mean(jnp.sum((params["w"] - target) ** 2, (1, 2))) / 2,
    tx,
    axis_name=axes,
    mesh=mesh,
    donate=False,
  )
  target = tree(1, {"w": (4, 256)}, N)["w"]
  got = params
  for _ in range(2):
    got, state, metrics = step(got, state, target)
  expected = params["w"] * 9 / 16 + target.mean(axis=0) * 7 / 16
  # A step of 8 bits is at most 8/127. Two quarters of it, and a half at an owner's.
  np.testing.assert_allclose(got["w"], expected, atol=0.1, rtol=0)
  assert metrics["loss"].shape == (4,)


@pytest.mark.parametrize(
  "options, rule",
  [
    ({"every": 0}, "`every` must be a number, 1 or more"),
    ({"fragments": 4}, "`fragments` must be a number, from 1 to 3"),
    ({"delay": 3}, "`delay` must be a number, from 0 to 2"),
    ({"mixing": 0.0}, "`mixing` must be a number above 0"),
    ({"merge": "all"}, "`merge` must be one of"),
    ({"merge": "senders"}, '`merge` must be "mean" for a codec of which each worker'),
    ({"feedback_decay": 2.0}, "`feedback_decay` must be a number above 0"),
    ({"feedback": None, "feedback_decay": 0.9}, "`feedback_decay` must be 1 unless"),
    (
      {"merge": "senders", "codec": TopK(), "exchange": "two_shot"},
      '`exchange` must be "auto" or "all_gather"',
    ),
  ],
  ids=str,
)
def test_a_bad_option_is_an_error(options, rule):
  with pytest.raises(ValueError, match=rule):
    local(ADAM, NESTEROV, **{"codec": Dense(), **options})


def test_a_bad_state_or_parameter_is_an_error():
  tx, params = local(ADAM, NESTEROV, Dense()), {"w": jnp.ones(3)}
  with pytest.raises(ValueError, match="`axis_name` must be an axis that init can"):
    tx.init(params)
  with pytest.raises(TypeError, match="must have a real float dtype"):
    tx.init({"w": jnp.ones(3, jnp.complex64)})
  with pytest.raises(ValueError, match="`fragments` must be at most the number of"):
    jax.vmap(local(ADAM, NESTEROV, Dense(), fragments=2).init, axis_name="data")(
      {"w": jnp.ones((2, 3))}
    )
  placed, state, _ = sharded(tx, params)
  with pytest.raises(ValueError, match="must be that of one worker"):
    gradcomp.local_params(placed, state)
  with pytest.raises(TypeError, match="`state` must be a gradcomp.LocalStepsState"):
    tx.update(params, (), params)
  with pytest.raises(ValueError, match="`params` must be given"):
    tx.update(params, state)
  with pytest.raises(ValueError, match="must be made for 1 fragments, got 3"):
    three = local(ADAM, NESTEROV, Dense(), fragments=3)
    more = tree(0, LEAVES)
    tx.update(more, sharded(three, more)[1], more)
  step = gradcomp.make_train_step(
    lambda p, m, x: (jnp.sum(p["w"]) * x.mean(), m),
    tx,
    axis_name="data",
    mesh=modes.mesh(N),
    model_state="mean",
  )
  with pytest.raises(ValueError, match='`model_state` must be "local" or None'):
    step(placed, state, jnp.ones(1), jnp.ones(N))
