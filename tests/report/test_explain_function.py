"""explain of a function counts what compiled programs send, and compiles nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gradcomp
from examples.lib.cut_layers import sub_batches
from gradcomp import explain, parallel
from gradcomp.codecs import QSGD, EightBit
from tests.plugins.slow_cases import slow
from tests.support.assertions import says
from tests.support.cases.parallel import mapped

N = 4
EIGHT = EightBit(bucket_size=64)
FOUR = QSGD(bits=4, bucket_size=32, rounding="nearest")
AXES = {"data": N}


def floats(*shape):
  return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def of(name, codec=EIGHT, **options):
  """A collective of gradcomp.parallel by its name."""
  options = dict(axis_name="data", codec=codec, **options)
  return lambda x: getattr(parallel, name)(x, **options)


def in_passes(x):
  product = lambda batch, s: batch @ jnp.ones((x.shape[1], 8))
  return sub_batches(product, x, axis_name="data", passes=4, codec=EIGHT)


def remembering(x):
  """Computes the forward pass again in the backward pass, and sends it again."""
  return jax.checkpoint(lambda x: jnp.tanh(of("all_gather")(jnp.sin(x))) ** 2)(x)


CASES = {
  "all_gather": of("all_gather", backward=FOUR),
  "equal": of("all_gather", own="coded", to="invarying"),
  "psum_scatter": of("psum_scatter", FOUR, backward=None, axis=1),
  "psum": lambda x: of("psum")(x.astype(jnp.bfloat16)),
  "sum_gradients": of("sum_gradients"),
  "all_to_all": of("all_to_all", FOUR, split_axis=0, concat_axis=1),
  "ppermute": of("ppermute", perm=[(0, 1), (2, 3)]),
  "sub_batches": in_passes,
  "remembering": remembering,
  "lax": lambda x: (
    lax.psum_scatter(x, "data", tiled=True) + lax.pmean(jnp.sum(x), "data")
  ),
}
QUICK = ("all_gather", "psum_scatter", "sub_batches", "lax")


def sums(report):
  return report.bytes_sent, report.dense_bytes


def both(function):
  """The result and the gradients of a sum of squares, which need all of it."""
  value = lambda x: (jnp.sum(jnp.square(y := function(x)).astype(jnp.float32)), y)
  return jax.grad(value, has_aux=True)


@pytest.mark.parametrize("name", [*QUICK, *slow(*sorted(set(CASES) - set(QUICK)))])
def test_bytes_are_those_of_the_compiled_program(name):
  x, function = floats(N, 8, 4 * 64), CASES[name]
  found = explain(function, jax.ShapeDtypeStruct(x.shape[1:], x.dtype), workers=AXES)
  programs = (mapped("shard_map", f, N).lower(x) for f in (function, both(function)))
  compiled = [gradcomp.wire_report(x.compile()) for x in programs]
  forward, whole = map(sums, compiled)
  assert sums(found.forward) == forward
  assert sums(found.backward) == tuple(np.subtract(whole, forward))
  assert found.bytes_sent == whole[0]
  kinds = lambda found: sorted((x.kind, x.dtype, x.times) for x in found)
  pairs = found.forward.collectives + found.backward.collectives
  assert kinds(pairs) == kinds(compiled[1].collectives)


def test_the_whole_of_a_layer_is_told_and_nothing_is_computed():
  """Also over two axes, with arguments in a tree, integers and no such devices."""

  def layer(params, tokens):
    y = params["w"][tokens]
    y = parallel.all_gather(y, axis_name="model", codec=EIGHT, axis=1)
    y = parallel.psum_scatter(y, axis_name="data", codec=FOUR)
    return {"y": y, "count": tokens.size}

  like = jax.ShapeDtypeStruct
  params, tokens = {"w": like((50, 64), jnp.float32)}, like((256,), jnp.int32)
  found = explain(layer, params, tokens, workers={"data": 128, "model": 4})
  axes = lambda report: [(x.axis, x.workers) for x in report.collectives]
  assert axes(found.forward) == [("model", 4), ("data", 128)]
  assert axes(found.backward) == [("data", 128), ("model", 4)]
  payload = 256 * (64 + 4)  # elements and scales of an eighth of a kilobyte
  model = found.forward.by_axis["model"]
  assert sums(model) == (3 * payload, 3 * 4 * 256 * 64)
  assert str(found).startswith("Forward:\n") and "\nBackward:\n" in str(found)


def test_loops_and_branches_are_told_apart():
  send, permute = of("psum"), of("ppermute", perm=[(0, 1)])

  def function(x):
    x = lax.scan(lambda carry, _: (permute(carry), None), x, None, length=3)[0]
    return lax.cond(True, lambda x: jnp.sum(send(x)), lambda x: jnp.float32(0), x)

  report = explain(function, floats(8, 64), workers=AXES).forward
  found = report.collectives
  permuted = found[0].times * found[0].bytes_sent
  ratios = permuted / report.dense_bytes, report.ratio
  assert [*report.branch_ratios.values()] == [ratios]
  assert [(x.kind, x.times, x.in_branch) for x in found] == [
    ("collective-permute", 3, False),
    ("all-to-all", 1, True),
    ("all-gather", 1, True),
  ]


def test_a_mean_in_groups_is_booked_by_axis():
  """As a plain mean that adds inside groups first; elements need not be cut evenly."""

  def exchange(x):
    with jax.named_scope("gradcomp_stage"):
      part = lax.psum_scatter(jnp.tile(x, 4), "chip", tiled=True)
      between = lax.all_gather(part[:2], "host")
    with jax.named_scope("gradcomp_mean_13_over_8"):
      return lax.all_gather(between, "chip")

  workers = {"host": 2, "chip": 4}
  report = explain(exchange, floats(13), workers=workers).forward
  dense = {axis: x.dense_bytes for axis, x in report.by_axis.items()}
  assert dense == {"host": 2 * 7 * 52 // 8 - 2 * 3 * 52 // 4, "chip": 2 * 3 * 52 // 4}
  assert [*dense] == ["host", "chip"] and report.dense_bytes == 2 * 7 * 52 // 8
  assert [x.moved for x in report.collectives] == [0, dense["host"], -dense["host"]]


def test_workers_may_be_one_and_are_checked():
  trace = lambda workers: explain(of("all_gather"), floats(8, 64), workers=workers)
  assert trace({"data": 1}).bytes_sent == 0
  for workers in ("data", {}, {"data": 0}, {"data": 2.0}):
    with pytest.raises(ValueError, match=says("`workers` must", "got")):
      trace(workers)
