"""A train step whose loss scans its layers takes the steps of a scan by hand."""

import functools
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp import parallel
from gradcomp._src.kernels.common.dithers import fold_key
from gradcomp.codecs import QSGD, Dense
from tests.errors import table
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits, says
from tests.support.cases.scan import ROWS, WIDTH, body, layers_of, loss_of, whole
from tests.support.cases.steps import OVER, N, put

LENGTH = 4
WAY = OVER | {"codec": QSGD(bits=4, bucket_size=64), "exchange": "two_shot"}
LABELS = {"layers": "layers", "embedding": "others"}


def loss_fn(params, batch, scan):
  x = batch["x"] @ params["embedding"]
  return loss_of(scan(body, x, params["layers"]), batch["weights"])


# Updates that leave whole numbers, of which sums are exact in any order.
to_whole = optax.stateless(
  lambda updates, params: jax.tree.map(lambda u, p: jnp.sign(u) - p, updates, params)
)


def optimizer_of(layers, others=None, then=to_whole):
  others = others or gradcomp.qsgd(bits=4, axis_name="data", feedback="error")
  parts = {"layers": layers, "others": others}
  return optax.chain(optax.partition(parts, LABELS), then)


def in_scan(feedback=None, **options):
  return parallel.compress_in_scan(feedback=feedback, **WAY | options)


def problem():
  layers = jax.tree.map(jnp.asarray, layers_of(LENGTH))
  embedding = jnp.asarray(np.eye(WIDTH, dtype=np.float32) * whole(WIDTH, 1, seed=2))
  x = np.concatenate([whole(ROWS, WIDTH, seed=5 + i) for i in range(N)])
  weights = np.concatenate([whole(LENGTH, WIDTH, seed=60 + i) for i in range(N)])
  return {"layers": layers, "embedding": embedding}, {"x": x, "weights": weights}


def begin(optimizer, params):
  with jax.set_mesh(modes.mesh(N)):
    return jax.jit(optimizer.init)(params)


def step_of(optimizer, loss=loss_fn, **options):
  given = OVER | {"options": gradcomp.TrainOptions(**options), "mesh": modes.mesh(N)}
  return gradcomp.make_train_step(loss, optimizer, donate=False, **given)


@functools.cache
def ready(feedback="error", exchange="two_shot"):
  """An optimizer, parameters and a batch, its first state, and its compiled step."""
  optimizer = optimizer_of(in_scan(feedback, exchange=exchange))
  params, batch = problem()
  # Placed as a step places them, so that all steps are one program.
  params = put(params, modes.mesh(N))
  step = step_of(optimizer, report=True)
  return optimizer, params, batch, begin(optimizer, params), step


def step_by_hand(others, exchange):
  """A step that a user writes with `scan`, whose new residual is a gradient."""

  def worker(params, states, batch):
    layers, others_state = states
    own = gradcomp.defer_reduction(params["embedding"], axis_name="data")
    kept, layers = layers.residual, layers.layers
    words = fold_key(layers.key, layers.count)
    key = jax.random.wrap_key_data(words, impl="threefry2x32")

    def loss(layers, embedding, kept):
      scan = lambda *given: parallel.scan(*given, residual=kept, key=key, **exchange)
      return loss_fn({"layers": layers, "embedding": embedding}, batch, scan=scan)

    grad = jax.value_and_grad(loss, (0, 1, 2))
    value, (means, grads, kept) = grad(params["layers"], own, kept)
    layers = layers._replace(count=layers.count + 1)
    if kept is not None:
      owners = kept.owners or None
      layers = layers._replace(residual=kept.leaves, server_residual=owners)
    rest, others_state = others.update({"embedding": grads}, others_state)
    updates = to_whole.update({"layers": means, **rest}, optax.EmptyState(), params)[0]
    params = optax.apply_updates(params, updates)
    states = gradcomp.state.ScanState(layers), others_state
    return params, states, lax.pmean(value, "data")

  def step(params, states, batch):
    specs = gradcomp.state_specs(states, axis_name="data")
    places = dict(in_specs=(P(), specs, P("data")), out_specs=(P(), specs, P()))
    mapped = jax.shard_map(worker, mesh=modes.mesh(N), **places)
    return mapped(params, states, batch)

  return jax.jit(step)


OTHERS = slow((None, "two_shot"), ("error", "all_gather"), (None, "all_gather"))


@pytest.mark.parametrize("feedback, exchange", [("error", "two_shot"), *OTHERS])
def test_steps_are_those_of_a_scan_by_hand(feedback, exchange):
  """Parameters, states and losses of three steps, to the bit."""
  others = gradcomp.qsgd(bits=4, axis_name="data", feedback="error")
  _, params, batch, state, step = ready(feedback, exchange)
  rest = begin(others, {"embedding": params["embedding"]})
  scanned = lambda state: state[0].inner_states["layers"].inner_state
  plain, states = params, (scanned(state), rest)
  by_hand = step_by_hand(others, WAY | dict(exchange=exchange))
  for _ in range(3):
    params, state, metrics = step(params, state, batch)
    plain, states, loss = by_hand(plain, states, batch)
    got = params, metrics["loss"], scanned(state)
    assert_same_bits(got, (plain, loss, states[0]))
  kept = jax.tree.leaves(got[2].residual)
  assert bool(kept) == (feedback is not None) and all(np.any(x) for x in kept)


