"""Every number of the interface that breaks its rule is refused by its own name.

A new argument gets a line here. Whatever is refused is a ValueError or a TypeError that
names the argument, at once; whatever is taken also works.
"""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
import gradcomp.testing
from gradcomp import codecs, cost, exchange, floats
from gradcomp.cost import Cluster, CodecSpeed, Link
from gradcomp.wire import trace_wire
from tests.support import modes
from tests.support.assertions import says
from tests.support.option_fields import with_options

NEVER = (-1, math.inf, math.nan, np.float32("nan"), "4", [4], 4j)  # of any argument
HUGE = (1e30, 2**31, 10**400)  # may be taken, if they work
LEAF = jax.ShapeDtypeStruct((16, 256), jnp.float32)
PARAMS = {"w": LEAF}
LINK = Link(latency=1e-5, bytes_per_second=1e8)
MODEL = dict(workers=4, link=LINK)
SPEED = dict(encode=1e-10, decode=1e-10, add=1e-10)
CLUSTER = Cluster(workers=4, link=LINK)
part = functools.partial


def step(tx):
  """Traces a step of four workers."""

  def worker(g):
    return tx.update({"w": g}, tx.init({"w": g}), {"w": g})

  stack = jax.ShapeDtypeStruct((4, *LEAF.shape), LEAF.dtype)
  jax.eval_shape(jax.vmap(worker, axis_name="data"), stack)


def stepping(make, /, **base):
  """What makes a transformation, and steps."""
  return lambda **given: step(make(**{"axis_name": "data"} | base | given))


def skipping(**given):
  step(gradcomp.skip_nonfinite(gradcomp.dense(axis_name="data"), **given))


def rounds(**given):
  rule = {"codec": codecs.Dense(), "axis_name": "data", "every": 4}
  given = with_options(gradcomp.local.LocalOptions, rule | given)
  step(gradcomp.local.local_steps(optax.sgd(1.0), optax.sgd(1.0), **given))


def planning(**given):
  options = with_options(cost.PlanOptions, {"candidates": []} | given)
  gradcomp.cost.plan(PARAMS, **options)


def feeding(kind):
  return lambda **given: step(gradcomp.qsgd(feedback=kind(**given), axis_name="data"))


def coding(kind, **base):
  return lambda **given: step(gradcomp.compress(kind(**base | given), axis_name="data"))


def grads(**given):
  loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2)
  take = gradcomp.value_and_grad(loss, axis_name=None, **given)
  jax.eval_shape(take, PARAMS, jax.ShapeDtypeStruct((32, 16), jnp.float32))


def training(**given):
  exchange = gradcomp.dense(axis_name="data")
  gradcomp.make_train_step(
    lambda p, x: 0.0,
    exchange,
    axis_name="data",
    mesh=modes.mesh(4),
    options=gradcomp.TrainOptions(**given),
  )


def explaining(function):
  return part(function, gradcomp.dense(axis_name="data"), PARAMS)


def between(axis):
  send = lambda x: gradcomp.parallel.psum(
    x, axis_name="data", codec=codecs.QSGD(bits=4)
  )
  trace_wire(send, LEAF, workers={"data": axis})


FORMAT = floats.FloatFormat(5, 2)
MATRIX = jnp.ones((4, 4))
QSGD = stepping(gradcomp.qsgd)
TOP = stepping(gradcomp.redsync, selection="sampled")
CASES = [
  (QSGD, "bits bucket_size rotate refit_every min_leaf_size message_bytes"),
  (stepping(gradcomp.qsgd, levels="nonuniform"), "refit_every"),
  (stepping(gradcomp.eight_bit), "bucket_size"),
  (stepping(gradcomp.onebit_sgd), "bucket_size"),
  (stepping(gradcomp.terngrad), "clip_sigmas bucket_size"),
  (stepping(gradcomp.aps), "exponent_bits mantissa_bits"),
  (stepping(gradcomp.loss_scaling_cast, factor=1.0), "factor exponent_bits"),
  (stepping(gradcomp.blocktop), "block_size count bits"),
  (TOP, "density momentum max_norm slack search_every"),
  (stepping(gradcomp.powersgd), "rank min_rate start bits"),
  (stepping(gradcomp.wrappers.clip_by_local_norm), "max_norm"),
  (skipping, "max_consecutive_errors"),
  (rounds, "every fragments delay mixing"),
  (feeding(gradcomp.ErrorFeedback), "residual_decay residual_dtype"),
  (feeding(gradcomp.MomentumFeedback), "residual_decay decay"),
  (coding(codecs.FloatCast), "scale addends exponent_bits"),
  (coding(codecs.PowerSGD), "rank min_rate matrix"),
  (coding(codecs.RandomK, density=0.1), "density range_size"),
  (coding(codecs.TopK, density=0.1), "density slack search_every range_size"),
  (lambda **x: QSGD(exchange=exchange.Hierarchical(**x)), "group_size"),
  (explaining(gradcomp.explain), "workers"),
  (explaining(gradcomp.checkpoint.record), "workers"),
  (part(explaining(gradcomp.checkpoint.state_shapes), axis_name="data"), "workers"),
  (training, "accumulate compare_every"),
  (grads, "accumulate"),
  (part(floats.FloatFormat, exponent_bits=5, mantissa_bits=2), "exponent_bits"),
  (part(floats.all_reduce, MATRIX, FORMAT, order="hierarchical"), "group_size"),
  (part(Link, latency=0.0, bytes_per_second=1.0), "latency bytes_per_second factor"),
  (part(CodecSpeed, **SPEED), "encode decode add keep"),
  (CodecSpeed(**SPEED).times, "factor"),
  (part(Cluster, **MODEL), "workers link add"),
  (part(Cluster, inside=LINK, group_size=2, **MODEL), "inside group_size"),
  (part(cost.all_gather_seconds, nbytes=1.0, **MODEL), "nbytes workers link"),
  (part(cost.all_to_all_seconds, nbytes=1.0, **MODEL), "nbytes workers link"),
  (part(cost.all_reduce_seconds, nbytes=1.0, **MODEL), "nbytes workers link add"),
  (part(cost.reduce_scatter_seconds, nbytes=1.0, **MODEL), "nbytes workers link add"),
  (part(cost.ppermute_seconds, nbytes=1.0, **MODEL), "nbytes workers link messages"),
  (part(cost.tree_seconds, nbytes=1.0, **MODEL), "nbytes workers link"),
  (part(cost.dense_seconds, elements=4, cluster=CLUSTER), "elements cluster"),
  (
    part(cost.step_seconds, forward=1.0, backward=1.0, messages=(), overlap=True),
    "forward backward",
  ),
  (part(planning, **MODEL), "workers link steps margin"),
  (
    part(planning, forward=1.0, backward=1.0, **MODEL),
    "forward backward",
  ),
]
# What would run for as long as it is told.
KIT = [
  (part(gradcomp.testing.check_codec, codecs.Dense()), "workers"),
  (gradcomp.testing.CheckOptions, "draws"),
  (
    part(gradcomp.testing.check_transformation, gradcomp.dense(axis_name="data")),
    "workers steps",
  ),
]


