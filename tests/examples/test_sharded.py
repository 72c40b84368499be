"""The examples of sharded parameters compute the numbers of whole models."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcomp
from examples import fsdp_linen, hsdp
from examples.lib.data import text
from examples.lib.networks import Transformer
from examples.lib.sharded import cut_gradients, cut_layers
from examples.lib.sharded.fsdp import Fsdp
from gradcomp._src.report import hlo
from gradcomp.codecs import QSGD, Dense
from tests.plugins.slow_cases import slow
from tests.support.cases.parallel import nbytes

N = 4
LENGTH = 6


@pytest.fixture
def batch():
  tokens = np.random.default_rng(0).integers(0, 16, (2 * N, LENGTH + 1))
  return text.Tokens(tokens[:, :-1].astype(np.uint8), tokens[:, 1:].astype(np.int32))


def mean_loss(logits, labels):
  return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def per_worker(tree):
  """A leaf of all workers as ``[N, ...]``, each an equal part of the first axis."""
  return jax.tree.map(lambda x: x.reshape(N, x.shape[0] // N, *x.shape[1:]), tree)


def zeros(params):
  return jax.tree.map(lambda w: jnp.zeros((N, *w.shape), jnp.float32), params)


def close(got, want):
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    # Sums of a few terms in other orders.
    np.testing.assert_allclose(np.asarray(x), y, rtol=1e-4, atol=1e-6)


def test_linen_has_the_gradients_of_whole_parameters(batch, monkeypatch):

  sizes = dict(symbols=16, width=8, heads=2, layers=1)
  monkeypatch.setattr(fsdp_linen, "WEIGHTS", None)
  monkeypatch.setattr(fsdp_linen, "GRADS", None)
  model = Transformer(**sizes, block=fsdp_linen.GatheredBlock)
  monkeypatch.setattr(fsdp_linen, "model", model)
  plain = Transformer(**sizes)
  monkeypatch.setattr(fsdp_linen, "plain", plain)

  @jax.jit
  def both(batch):
    params = plain.init(jax.random.key(0), batch.inputs)["params"]
    loss = lambda params: mean_loss(
      plain.apply({"params": params}, batch.inputs), batch.labels
    )
    worker = jax.vmap(fsdp_linen.worker, axis_name="data")
    given = per_worker(params), zeros(params), per_worker(batch)
    value, grads = jax.value_and_grad(loss)(params)
    whole, _ = jax.vmap(fsdp_linen.whole_gradients, axis_name="data")(*given)
    added = jax.tree.map(lambda x: x.sum(axis=0), whole)
    return worker(*given), added, (jnp.stack([value] * N), per_worker(grads), grads)

  (loss, grads, residuals), added, want = both(batch)
  close((loss, grads, added), want)
  assert not any(x.any() for x in jax.tree.leaves(residuals))


def test_what_gathers_lose_is_seen_by_another_exchange(monkeypatch):
  """Of 4 parts one stays as it is: gather loses some 3/4 of the squares seen."""
  codec = QSGD(bits=3, bucket_size=32, rounding="nearest")
  monkeypatch.setattr(cut_gradients, "SMALL", 64)
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  grads, old = normal(N, 16, 40), 0.1 * normal(N, 16, 40)
  exchange = cut_gradients.exchange_of(codec)

  def seen(g, e):
    # A scale beside it, of which nothing waits.
    return cut_gradients.inspect(exchange, {"w": g, "s": g[0]}, {"w": e, "s": None})

  def lost(g, e):
    gathered = lambda w, e: gradcomp.parallel.gather(
      w, axis_name="data", params=None, grads=codec, residual=e
    )
    _, pull = jax.vjp(gathered, jnp.zeros((16 // N, 40)), e)
    return pull(g)[1]

  found, unsent = jax.jit(
    lambda *args: (
      jax.vmap(seen, axis_name="data")(*args),
      jax.vmap(lost, axis_name="data")(*args),
    )
  )(grads, old)
  leaf = jax.tree.map(lambda x: x[0], found.leaves["['w']"])
  # 2,560 errors, whose squares differ by about their mean: 4 standard deviations.
  ratio = np.mean(np.square(unsent)) * N / (leaf.residual_norm**2 / 640 * (N - 1))
  assert abs(ratio - 1) < 4 / np.sqrt(2560)
  corrected = np.sum(np.square(grads + old))
  np.testing.assert_allclose(
    leaf.relative_error, leaf.residual_norm / np.sqrt(corrected / N), rtol=1e-5
  )
  # Each of three parts of 160 elements fills its rows.
  assert leaf.bytes_sent == 3 * nbytes(codec, 640) / N
  assert found.leaves["['s']"].relative_error[0] == 0


HOSTS, CHIPS = 2, 4
SMALL = dict(symbols=16, width=64, heads=2, layers=1)


def hosts_step(exchange, kind, batch):
  """A step of the example over hosts and chips, compiled; its arguments; the model."""
  plain = Transformer(**SMALL)
  params = jax.jit(plain.init)(jax.random.key(0), batch.inputs)["params"]
  cut = jax.tree.map(lambda _: P("chip"), params)
  optimizer = optax.sgd(1.0)
  states = (
    gradcomp.init_state(exchange, params, axis_name="host", param_specs=cut),
    optimizer.init(params),
  )
  specs = gradcomp.state_specs(states[0], axis_name="host", param_specs=cut)
  model = Transformer(**SMALL, block=hsdp.GatheredBlock)
  step = hsdp.make_step(hsdp.make_loss(model), exchange, optimizer, specs)
  mesh = jax.sharding.get_mesh()
  put = lambda tree, spec: jax.device_put(tree, jax.NamedSharding(mesh, spec))
  given = put(params, P("chip")), states, put(batch, hsdp.BOTH)
  return step.lower(*given).compile(), given, (plain, params)


@pytest.fixture(params=[AxisType.Explicit, *slow(AxisType.Auto)], ids=str)
def hosts(request):
  kinds = (request.param,) * 2
  with jax.set_mesh(jax.make_mesh((HOSTS, CHIPS), ("host", "chip"), kinds)):
    yield request.param


def test_between_hosts_only_words_of_gradients_travel(hosts, batch):
  """Each collective of the optimized program whose groups join different hosts.

  One number is an exception, the loss that is shown.
  """
  codec = QSGD(bits=4, bucket_size=32)
  exchange = gradcomp.compress(
    codec, axis_name="host", exchange="all_gather", min_leaf_size=1024
  )
  program, _, (_, params) = hosts_step(exchange, hosts, batch)
  found = hlo.parse_program(program.as_text())
  assert found.devices.number == HOSTS * CHIPS
  crossing, inside = [], []
  for collective, groups, *_ in found.collectives:
    assert groups.members is not None and collective.times == 1
    between = any(len({i // CHIPS for i in x}) > 1 for x in groups.members)
    (crossing if between else inside).append(collective)
    # Between hosts, a chip talks to those that own the same part.
    for group in groups.members if between else ():
      assert len({i % CHIPS for i in group}) == 1
  arrays = [array for collective in crossing for array in collective.operands]
  assert [array for array in arrays if array[0] != "u32"] == [("f32", ())]
  words = sum(int(np.prod(shape)) for dtype, shape in arrays if dtype == "u32")
  sizes = [w.size // CHIPS for w in jax.tree.leaves(params)]
  dense = Dense()
  assert 4 * words == sum(nbytes(codec if n >= 1024 else dense, n) for n in sizes)
  assert {dtype for x in inside for dtype, _ in x.operands} == {"f32"}
  report = gradcomp.wire_report(program, mesh=jax.sharding.get_mesh())
  assert set(report.by_axis) == {"host", "chip"}
  assert report.by_axis["host"].bytes_sent == 4 * words * (HOSTS - 1) + 4


def test_hosts_take_the_step_of_one_whole_model(hosts, batch):
  exchange = gradcomp.dense(axis_name="host")
  program, given, (plain, params) = hosts_step(exchange, hosts, batch)
  stepped, _, loss = program(*given)
  plain_loss = lambda params: mean_loss(
    plain.apply({"params": params}, batch.inputs), batch.labels
  )
  want, grads = jax.jit(jax.value_and_grad(plain_loss))(params)
  np.testing.assert_allclose(loss, want, rtol=1e-5)
  close(stepped, jax.tree.map(jnp.subtract, params, grads))


def small_loss(params, batch):
  """Of a model whose matrices fill whole rows of 128 elements for each worker."""
  logits = MODEL.apply({"params": params}, batch[0])
  return mean_loss(logits, batch[1])


MODEL = Transformer(32, width=32, heads=2, layers=1)
ADAM = optax.adam(1e-3)


def start():
  return MODEL.init(jax.random.key(0), np.zeros((1, 2), np.uint8))["params"]


def two_batches():
  """Stacked, of tokens and labels."""
  drawn = text.batches(np.arange(1000, dtype=np.uint8) % 31, 2 * N, 8, seed=0)
  return jax.tree.map(lambda *x: np.stack(x), next(drawn), next(drawn))


@pytest.fixture(scope="module")
def plain():
  """Two steps of Adam on the whole batch: the losses, the last gradient, parameters."""

  def step(carry, batch):
    params, state = carry
    loss, grads = jax.value_and_grad(small_loss)(params, batch)
    updates, state = ADAM.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), (loss, grads)

  @jax.jit
  def steps(batches):
    params = start()
    carry = params, ADAM.init(params)
    (params, _), (losses, grads) = jax.lax.scan(step, carry, batches)
    return losses, jax.tree.map(lambda x: x[-1], grads), params

  return jax.device_get(steps(two_batches()))


def training(feedback, weights, grads):
  """Makes two steps of four workers: the losses, and each one's residuals and parts."""
  options = dict(loss_fn=small_loss, optimizer=ADAM, weights=weights, grads=grads)
  fsdp = Fsdp(**options, feedback=feedback)

  def worker(shards, batches):
    def step(carry, batch):
      shards, state, metrics = fsdp.step(*carry, batch)
      return (shards, state), metrics["loss"]

    (shards, state), losses = jax.lax.scan(step, (shards, fsdp.init(shards)), batches)
    return losses, state.residuals, shards

  @jax.jit
  def run(batches):
    each = jax.vmap(worker, axis_name="data")
    cut = lambda x: x.reshape(2, N, -1, *x.shape[2:]).swapaxes(0, 1)
    return each(per_worker(start()), jax.tree.map(cut, batches))

  return run