def with_forms(params, *rest, scan=lax.scan, rng=None, options):
  """A loss with the results that the options ask for."""
  (before, batch) = rest if "model_state" in options else (None, *rest)
  loss = loss_fn(params, batch, scan=scan)
  if rng is not None:
    loss = loss * jax.random.randint(rng, (), 1, 4)
  if options.get("has_weight"):
    loss = loss, 2.0 + jnp.sum(batch["x"] > 2)  # of each worker 2
  aux = []
  if before is not None:
    aux.append(before + jnp.mean(batch["x"], 0))
  if options.get("has_aux"):
    aux.append({"largest": jnp.max(batch["x"])})
  return (loss, aux[0] if len(aux) == 1 else tuple(aux)) if aux else loss


FORMS = {
  "aux": dict(has_aux=True),
  "weight": dict(has_weight=True),
  "state": dict(model_state="mean", has_aux=True),
  "own state": dict(model_state="local"),
  "all": dict(has_aux=True, has_weight=True, model_state="mean"),
}


@pytest.mark.parametrize("name", ["all", *slow(*[x for x in FORMS if x != "all"])])
def test_every_form_of_a_loss_has_the_step_of_a_plain_mean(name):
  """With random numbers of each worker, in whole numbers, to the bit."""
  options = FORMS[name]
  params, batch = problem()
  dense, then = gradcomp.dense(axis_name="data"), optax.sgd(1.0)
  scanned = optimizer_of(in_scan(codec=Dense(), exchange="psum"), dense, then)
  loss = functools.partial(with_forms, options=options)
  without = lambda params, *rest, rng: loss(params, *rest, rng=rng)
  rows = (N,) if options.get("model_state") == "local" else ()
  given = [jnp.zeros((*rows, WIDTH))] if "model_state" in options else []
  result = []
  for optimizer, own in ((scanned, loss), (optax.chain(dense, then), without)):
    step = step_of(optimizer, own, report=True, **options)
    given_all = params, begin(optimizer, params), *given, batch
    after, _, *rest = step(*given_all, rng=jax.random.key(5))
    rest[-1] = {x: y for x, y in rest[-1].items() if x in ("loss", "aux")}
    result.append((after, rest))
  assert_same_bits(*result)
  assert np.any(result[0][0]["layers"]["w"] != params["layers"]["w"])


def test_a_training_goes_on_from_what_was_saved():
  """With the bits that it had, from arrays and a record that went through bytes."""
  optimizer, params, batch, state, step = ready()
  params, state, _ = step(params, state, batch)
  record = gradcomp.checkpoint.make_record(optimizer, params, workers=N)
  saved = pickle.loads(pickle.dumps((jax.device_get((params, state)), record)))
  gradcomp.checkpoint.check_record(saved[1], record)
  places = jax.tree.map(lambda x: x.sharding, (params, state))
  restored = jax.device_put(saved[0], places)
  assert_same_bits(step(*restored, batch), step(params, state, batch))
  other = optimizer_of(in_scan("error", codec=QSGD(bits=8)))
  other = gradcomp.checkpoint.make_record(other, params, workers=N)
  with pytest.raises(ValueError, match=says("the codec of ['layers']['b']", "bits=8")):
    gradcomp.checkpoint.check_record(record, other)


def test_residuals_go_on_with_fewer_workers_where_nobody_owns_rows():
  """By their mean, and what owners keep is refused."""
  params, _ = problem()
  rng = np.random.default_rng(0)
  many = dict(axis_name="data", old_workers=N, workers=2, keep="mean")

  def moved(exchange):
    layers = in_scan("error", exchange=exchange)
    optimizer = optimizer_of(layers, gradcomp.dense(axis_name="data"))
    drawn = lambda x: rng.integers(-8, 8, x.shape).astype(x.dtype)
    state = jax.tree.map(drawn, begin(optimizer, params))
    return state, gradcomp.reshard_state(optimizer, params, state, **many)

  def means(state):
    residual = state[0].inner_states["layers"].inner_state.layers.residual
    rows = lambda x: np.asarray(x).reshape(-1, LENGTH, *x.shape[1:])
    return [rows(x).mean(0) for x in jax.tree.leaves(residual)]

  old, new = map(means, moved("all_gather"))
  assert_same_bits(new, old)
  with pytest.raises(ValueError, match=says("layers in a scan", "all_gather")):
    moved("two_shot")


