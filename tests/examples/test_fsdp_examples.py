"""The examples of sharded parameters compute the numbers of whole models."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.report import hlo
from tests.plugins.slow_cases import slow
from tests.support.cases.parallel import nbytes

N = 4
LENGTH = 6


@pytest.fixture
def batch():
  tokens = np.random.default_rng(0).integers(0, 16, (2 * N, LENGTH + 1))
  from examples.lib.data import text

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
  from examples import fsdp_linen
  from examples.lib.networks import Transformer

  sizes = dict(symbols=16, width=8, heads=2, layers=2)
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


def test_nnx_has_the_gradients_of_whole_parameters(batch, monkeypatch):
  from examples import fsdp_nnx

  monkeypatch.setattr(fsdp_nnx, "WEIGHTS", None)
  monkeypatch.setattr(fsdp_nnx, "GRADS", None)
  made = fsdp_nnx.layers(12, LENGTH, 1, rngs=nnx.Rngs(0))
  graphs, whole = zip(*map(nnx.split, made), strict=True)
  parts = [(g, jax.tree.map(jax.typeof, w)) for g, w in zip(graphs, whole, strict=True)]
  flat = lambda w: jnp.pad(w.reshape(-1), (0, -w.size % N))

  @jax.jit
  def both(whole, batch):
    def loss(whole):
      embed, place, *rest = map(nnx.merge, graphs, whole)
      x = embed(batch.inputs) + place(jnp.arange(LENGTH))
      for layer in rest:
        x = layer(x)
      return mean_loss(x, batch.labels)

    params = jax.tree.map(flat, whole)
    worker = jax.vmap(
      lambda *args: jax.grad(fsdp_nnx.loss_fn, (1, 2))(parts, *args), axis_name="data"
    )
    given = per_worker(params), zeros(params), per_worker(batch)
    look = lambda *args: fsdp_nnx.whole_gradients(parts, *args)
    own, waits = jax.vmap(look, axis_name="data")(*given)
    added = jax.tree.map(lambda x: x.sum(axis=0), own)
    want = jax.grad(loss)(whole)
    return worker(*given), (added, waits), (per_worker(jax.tree.map(flat, want)), want)

  (grads, residuals), (added, waits), want = both(whole, batch)
  close((grads, added), want)
  close(jax.tree.map(lambda x: x[0], waits), jax.tree.map(jnp.zeros_like, want[1]))
  assert not any(x.any() for x in jax.tree.leaves(residuals))


def test_what_gathers_lose_is_seen_by_another_exchange(monkeypatch):
  """Of 4 parts one stays as it is: gather loses some 3/4 of the squares seen."""
  from examples.lib.sharded import cut_gradients

  codec = gradcomp.codecs.QSGD(bits=3, bucket_size=32, rounding="nearest")
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
  from examples import hsdp
  from examples.lib.networks import Transformer

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
  codec = gradcomp.codecs.QSGD(bits=4, bucket_size=32)
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
  dense = gradcomp.codecs.Dense()
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


def test_a_block_of_another_class_takes_the_place_of_the_transformers():
  from examples.lib.networks import Block, Transformer

  class Twice(linen.Module):
    heads: int

    @linen.compact
    def __call__(self, x):
      return 2 * Block(self.heads)(x)

  tokens = np.zeros((1, 3), np.uint8)
  model = Transformer(16, width=8, heads=2, layers=1, block=Twice)
  params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
  assert set(params["block0"]) == {"Block_0"}