def test_cut_parameters_train_as_whole_ones_do(plain):
  trained = training(True, Dense(), Dense())(two_batches())
  losses, residuals, shards = jax.device_get(trained)
  # Four means of two sequences are added up, and not one of eight.
  np.testing.assert_allclose(losses, np.tile(plain[0], (N, 1)), rtol=1e-5)
  for got, want, grad in zip(
    *map(jax.tree.leaves, (shards, per_worker(plain[2]), per_worker(plain[1]))),
    strict=True,
  ):
    # Adam divides by the gradient's size: what is next to zero may go either way.
    sure = np.abs(grad) > 1e-5
    np.testing.assert_allclose(got[sure], want[sure], atol=1e-5)
    assert sure.mean() > 0.5
  kept = jax.tree.leaves(residuals)
  assert len(kept) == 5 and not any(np.any(x) for x in kept)  # float32 loses nothing


@pytest.mark.slow
def test_cut_parameters_keep_what_their_gradients_lose(plain):
  weights, grads = (QSGD(bits=bits, bucket_size=128) for bits in (8, 4))
  trained = training(True, weights, grads)(two_batches())
  losses, residuals, _ = jax.device_get(trained)
  np.testing.assert_allclose(losses[0], plain[0], rtol=0.02)  # of weights in 8 bits
  matrices = [x for x in jax.tree.leaves(plain[2]) if x.ndim > 1]
  for kept, like in zip(jax.tree.leaves(residuals), matrices, strict=True):
    assert kept.shape == (N, *like.shape)
    own = np.stack([np.split(kept[i], N)[i] for i in range(N)])
    assert np.any(kept) and not np.any(own)  # a worker sends itself nothing
  _, forgotten, _ = jax.eval_shape(training(False, weights, grads), two_batches())
  assert not jax.tree.leaves(forgotten)


def test_cut_layers_are_the_whole_net():
  def gather(y, layer):
    last = dict(own="coded", to="invarying") if layer == 2 else {}
    return gradcomp.parallel.all_gather(
      y, axis_name="model", codec=Dense(), axis=1, **last
    )

  def columns(tree):
    return jax.tree.map(lambda x: jnp.stack(jnp.split(x, 4, axis=-1)), tree)

  parts = cut_layers.in_passes(np.arange(8), 2, 2)  # an equal part of each worker
  assert parts.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]

  @jax.jit
  def both():
    layers = cut_layers.init(jax.random.key(0), (6, 8, 8, cut_layers.padded(3, 4)))
    x = jax.random.normal(jax.random.key(1), (5, 6))

    def loss(layers, **options):
      return jnp.sum(cut_layers.apply(layers, x, 3, **options) ** 2)

    worker = jax.value_and_grad(lambda layers: loss(layers, gather=gather))
    value, grads = jax.value_and_grad(loss)(layers)
    cut = jax.vmap(worker, axis_name="model")(columns(layers))
    return cut, (jnp.full(4, value), columns(grads))

  for got, want in zip(*map(jax.tree.leaves, both()), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