def lines(cases):
  return [(make, name) for make, names in cases for name in names.split()]


def each(cases):
  return pytest.mark.parametrize(
    "make, name",
    [
      pytest.param(make, name, id=f"{name}-{i}") for i, (make, name) in enumerate(cases)
    ],
  )


@each(lines([*CASES, *KIT]))
def test_what_breaks_the_rule_is_refused_by_name(make, name):
  for value in NEVER:
    with pytest.raises((ValueError, TypeError), match=says(f"`{name}`")):
      make(**{name: value})


@each(lines(CASES))
def test_what_is_taken_works(make, name):
  """Else int32 overflows in a step, or JAX fails in C++."""
  for value in HUGE:
    try:
      make(**{name: value})
    except (ValueError, TypeError) as error:
      assert f"`{name}`" in str(error)


@pytest.mark.parametrize("workers", [2**18 + 1, 2**31, (2**16, 2**16)])
def test_more_workers_than_a_study_takes(workers):
  tx = gradcomp.dense(axis_name=("a", "b") if isinstance(workers, tuple) else "data")
  with pytest.raises(ValueError, match=says("`workers` must be less", "262,144")):
    gradcomp.explain(tx, PARAMS, workers=workers)


@pytest.mark.parametrize("exchange", ["psum", "ring"])
def test_as_many_workers_as_a_study_takes(exchange):
  tx = gradcomp.dense(axis_name="data", exchange=exchange)
  sent = gradcomp.explain(tx, PARAMS, workers=2**18).bytes_sent
  assert sent >= math.ceil(Fraction(2 * (2**18 - 1), 2**18) * 4 * 16 * 256)


def test_more_devices_than_jax_counts_between_layers():
  with pytest.raises(ValueError, match=says("`workers` must be less", "2**31")):
    between(2**31)


@pytest.mark.parametrize("key", [None, "4", [4], 1.5, 2**63, -(2**63) - 1, 4j])
def test_keys_that_are_no_seeds(key):
  with pytest.raises(ValueError, match=says("`key` must be")):
    gradcomp.qsgd(key=key).init({"w": jnp.ones(3)})


@pytest.mark.parametrize("name", ["argnums", "batch_argnums"])
@pytest.mark.parametrize("value", [1.5, "0", {}, 4j, [0.5]])
def test_positions_that_are_none(name, value):
  with pytest.raises(ValueError, match=says(f"`{name}` must be the position", "got")):
    grads(**{name: value})


def test_positions_are_integers_of_numpy_too():
  take = gradcomp.value_and_grad(jnp.sum, axis_name=None, argnums=np.int64(0))
  assert take(jnp.ones(2))[1].tolist() == [1, 1]
  missing = gradcomp.value_and_grad(jnp.sum, axis_name="data", argnums=1)
  with pytest.raises(ValueError, match=says("`argnums`", "1 arguments", "got 1")):
    missing(jnp.ones(2))


def test_residuals_are_stored_in_types_and_not_in_numbers():
  with pytest.raises(ValueError, match="`residual_dtype`"):
    gradcomp.ErrorFeedback(residual_dtype=np.float32(0.5))


def test_integers_of_numpy_count_workers():
  assert Cluster(workers=np.int64(4), link=LINK) == CLUSTER
  assert cost.plan(PARAMS, workers=np.int64(1), link=LINK).chosen
