"""What crosses the wire is what the codec says, read from traces and optimized HLO."""

import itertools

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
from tests.support.cases.exchange import (
  CASES,
  CODECS,
  ELEMENTS,
  SENT,
  SHAPES,
  SHARED,
  plain_and_slow,
  transformation,
)


def optimized_hlo(lowered):
  """Compiled to be read: what LLVM would optimize after the HLO never runs."""
  return lowered.compile({"xla_backend_optimization_level": 0})


def compiled_step(transformation, workers):
  """A whole train step; every parameter is in the loss, which is averaged in f32."""
  mesh = modes.mesh(workers)

  def loss_fn(params, batch):
    return sum(jnp.sum(leaf**2) for leaf in params.values()) * jnp.mean(batch)

  optimizer = optax.chain(transformation, optax.sgd(0.1))
  params = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
  params = jax.device_put(params, NamedSharding(mesh, P()))
  with jax.set_mesh(mesh):
    state = optimizer.init(params)
  step = gradcomp.make_train_step(loss_fn, optimizer, axis_name="data", mesh=mesh)
  return optimized_hlo(step.lower(params, state, jnp.ones((2 * workers, 3))))


def is_loss(collective):
  """The mean of the loss: one float."""
  return collective.kind == "all-reduce" and collective.bytes_sent <= 8


def padded_nbytes(layout, workers):
  return sum(
    4 * codec.row_words * (rows + -rows % workers)
    for codec, rows in zip(layout.codecs, layout.rows, strict=True)
  )


TWO_SHOT = list(
  itertools.product(
    (QSGD(bits=4), QSGD(bits=2, bucket_size=128), Dense(dtype=jnp.bfloat16)),
    (2, 8),
    (None, "error"),
  )
)


@pytest.mark.parametrize(
  "codec, workers, feedback", plain_and_slow(TWO_SHOT, TWO_SHOT[8])
)
def test_two_shot_sends_two_stages_of_words(codec, workers, feedback):
  """2 (N-1)/N c bytes, one u32 message a stage, and no float but the loss."""
  tx = gradcomp.compress(
    codec, axis_name="data", exchange="two_shot", feedback=feedback
  )
  report = gradcomp.wire_report(compiled_step(tx, workers))
  exchange = [c for c in report.collectives if not is_loss(c)]
  assert sorted(c.kind for c in exchange) == ["all-gather", "all-to-all"]
  assert {c.dtype for c in exchange} == {"u32"}
  like = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in SHAPES.items()}
  stage = (
    padded_nbytes(plan_rows(jax.tree.leaves(like), codec), workers)
    * (workers - 1)
    // workers
  )
  assert [c.bytes_sent for c in exchange] == [stage, stage]


@pytest.mark.parametrize("workers", [8, *slow(2)])
def test_all_gather_sends_one_message_of_words(workers):
  codec = QSGD(bits=4)
  tx = gradcomp.compress(codec, axis_name="data", exchange="all_gather")
  report = gradcomp.wire_report(compiled_step(tx, workers))
  (gather,) = [c for c in report.collectives if not is_loss(c)]
  assert (gather.kind, gather.dtype) == ("all-gather", "u32")
  like = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in SHAPES.items()}
  nbytes = plan_rows(jax.tree.leaves(like), codec).nbytes
  lanes = -(-nbytes // 512)  # the line is long enough to be cut into lanes
  assert (
    gather.bytes_sent == (workers - 1) * 512 * lanes < 1.01 * (workers - 1) * nbytes
  )


def test_report_says_what_a_plain_mean_would_send():
  workers = 8
  tx = gradcomp.qsgd(bits=4, axis_name="data")
  report = gradcomp.wire_report(compiled_step(tx, workers))
  plain = gradcomp.wire_report(compiled_step(gradcomp.dense(axis_name="data"), workers))
  assert report.dense_bytes == plain.bytes_sent == plain.dense_bytes
  loss = 2 * 4 * (workers - 1) // workers
  assert plain.bytes_sent == 2 * 4 * ELEMENTS * (workers - 1) // workers + loss
  assert report.ratio == report.bytes_sent / plain.bytes_sent < 0.14
  assert "all-to-all" in str(report)


def test_pmap_sends_the_same():
  workers = 4
  tx = gradcomp.compress(QSGD(bits=4), axis_name="data", exchange="two_shot")
  grads = {name: jnp.ones((workers, *shape)) for name, shape in SHAPES.items()}
  state = jax.pmap(tx.init, axis_name="data")(grads)
  mapped = jax.pmap(lambda g, s: tx.update(g, s), axis_name="data")
  report = gradcomp.wire_report(optimized_hlo(mapped.lower(grads, state)))
  step = gradcomp.wire_report(compiled_step(tx, workers))
  sent = [c.bytes_sent for c in step.collectives if not is_loss(c)]
  assert [c.bytes_sent for c in report.collectives] == sent


def traced_update(tx, workers):
  """One update inside a typed shard_map, of leaves of ``SHAPES``.

  More workers than this process has devices can be traced, and not compiled.
  """
  like = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in SHAPES.items()}
  mesh = AbstractMesh((workers,), ("data",), (AxisType.Auto,))
  if workers <= jax.device_count():
    mesh = modes.mesh(workers)
  with use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh)):
    state = jax.eval_shape(tx.init, like)
  specs = gradcomp.state_specs(state, axis_name="data")
  local = lambda grads, state: tx.update(jax.tree.map(lambda x: x[0], grads), state)
  update = jax.shard_map(
    local, mesh=mesh, in_specs=(P("data"), specs), out_specs=(P(), specs)
  )
  grads = {
    k: jax.ShapeDtypeStruct((workers, *s), jnp.float32) for k, s in SHAPES.items()
  }
  return jax.jit(update).trace(grads, state), gradcomp.explain(
    tx, like, workers=workers
  )


