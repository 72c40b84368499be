"""Tests the cost of a trace: the same for any size, and little for a further leaf."""

import functools
import gc
import itertools
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.codecs.protocol import tile_shape
from gradcomp._src.kernels import materialize
from gradcomp.codecs import QSGD, RandomK
from gradcomp.local import local_steps
from gradcomp.parallel import zero
from tests.plugins.slow_cases import slow
from tests.support.cases import recipe

SMALL, LARGE = (2**10 + 1, 2**10 - 3), (2**18 + 1, 2**18 - 3)  # 2**20 and 2**36
MEGABYTES = 20
OVER = {"axis_name": "data"}
OPTIONS = OVER | {"min_leaf_size": 0}
CODEC = QSGD(bits=4)
ADAM, SGD = optax.adam(0.1), optax.sgd(0.7)


def qsgd(bits=4, **options):
  return gradcomp.qsgd(bits, **options, **OPTIONS)


INT8 = gradcomp.ErrorFeedback(residual_dtype="int8")
# And the binds of a further leaf, a sixth more than there were.
TRANSFORMATIONS = {
  "1-bit SGD": (lambda: gradcomp.onebit_sgd(**OPTIONS), 40),
  "zero": (lambda: zero(ADAM, grads=CODEC, params=CODEC, **OVER), 150),
  "RedSync": (lambda: gradcomp.redsync(density=0.001, **OPTIONS), 65),
  "QSGD": (lambda: qsgd(feedback="error"), 40),
  "local steps": (lambda: local_steps(ADAM, SGD, every=4, codec=CODEC, **OVER), 95),
  "int8 residuals": (lambda: qsgd(feedback=INT8), 85),
  "APS": (lambda: gradcomp.aps(**OPTIONS), 55),
  "TernGrad": (lambda: gradcomp.terngrad(**OPTIONS), 40),
  "PowerSGD": (lambda: gradcomp.powersgd(rank=2, **OPTIONS), 45),
  "natural": (lambda: gradcomp.natural(**OPTIONS), 26),
  "blocktop": (lambda: gradcomp.blocktop(**OPTIONS), 35),
  "dense": (lambda: gradcomp.dense(**OVER), 5),
  "two_shot": (lambda: gradcomp.redsync(exchange="two_shot", **OPTIONS), None),
  "fitted": (lambda: qsgd(3, levels="nonuniform"), None),
  "RandomK": (lambda: gradcomp.compress(RandomK(density=0.001), **OPTIONS), None),
}
QUICK = ["1-bit SGD", "zero", "RedSync", "QSGD"]
NAMES = [*QUICK, *slow(*(name for name in TRANSFORMATIONS if name not in QUICK))]
FURTHER = [name for name, (_, most) in TRANSFORMATIONS.items() if most]
FURTHER = [*QUICK, *slow(*(name for name in FURTHER if name not in QUICK))]


def traced(tx, shape):
  """Traces a step over eight workers, what it measures, and how it starts."""

  def step(gradient):
    state = tx.init(gradient)
    return gradcomp.telemetry.inspect_update(tx, gradient, state, gradient)

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
  calls, bind = [], Primitive.bind

  def counted(*args, **params):
    calls.append(1)
    return bind(*args, **params)

  jax.clear_caches()
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(Primitive, "bind", counted)
    function()
  return len(calls)


def layers(leaves):
  """So many leaves of four shapes, as layers of a transformer have them."""
  shapes = [(512, 1024), (512, 512), (512, 512), (512, 512), (1024, 512), (512,)]
  return [jax.ShapeDtypeStruct((8, *x), jnp.float32) for x in shapes * leaves][:leaves]


def on_eight(tx):
  """An update on eight workers, of shapes alone."""

  def step(params):
    gradient = gradcomp.defer_reduction(params, axis_name="data")
    return tx.update(gradient, tx.init(params), params)[0]

  mesh = jax.sharding.AbstractMesh((8,), ("data",))
  mapped = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P())
  return functools.partial(jax.eval_shape, mapped)


@pytest.mark.parametrize("name", FURTHER)
def test_a_further_leaf_is_soon_traced(name):
  """Forty binds took 4 ms where those of a plain mean and adamw took 1.4."""
  make, most = TRANSFORMATIONS[name]
  trace = on_eight(make())
  few, many = (bound(lambda x=x: trace(layers(x))) for x in (10, 110))
  assert many - few < 100 * most


@pytest.mark.parametrize("name", ["qsgd", *slow("aps", "redsync", "terngrad")])
def test_each_further_leaf_takes_as_long_to_trace(name):
  """Binds would not tell: `jax.lax.switch` takes the square of its branches."""
  trace, counts = on_eight(recipe.make(name, axis_name="data")), []
  for leaves in (10, 10, 40, 70):  # the first finds caches of the library empty
    calls = itertools.count()
    jax.clear_caches()
    sys.setprofile(lambda *_, calls=calls: next(calls))
    try:
      trace([jax.ShapeDtypeStruct((512, 512), jnp.float32)] * leaves)
    finally:
      sys.setprofile(None)
    counts.append(next(calls))
  assert counts[3] - counts[2] < 1.02 * (counts[2] - counts[1])


@pytest.mark.parametrize("name", NAMES)
def test_a_large_leaf_is_traced_as_soon_as_a_small_one(name):
  """And takes the same memory."""
  tx, binds = TRANSFORMATIONS[name][0](), []
  trace = lambda shape: binds.append(bound(lambda: traced(tx, shape)))
  small, large = (grown(lambda x=x: trace(x)) for x in (SMALL, LARGE))
  assert binds[1] < 1.2 * binds[0]
  assert large < small + MEGABYTES


@pytest.mark.slow
def test_a_plan_for_70_billion_parameters():
  layers, d, ffn, kv, vocab = 80, 8192, 28672, 1024, 128256
  each = [(d, d), (d, kv), (d, kv), (d, d), (d, ffn), (d, ffn), (ffn, d), (d,), (d,)]
  shapes = [*(each * layers), (vocab, d), (d,), (d, vocab)]
  params = [jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes]
  link = gradcomp.cost.Link(latency=50e-6, bytes_per_second=125e6)
  found = []
  plan = lambda: found.append(gradcomp.cost.plan(params, workers=8, link=link))
  assert grown(plan) < 400
  assert found[0].verdict.startswith("compress")


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