@pytest.mark.parametrize("exchange", ["two_shot", *slow("all_gather")])
def test_bytes_shapes_and_places_are_those_that_are_told(exchange):
  optimizer, params, batch, state, step = ready("error", exchange)
  specs = jax.tree.leaves(gradcomp.state_specs(state, axis_name="data"))
  owners = exchange == "two_shot"
  assert specs.count(P("data")) == 2 + owners + 1  # residuals of layers, and the rest
  told = gradcomp.checkpoint.state_shapes(optimizer, params, workers=N, **OVER)
  for like in (told, jax.eval_shape(step, params, state, batch)[1]):
    chex.assert_trees_all_equal_shapes_and_dtypes(like, state)
  plan = gradcomp.explain(optimizer, params, workers=N)
  report = gradcomp.wire_report(step.lower(params, state, batch).compile())
  metrics = 2 * 4 * 4 * (N - 1) // N  # a sum of float32: the loss, three of the norm
  assert report.bytes_sent == plan.bytes_sent + metrics
  assert float(step(params, state, batch)[2]["bytes_sent"]) == plan.bytes_sent
  elements = sum(x.size for x in jax.tree.leaves(params))
  assert sum(x.elements for x in plan.leaves) == elements


def test_on_one_device_the_loss_is_that_of_lax_scan():
  params, batch = problem()
  batch = jax.tree.map(lambda x: np.split(x, N)[0], batch)
  expected = jax.jit(functools.partial(loss_fn, scan=lax.scan))(params, batch)
  alone = gradcomp.make_train_step(loss_fn, optax.sgd(0.1), axis_name=None)
  state = optax.sgd(0.1).init(params)
  assert alone(params, state, batch)[2]["loss"] == expected


beside = lambda p, x, scan: loss_fn(p, x, scan) + jnp.sum(p["layers"]["w"] ** 2)
never = lambda params, batch, scan: jnp.mean(batch["x"] @ params["embedding"])
twice = lambda p, batch, scan: loss_fn(p, batch, scan) + loss_fn(p, batch, scan)
without = lambda params, batch: loss_fn(params, batch, lax.scan)


def half(params, batch, scan):
  layers = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params["layers"])
  return scan(lambda x, w: (x + jnp.sum(w["w"]), None), jnp.float32(0), layers)[0]


QSGD4 = gradcomp.qsgd(bits=4, axis_name="data")
IN_SCAN = optimizer_of(in_scan())
TWO = optimizer_of(in_scan(), in_scan())
MASKED = optax.masked(in_scan(), {"layers": True, "embedding": False})
ALONE = optax.chain(MASKED, QSGD4)
SEVERAL = optax.MultiSteps(IN_SCAN, 2).gradient_transformation()
WRONG = """
traced(QSGD4) -> `loss_fn` ... 0 of them ... partition
traced(TWO) -> `loss_fn` ... 2 of them
traced(IN_SCAN, without) -> `loss_fn` ... no parameter `scan`
traced(IN_SCAN, never) -> `loss_fn` must call
traced(IN_SCAN, twice) -> `scan` ... once ... another call
traced(IN_SCAN, half) -> `scan` ... 0 of 2 ... in the body
traced(IN_SCAN, beside) -> ['layers']['w'] ... decay
traced(optax.chain(in_scan(), QSGD4)) -> `scan` ... 2 of 3
traced(ALONE) -> ['layers']['b'] ... _in_scan ... optax.partition
traced(IN_SCAN, accumulate=2) -> `accumulate` ... lax.scan
traced(SEVERAL) -> `optax.MultiSteps` ... lax.scan
"""


def traced(optimizer, loss=loss_fn, **options):
  params, batch = problem()
  state = gradcomp.init_state(optimizer, params, mesh=modes.mesh(N), **OVER)
  return jax.eval_shape(step_of(optimizer, loss, **options), params, state, batch)


test_what_would_average_twice_or_not_at_all_is_refused = table.refused(WRONG, globals())


def test_another_axis_may_shard_all_but_the_layers():
  """Layers that it does not shard have the same step; others are refused."""
  mesh = jax.make_mesh((N, 2), ("data", "model"), (AxisType.Auto,) * 2)
  optimizer = optimizer_of(in_scan("error"), gradcomp.dense(axis_name="data"))
  params, batch = problem()
  want = step_of(optimizer)(params, begin(optimizer, params), batch)[0]
  step = gradcomp.make_train_step(loss_fn, optimizer, mesh=mesh, donate=False, **OVER)

  def taken(**specs):
    where = {"embedding": P(None, "model"), "w": P(), "b": P()} | specs
    where = {"layers": {x: where.pop(x) for x in ("w", "b")}, **where}
    placed = jax.tree.map(lambda x, spec: put(x, mesh, *spec), params, where)
    with jax.set_mesh(mesh):
      return step(placed, optimizer.init(placed), batch)[0]

  assert_same_bits(taken(), want)
  with pytest.raises(ValueError, match=says("`params`", "['model']", "jax.shard_map")):
    taken(w=P(None, None, "model"))


def test_an_inspected_step_is_refused():
  _, params, batch, state, step = ready()
  with pytest.raises(ValueError, match=says("`inspect`", "scan")):
    step.eval_shape(params, state, batch, inspect=True)
