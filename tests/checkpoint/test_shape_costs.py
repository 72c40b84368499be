"""Tests the cost of a trace: the same for any size, and little for a further leaf."""

import functools
import gc
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.codecs import sparse as _sparse
from gradcomp._src.codecs.tiles import tile_shape
from gradcomp._src.kernels import materialize
from gradcomp._src.kernels.common import sparse
from gradcomp._src.kernels.common.threefry import key_words
from gradcomp.codecs import QSGD, BlockTop, Context, OneBit, RandomK, TopK
from gradcomp.parallel import zero
from tests.plugins.slow_cases import slow
from tests.specs import top_k
from tests.support import laws, sparse_steps
from tests.support.assertions import assert_same_bits

SMALL, LARGE = (2**10 + 1, 2**10 - 3), (2**18 + 1, 2**18 - 3)  # 2**20 and 2**36
MEGABYTES = 20
OPTIONS = dict(axis_name="data", min_leaf_size=0)


def zeroed(codec):
  return zero(optax.adam(0.1), grads=codec, params=codec, axis_name="data")


def local():
  codec = QSGD(bits=4)
  return gradcomp.local.local_steps(
    optax.adam(0.1), optax.sgd(0.7), every=4, codec=codec, axis_name="data"
  )


TRANSFORMATIONS = {
  "1-bit SGD": lambda: gradcomp.onebit_sgd(**OPTIONS),
  "zero": lambda: zeroed(QSGD(bits=4)),
  "RedSync": lambda: gradcomp.redsync(density=0.001, **OPTIONS),
  "QSGD": lambda: gradcomp.qsgd(bits=4, feedback="error", **OPTIONS),
  "zero of signs": lambda: zeroed(OneBit()),
  "RedSync two_shot": lambda: gradcomp.redsync(exchange="two_shot", **OPTIONS),
  "RedSync asq": lambda: gradcomp.redsync(quantize="asq", **OPTIONS),
  "blocktop": lambda: gradcomp.blocktop(**OPTIONS),
  "columns": lambda: gradcomp.onebit_sgd(per_column=True, **OPTIONS),
  "TernGrad": lambda: gradcomp.terngrad(**OPTIONS),
  "APS": lambda: gradcomp.aps(**OPTIONS),
  "8 bits": lambda: gradcomp.eight_bit(**OPTIONS),
  "natural": lambda: gradcomp.natural(**OPTIONS),
  "fitted": lambda: gradcomp.qsgd(bits=3, levels="nonuniform", **OPTIONS),
  "RandomK": lambda: gradcomp.compress(RandomK(density=0.001), **OPTIONS),
  "PowerSGD": lambda: gradcomp.powersgd(rank=2, **OPTIONS),
  "ring": lambda: gradcomp.qsgd(bits=4, exchange="ring", **OPTIONS),
  "int8 residuals": lambda: gradcomp.qsgd(
    bits=4, feedback=gradcomp.ErrorFeedback(residual_dtype="int8"), **OPTIONS
  ),
  "local steps": local,
  "dense": lambda: gradcomp.dense(axis_name="data"),
}
NAMES = [*list(TRANSFORMATIONS)[:4], *slow(*list(TRANSFORMATIONS)[4:])]
# The binds of a further leaf, a sixth more than there were.
FURTHER = [
  ("1-bit SGD", 40),
  ("zero", 85),
  ("RedSync", 65),
  ("QSGD", 40),
  *slow(("APS", 55), ("TernGrad", 40), ("PowerSGD", 45), ("natural", 22)),
  *slow(("local steps", 95), ("int8 residuals", 85), ("blocktop", 35), ("dense", 5)),
]


def traced(tx, shape):
  """Traces a step over eight workers, what it measures, and how it starts."""

  def step(gradient):
    state = tx.init(gradient)
    return gradcomp.telemetry.inspected_update(tx, gradient, state, gradient)

  like = jax.ShapeDtypeStruct((8, *shape), jnp.float32)
  return jax.eval_shape(jax.vmap(step, axis_name="data"), like)


def grown(function):
  """The megabytes by which this process grows at most; 0 where it is not on Linux."""
  if sys.platform != "linux":
    function()
    return 0.0
  gc.collect()
  Path("/proc/self/clear_refs").write_text("5")
  before = _status("VmRSS")
  function()
  return _status("VmHWM") - before


def _status(name):
  text = Path("/proc/self/status").read_text()
  return int(re.search(rf"{name}:\s+(\d+) kB", text)[1]) / 1000


def bound(function):
  """How often a function binds a primitive of JAX, which is what makes a trace long.

  It counts each operation of each trace, those of `jax.eval_shape` and of programs that
  are thrown away too, but a jitted function once a shape. Seconds would say the same,
  but not on a machine that has other things to do: where they were measured, a bind
  took 60 to 100 us.
  """
  count = 0
  bind = Primitive.bind

  def counted(*args, **params):
    nonlocal count
    count += 1
    return bind(*args, **params)

  jax.clear_caches()
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(Primitive, "bind", counted)
    function()
  return count


def layers(leaves):
  """So many leaves of four shapes, as layers of a transformer have them."""
  shapes = [(512, 1024), (512, 512), (512, 512), (512, 512), (1024, 512), (512,)]
  return [jax.ShapeDtypeStruct((8, *x), jnp.float32) for x in shapes * leaves][:leaves]


