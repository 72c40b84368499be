"""What crosses the wire is what the codec says, read from traces and optimized HLO."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.exchange.layout import plan_rows
from gradcomp.codecs import QSGD, Dense, FloatCast
from tests.plugins.slow_cases import slow
from tests.support import collectives, laws, modes
from tests.support.cases import exchange as cases

SHAPES, ELEMENTS = cases.SHAPES, cases.ELEMENTS
LIKE = {name: jax.ShapeDtypeStruct(x, jnp.float32) for name, x in SHAPES.items()}


def optimized_hlo(lowered):
  """Compiled to be read: what LLVM would optimize after the HLO never runs."""
  return lowered.compile({"xla_backend_optimization_level": 0})


def compiled_step(transformation, workers):
  """A whole train step; every parameter is in the loss, which is averaged in f32."""
  mesh = modes.mesh(workers)
  squares = lambda params: sum(jnp.sum(leaf**2) for leaf in params.values())
  loss_fn = lambda params, batch: squares(params) * jnp.mean(batch)
  optimizer = optax.chain(transformation, optax.sgd(0.1))
  params = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
  params = jax.device_put(params, NamedSharding(mesh, P()))
  with jax.set_mesh(mesh):
    state = optimizer.init(params)
  step = gradcomp.make_train_step(loss_fn, optimizer, axis_name="data", mesh=mesh)
  return optimized_hlo(step.lower(params, state, jnp.ones((2 * workers, 3))))


def exchanged(program):
  """The report, and the collectives but the mean of the loss, which is one float."""
  report = gradcomp.wire_report(program)
  is_loss = lambda x: x.kind == "all-reduce" and x.bytes_sent <= 8
  return report, [x for x in report.collectives if not is_loss(x)]


OTHERS = slow(QSGD(bits=2, bucket_size=128), Dense(dtype=jnp.bfloat16))


@pytest.mark.parametrize("codec", [QSGD(bits=4), *OTHERS])
def test_two_shot_sends_two_stages_of_words(codec):
  """2 (N-1)/N c bytes, one u32 message a stage, and no float but the loss.

  The report says what a plain mean would send; pmap sends the same.
  """
  workers = 8
  tx = gradcomp.compress(codec, axis_name="data", exchange="two_shot")
  report, sent = exchanged(compiled_step(tx, workers))
  layout = plan_rows(jax.tree.leaves(LIKE), codec)
  rows = zip(layout.codecs, layout.rows, strict=True)
  padded = sum(4 * codec.row_words * (n + -n % workers) for codec, n in rows)
  stage = padded * (workers - 1) // workers
  expected = [(kind, "u32", stage) for kind in ("all-gather", "all-to-all")]
  assert sorted((c.kind, c.dtype, c.bytes_sent) for c in sent) == expected
  plain, _ = exchanged(compiled_step(gradcomp.dense(axis_name="data"), workers))
  assert report.dense_bytes == plain.bytes_sent == plain.dense_bytes
  loss = 2 * 4 * (workers - 1) // workers
  assert plain.bytes_sent == 2 * 4 * ELEMENTS * (workers - 1) // workers + loss
  assert report.ratio == report.bytes_sent / plain.bytes_sent
  grads = {name: jnp.ones((workers, *shape)) for name, shape in SHAPES.items()}
  state = jax.pmap(tx.init, axis_name="data")(grads)
  mapped = jax.pmap(lambda g, s: tx.update(g, s), axis_name="data")
  _, sent = exchanged(optimized_hlo(mapped.lower(grads, state)))
  assert sorted((c.kind, c.dtype, c.bytes_sent) for c in sent) == expected


def test_all_gather_sends_one_message_of_words():
  workers, codec = 8, QSGD(bits=4)
  tx = gradcomp.compress(codec, axis_name="data", exchange="all_gather")
  _, (gather,) = exchanged(compiled_step(tx, workers))
  assert (gather.kind, gather.dtype) == ("all-gather", "u32")
  nbytes = plan_rows(jax.tree.leaves(LIKE), codec).nbytes
  lanes = -(-nbytes // 512)  # the line is long enough to be cut into lanes
  assert gather.bytes_sent == (workers - 1) * 512 * lanes
  assert 512 * lanes < 1.01 * nbytes


def traced_update(tx, workers, like=LIKE):
  """One update inside a typed shard_map, and what explain says of it.

  More workers than this process has devices can be traced, and not compiled.
  """
  mesh = AbstractMesh((workers,), ("data",), (AxisType.Auto,))
  if workers <= jax.device_count():
    mesh = modes.mesh(workers)
  with use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh)):
    state = jax.eval_shape(tx.init, like)
  state_specs = gradcomp.state_specs(state, axis_name="data")
  local = lambda grads, state: tx.update(jax.tree.map(lambda x: x[0], grads), state)
  specs = dict(in_specs=(P("data"), state_specs), out_specs=(P(), state_specs))
  update = jax.jit(jax.shard_map(local, mesh=mesh, **specs))
  stack = lambda x: jax.ShapeDtypeStruct((workers, *x.shape), x.dtype)
  explained = gradcomp.explain(tx, like, workers=workers)
  return update.trace(jax.tree.map(stack, like), state), explained


# Of many workers: some sums are loops from five on, and need types of their own.
EVERY = [(*case, workers) for workers in (20, 3) for case in cases.CASES]
EVERY += [(*case, 8) for case in cases.CASES[:4] + cases.CASES[16:19]]
# Two stages, two kinds of axes, and sums of codes are compiled; others in slow runs.
PLAIN = [(cases.CODECS[0], "two_shot", 3), (cases.CODECS[0], "hierarchical", 8)]
PLAIN += [(cases.SHARED[0], "psum", 8), *((*case, 20) for case in cases.SENT)]
CHOSEN = cases.plain_and_slow(EVERY, *PLAIN)


@pytest.mark.parametrize("codec, exchange, workers", CHOSEN)
def test_explain_says_what_is_traced_and_compiled(codec, exchange, workers):
  """The table, before anything runs, and the collectives of the update agree.

  Codecs take their references, for kernels send nothing.
  """
  tx = cases.transformation(laws.here(codec), exchange, workers, feedback="error")
  traced, explanation = traced_update(tx, workers)
  sent = collectives.collectives(traced)
  dtypes = {c.dtype for c in sent}
  # Each collective's bytes are rounded up to whole ones, once a time that it runs.
  assert abs(sum(c.nbytes for c in sent) - explanation.bytes_sent) <= len(sent)
  # The one stage that sends full precision, and says so, is inside groups.
  floats = [x for x in dtypes if x.startswith(("f", "bf"))]
  assert not floats or (exchange == "hierarchical" and not isinstance(codec, FloatCast))
  # Patterns of shared scales are s32; exponents are u8.
  allowed = {"u32", "f32", "u8" if isinstance(codec, FloatCast) else "s32"}
  sums = {"s8", "s16"} if exchange == "psum" else set()
  assert dtypes <= allowed | sums
  assert not sums or sums & dtypes
  # Dense leaves have no integers to add up: they travel apart from psum's.
  others = {leaf.exchange for leaf in explanation.leaves} - {exchange}
  assert others <= ({"all_gather", "two_shot"} if exchange == "psum" else set())
  if workers <= jax.device_count():
    report = gradcomp.wire_report(optimized_hlo(traced.lower()))
    assert {c.dtype for c in report.collectives} == dtypes
    rounded = sum(c.times for c in report.collectives)
    assert 0 <= report.bytes_sent - explanation.bytes_sent <= rounded
    # Every exchange is one mean.
    mean = 2 * 4 * ELEMENTS * (workers - 1) // workers
    assert mean <= report.dense_bytes <= mean + rounded


@pytest.fixture
def names_in_cache_keys():
  """Lets no compiled program of a cache stand for one with other names of scopes."""
  option = "jax_compilation_cache_include_metadata_in_key"
  before = getattr(jax.config, option)
  jax.config.update(option, True)
  yield
  jax.config.update(option, before)


@pytest.mark.usefixtures("names_in_cache_keys")
def test_factors_stand_for_their_leaves():
  """A message of factors is one mean of its leaves, however XLA combines its sums."""
  workers = 4
  like = {"w": (64, 96), "v": (64, 96), "b": (96,)}  # XLA adds b with left factors
  like = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in like.items()}
  traced, explained = traced_update(
    gradcomp.powersgd(rank=2, axis_name="data"), workers, like
  )
  report = gradcomp.wire_report(optimized_hlo(traced.lower()))
  elements = sum(x.size for x in like.values())
  assert report.dense_bytes == 8 * elements * (workers - 1) // workers
  assert report.bytes_sent == explained.bytes_sent