# Many: some sums are loops from five workers on, and need types of their own.
MANY = [(*case, 20) for case in CASES]
EIGHT = [(*case, 8) for case in CASES[:4] + CASES[16:19]]


@pytest.mark.parametrize(
  "codec, exchange, workers",
  plain_and_slow(EIGHT + MANY, *((*case, 20) for case in SENT)),
)
def test_explain_says_what_is_traced(codec, exchange, workers):
  """The table, before anything runs, and the collectives of the update agree.

  Codecs take their references, for kernels send nothing.
  """
  tx = transformation(laws.here(codec), exchange, workers, feedback="error")
  traced, explanation = traced_update(tx, workers)
  sent = collectives.collectives(traced)
  # Each collective's bytes are rounded up to whole ones, once a time that it runs.
  assert abs(sum(c.nbytes for c in sent) - explanation.bytes_sent) <= len(sent)
  # The one stage that sends full precision, and says so, is inside groups.
  floats = [c for c in sent if c.dtype.startswith(("f", "bf"))]
  assert exchange == "hierarchical" or not floats
  assert not isinstance(codec, FloatCast) or not floats
  # Patterns of shared scales are s32; exponents are u8.
  allowed = {"u32", "f32", "u8" if isinstance(codec, FloatCast) else "s32"}
  sums = {"s8", "s16"} if exchange == "psum" else set()
  assert {c.dtype for c in sent} <= allowed | sums
  assert not sums or sums & {c.dtype for c in sent}


# Two stages, two kinds of axes, and sums of codes; others in slow runs.
COMPILED = [
  (CODECS[0], "two_shot", 3),
  (CODECS[0], "hierarchical", 8),
  (SHARED[0], "psum", 8),
]


@pytest.mark.parametrize(
  "codec, exchange, workers",
  plain_and_slow([(*case, 3) for case in CASES] + EIGHT, *COMPILED),
)
def test_what_is_traced_is_what_is_compiled(codec, exchange, workers):
  """The optimized HLO has the collectives of the trace, with their dtypes and bytes."""
  tx = transformation(codec, exchange, workers, feedback="error")
  traced, explanation = traced_update(tx, workers)
  report = gradcomp.wire_report(optimized_hlo(traced.lower()))
  # Each collective's bytes are rounded up to whole ones, once a time that it runs.
  rounded = sum(c.times for c in report.collectives)
  assert 0 <= report.bytes_sent - explanation.bytes_sent <= rounded
  # Hierarchical pairs every group of two with f32 before; every exchange is one mean.
  assert report.dense_bytes >= 2 * 4 * ELEMENTS * (workers - 1) // workers
  assert report.dense_bytes <= 2 * 4 * ELEMENTS * (workers - 1) // workers + rounded
  # Dense leaves have no integers to add up: they travel apart from psum's.
  others = {leaf.exchange for leaf in explanation.leaves} - {exchange}
  assert others <= ({"all_gather", "two_shot"} if exchange == "psum" else set())
  sent = collectives.collectives(traced)
  assert {c.dtype for c in report.collectives} == {c.dtype for c in sent}


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
  tx = gradcomp.powersgd(rank=2, axis_name="data")
  mesh = modes.mesh(workers)
  with jax.set_mesh(mesh):
    state = tx.init(jax.tree.map(jnp.zeros_like, like))
  specs = gradcomp.state_specs(state, axis_name="data")
  update = jax.shard_map(
    lambda grads, state: tx.update(jax.tree.map(lambda x: x[0], grads), state),
    mesh=mesh,
    in_specs=(P("data"), specs),
    out_specs=(P(), specs),
  )
  grads = {
    k: jax.ShapeDtypeStruct((workers, *x.shape), x.dtype) for k, x in like.items()
  }
  report = gradcomp.wire_report(optimized_hlo(jax.jit(update).lower(grads, state)))
  elements = sum(x.size for x in like.values())
  assert report.dense_bytes == 8 * elements * (workers - 1) // workers
  explained = gradcomp.explain(tx, like, workers=workers)
  assert report.bytes_sent == explained.bytes_sent