@pytest.mark.parametrize(("name", "most"), FURTHER)
def test_a_further_leaf_is_soon_traced(name, most):
  """Forty binds took 4 ms where those of a plain mean and adamw took 1.4."""
  tx = TRANSFORMATIONS[name]()

  def step(params):
    gradient = gradcomp.defer_reduction(params, axis_name="data")
    return tx.update(gradient, tx.init(params), params)[0]

  mesh = jax.sharding.AbstractMesh((8,), ("data",))
  mapped = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P())
  few, many = (bound(lambda x=x: jax.eval_shape(mapped, layers(x))) for x in (10, 110))
  assert many - few < 100 * most


@pytest.mark.parametrize("name", NAMES)
def test_a_large_leaf_is_traced_as_soon_as_a_small_one(name):
  """And takes the same memory."""
  tx, binds = TRANSFORMATIONS[name](), []
  trace = lambda shape: binds.append(bound(lambda: traced(tx, shape)))
  small, large = (grown(lambda x=x: trace(x)) for x in (SMALL, LARGE))
  assert binds[1] < 1.2 * binds[0]
  assert large < small + MEGABYTES


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [True, False])
def test_a_plan_for_70_billion_parameters(stacked):
  layers, d, ffn, kv, vocab = 80, 8192, 28672, 1024, 128256
  each = [(d, d), (d, kv), (d, kv), (d, d), (d, ffn), (d, ffn), (ffn, d), (d,), (d,)]
  rest = [(vocab, d), (d,), (d, vocab)]
  many = [(layers, *x) for x in each] if stacked else each * layers
  params = [jax.ShapeDtypeStruct(x, jnp.float32) for x in (*many, *rest)]
  link = gradcomp.cost.Link(latency=50e-6, bytes_per_second=125e6)
  found = []
  plan = lambda: found.append(gradcomp.cost.plan(params, workers=8, link=link))
  assert grown(plan) < 400
  assert found[0].verdict.startswith("compress")


@pytest.mark.parametrize(
  ("size", "owners", "ranges", "each"),
  [
    (1000, 3, 3, 334),
    (2**30, 1, 1, 2**30),
    (2**30 + 1, 1, 2, 2**29 + 1),
    (32 * 4096 * 14336, 1, 2, 16 * 4096 * 14336),  # Llama 3 8B, stacked
    (32 * 4096 * 14336, 3, 3, 626349398),
    (3 * 2**30 + 5, 3, 6, 2**29 + 1),
    (2**36, 8, 64, 2**30),
  ],
)
def test_ranges_of_large_leaves_are_cut(size, owners, ranges, each):
  """As the page says: no int32 counts the positions in more."""
  for codec in (TopK(), RandomK()):
    assert codec.ranged(size, ranges=owners).range_size == each
  assert top_k.range_of(size, owners) == each
  assert -(-size // each) == ranges


def test_a_stacked_model_of_8_billion_is_sent_sparsely():
  params = {"up": jax.ShapeDtypeStruct((32, 4096, 14336), jnp.float32)}
  tx = gradcomp.redsync(density=0.001, axis_name="data")
  found = gradcomp.explain(tx, params, workers=4)
  assert 0.001 < found.ratio < 0.01


@pytest.mark.parametrize("codec", [TopK(density=0.1), RandomK(density=0.1)], ids=str)
def test_a_cut_leaf_is_that_of_ranges_by_name(codec, monkeypatch):
  x = np.random.default_rng(1).standard_normal(1001, np.float32)
  named = type(codec)(density=0.1, range_size=251)

  @functools.partial(jax.jit, static_argnums=0)
  def sent(codec, x, key):
    rows, unsent = laws.encoded(codec, x, Context(key_words(key)))[:2]
    return rows, unsent, codec.roundtrip(x, key=key)

  expected = sent(named, x, jax.random.key(0))
  monkeypatch.setattr(_sparse, "_MOST_ELEMENTS", 300)
  assert codec.ranged(1001).range_size == 251
  assert_same_bits(sent(codec, x, jax.random.key(0)), expected)


@pytest.mark.parametrize(
  ("codec", "exchange"),
  [
    (TopK(density=0.05), "all_gather"),
    *slow((TopK(density=0.05), "two_shot"), (BlockTop(), "two_shot")),
  ],
  ids=str,
)
def test_what_no_int32_counts_has_the_same_bits(codec, exchange, monkeypatch):
  """Rows by their numbers in place of flat positions, and a mask of what was sent."""
  monkeypatch.setattr(_sparse, "_MOST_ELEMENTS", 256)  # several rows a leaf
  steps = sparse_steps.gradients(3)
  steps[1]["w"][0, 3, 5] = np.nan
  tx = sparse_steps.transformation(codec, exchange, 0.9)
  counted = sparse_steps.trail(tx, steps)
  monkeypatch.setattr(sparse, "COUNTED", 100)
  masked = sparse_steps.trail(tx, steps)
  for a, b in zip(jax.tree.leaves(counted), jax.tree.leaves(masked), strict=True):
    assert_same_bits(a, b)


def test_rows_are_traced_once(monkeypatch):
  """A codec decodes in a trace to tell the shape of its tiles, and writes some down."""
  calls = []

  def double(rows):
    calls.append(rows)
    return rows * 2

  rows = jax.ShapeDtypeStruct((4, 4), jnp.uint32)
  jax.eval_shape(lambda rows: materialize.materialized(double, rows), rows)
  assert len(calls) == 1
  codec = QSGD(bits=4, bucket_size=96)
  assert tile_shape(codec) == (8, 96)
  monkeypatch.setattr(QSGD, "decode_rows", None)
  assert tile_shape(QSGD(bits=4, bucket_size=96)) == (8, 96)
