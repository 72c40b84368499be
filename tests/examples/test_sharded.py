"""The examples of sharded parameters compute the numbers of whole models."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcomp
from examples import fsdp_linen, hsdp
from examples.lib import fsdp, runs, texts
from gradcomp._src.report import hlo
from gradcomp.codecs import QSGD, Dense
from tests.plugins.slow_cases import slow
from tests.support.cases.parallel import nbytes

N = 4


@pytest.fixture
def batch():
  tokens = np.random.default_rng(0).integers(0, 16, (2 * N, 7))
  return texts.Tokens(tokens[:, :-1].astype(np.uint8), tokens[:, 1:].astype(np.int32))


def loss_of(params, model, batch):
  logits, (_, labels) = model.apply({"params": params}, batch[0]), batch
  return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def per_worker(tree):
  """A leaf of all workers as ``[N, ...]``, each an equal part of the first axis."""
  return jax.tree.map(lambda x: x.reshape(N, x.shape[0] // N, *x.shape[1:]), tree)


# Sums of a few terms in other orders.
close = functools.partial(chex.assert_trees_all_close, rtol=1e-4, atol=1e-6)


def test_linen_has_the_gradients_of_whole_parameters(batch, monkeypatch):
  sizes = dict(symbols=16, width=8, heads=2, layers=1)
  plain = texts.Transformer(**sizes)
  model = texts.Transformer(**sizes, block=fsdp_linen.GatheredBlock)
  for name, value in dict(WEIGHTS=None, GRADS=None, model=model, plain=plain).items():
    monkeypatch.setattr(fsdp_linen, name, value)

  @jax.jit
  def both(batch):
    params = plain.init(jax.random.key(0), batch.inputs)["params"]
    worker = jax.vmap(fsdp_linen.worker, axis_name="data")
    zeros = jax.tree.map(lambda w: jnp.zeros((N, *w.shape), jnp.float32), params)
    given = per_worker(params), zeros, per_worker(batch)
    value, grads = jax.value_and_grad(loss_of)(params, plain, batch)
    whole, _ = jax.vmap(fsdp_linen.whole_gradients, axis_name="data")(*given)
    added = jax.tree.map(lambda x: x.sum(axis=0), whole)
    return worker(*given), added, (jnp.stack([value] * N), per_worker(grads), grads)

  (loss, grads, residuals), added, want = both(batch)
  close((loss, grads, added), want)
  assert not any(x.any() for x in jax.tree.leaves(residuals))


def test_what_gathers_lose_is_seen_by_another_exchange(monkeypatch):
  """Of 4 parts one stays as it is: gather loses some 3/4 of the squares seen."""
  codec = QSGD(bits=3, bucket_size=32, rounding="nearest")
  monkeypatch.setattr(runs, "SMALL", 64)
  grads, old = np.random.default_rng(0).standard_normal((2, N, 16, 40), np.float32)
  old /= 10
  exchange = runs.exchange_of(codec)

  def both(g, e):
    # A scale beside it, of which nothing waits.
    seen = runs.inspected(exchange, {"w": g, "s": g[0]}, {"w": e, "s": None})
    options = dict(axis_name="data", params=None, grads=codec)
    gathered = lambda w, e: gradcomp.parallel.gather(w, residual=e, **options)
    _, pull = jax.vjp(gathered, jnp.zeros((16 // N, 40)), e)
    return seen.leaves, pull(g)[1]

  leaves, unsent = jax.jit(jax.vmap(both, axis_name="data"))(grads, old)
  leaf = jax.tree.map(lambda x: x[0], leaves["['w']"])
  # 2,560 errors, whose squares differ by about their mean: 4 standard deviations.
  ratio = np.mean(np.square(unsent)) * N / (leaf.residual_norm**2 / 640 * (N - 1))
  assert abs(ratio - 1) < 4 / np.sqrt(2560)
  relative = leaf.residual_norm / np.sqrt(np.sum(np.square(grads + old)) / N)
  np.testing.assert_allclose(leaf.relative_error, relative, rtol=1e-5)
  # Each of three parts of 160 elements fills its rows.
  assert leaf.bytes_sent == 3 * nbytes(codec, 640) / N
  assert leaves["['s']"].relative_error[0] == 0


HOSTS, CHIPS = 2, 4
SMALL = dict(symbols=16, width=64, heads=2, layers=1)


def hosts_step(exchange, batch):
  """A step of the example over hosts and chips, compiled; its arguments; the model."""
  plain = texts.Transformer(**SMALL)
  params = jax.jit(plain.init)(jax.random.key(0), batch.inputs)["params"]
  cut, optimizer = jax.tree.map(lambda _: P("chip"), params), optax.sgd(1.0)
  place = dict(axis_name="host", param_specs=cut)
  states = gradcomp.init_state(exchange, params, **place), optimizer.init(params)
  specs = gradcomp.state_specs(states[0], **place)
  model = texts.Transformer(**SMALL, block=hsdp.GatheredBlock)
  step = hsdp.make_step(hsdp.make_loss(model), exchange, optimizer, specs)
  mesh = jax.sharding.get_mesh()
  put = lambda tree, spec: jax.device_put(tree, jax.NamedSharding(mesh, spec))
  given = put(params, P("chip")), states, put(batch, hsdp.BOTH)
  return step.lower(*given).compile(), given, (plain, params)


@pytest.fixture(params=[AxisType.Explicit, *slow(AxisType.Auto)], ids=str)
def hosts(request):
  kinds = (request.param,) * 2
  with jax.set_mesh(jax.make_mesh((HOSTS, CHIPS), ("host", "chip"), kinds)):
    yield


def test_between_hosts_only_words_of_gradients_travel(batch, hosts):
  """One number is an exception, the loss that is shown."""
  codec = QSGD(bits=4, bucket_size=32)
  options = dict(axis_name="host", exchange="all_gather", min_leaf_size=1024)
  program, _, (_, params) = hosts_step(gradcomp.compress(codec, **options), batch)
  found = hlo.parse_program(program.as_text())
  assert np.prod(found.devices) == HOSTS * CHIPS
  crossing, inside = [], []
  for collective, groups, *_ in found.collectives:
    assert collective.times == 1
    between = any(len({i // CHIPS for i in x}) > 1 for x in groups)
    (crossing if between else inside).append(collective)
    # Between hosts, a chip talks to those that own the same part.
    assert not between or all(len({i % CHIPS for i in x}) == 1 for x in groups)
  arrays = [array for collective in crossing for array in collective.operands]
  assert [array for array in arrays if array[0] != "u32"] == [("f32", ())]
  words = sum(int(np.prod(shape)) for dtype, shape in arrays if dtype == "u32")
  sizes = [w.size // CHIPS for w in jax.tree.leaves(params)]
  assert 4 * words == sum(nbytes(codec if n >= 1024 else Dense(), n) for n in sizes)
  assert {dtype for x in inside for dtype, _ in x.operands} == {"f32"}
  report = gradcomp.wire_report(program, mesh=jax.sharding.get_mesh())
  assert set(report.by_axis) == {"host", "chip"}
  assert report.by_axis["host"].bytes_sent == 4 * words * (HOSTS - 1) + 4


def test_hosts_take_the_step_of_one_whole_model(batch, hosts):
  program, given, (plain, params) = hosts_step(gradcomp.dense(axis_name="host"), batch)
  stepped, _, loss, _ = program(*given)
  whole = jax.jit(jax.value_and_grad(loss_of), static_argnums=1)
  want, grads = whole(params, plain, batch)
  np.testing.assert_allclose(loss, want, rtol=1e-5)
  close(stepped, jax.tree.map(jnp.subtract, params, grads))


MODEL = texts.Transformer(32, width=32, heads=2, layers=1)  # rows of 128 a worker
DESCENT = optax.sgd(0.5, momentum=0.9)


@pytest.mark.parametrize("bits", [32, *slow(4)])
def test_cut_parameters_train_as_whole_ones_do(bits):
  """Two steps of four workers; what is lost is kept, and nobody sends to himself."""
  loss_fn = lambda params, batch: loss_of(params, MODEL, batch)
  few = lambda x: Dense() if bits == 32 else QSGD(bits=x, bucket_size=128)
  grads, weights = few(bits), few(2 * bits)
  of = dict(loss_fn=loss_fn, optimizer=DESCENT, feedback=True)
  net = fsdp.Fsdp(weights=weights, grads=grads, **of)
  drawn = texts.batches(np.arange(1000, dtype=np.uint8) % 31, 2 * N, 8, seed=0)
  batches = jax.tree.map(lambda *x: np.stack(x), next(drawn), next(drawn))

  def whole(carry, batch):
    params, state = carry
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, state = DESCENT.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), loss

  def worker(shards, batches):
    def step(carry, batch):
      shards, state, metrics = net.step(*carry, batch)
      return (shards, state), metrics["loss"]

    (shards, state), losses = jax.lax.scan(step, (shards, net.init(shards)), batches)
    return losses, shards, state.residuals

  @jax.jit
  def both(batches):
    params = MODEL.init(jax.random.key(0), np.zeros((1, 2), np.uint8))["params"]
    (after, _), losses = jax.lax.scan(whole, (params, DESCENT.init(params)), batches)
    cut = lambda x: x.reshape(2, N, -1, *x.shape[2:]).swapaxes(0, 1)
    run = jax.vmap(worker, axis_name="data")
    found = run(per_worker(params), jax.tree.map(cut, batches))
    return (jnp.stack([losses] * N), per_worker(after)), found

  (losses, after), (found, shards, kept) = jax.device_get(both(batches))
  kept = jax.tree.leaves(kept)
  if bits == 32:  # which loses nothing
    close((found, shards), (losses, after))
    assert len(kept) == 5 and not any(map(np.any, kept))
  else:
    np.testing.assert_allclose(found, losses, rtol=0.02)  # of weights in 8 bits
    own = [np.split(x[i], N)[i] for x in kept for i in range(N)]
    assert all(map(np.any, kept)) and not any(map(np.any, own))
