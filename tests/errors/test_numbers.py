"""Every number of the interface that breaks its rule is refused by its own name."""

import functools
import inspect
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
import gradcomp.testing
from gradcomp import codecs, cost, floats, local, skip_nonfinite
from gradcomp.checkpoint import make_record, state_shapes
from gradcomp.contrib import Eden, dion
from gradcomp.cost import Cluster, CodecSpeed, Link
from gradcomp.exchange import Hierarchical
from gradcomp.optimizers import DoublingGaps, Stable, adam
from gradcomp.parallel import zero
from tests.support import factories, modes
from tests.support.assertions import says
from tests.support.cases.recipe import NEEDED, RECIPES
from tests.support.option_fields import with_options

# Of any argument.
NEVER = (-1, math.inf, math.nan, np.float32("nan"), "4", [4], 4j, True)
# Where nothing is a number too, and where parts are.
ZEROS = """
add b1 b2 backward decay decode delay elements encode floor forward keep latency margin
mantissa_bits max_consecutive_errors message_bytes messages min_leaf_size momentum mu
nbytes start
"""
FRACTIONS = """
add backward bytes_per_second clip_sigmas decode elements encode factor forward keep
latency max_norm messages min_rate nbytes scale slack
"""
HUGE = (1e30, 2**31, 10**400)  # may be taken, if they work
PARAMS = {"w": jax.ShapeDtypeStruct((16, 256), jnp.float32)}
LINK = Link(latency=1e-5, bytes_per_second=1e8)
MODEL = dict(workers=4, link=LINK)
SPEED = dict(encode=1e-10, decode=1e-10, add=1e-10)
PASSES = dict(forward=1.0, backward=1.0)
CLUSTER = Cluster(**MODEL)
DENSE = gradcomp.dense(axis_name="data")
FORMAT = floats.FloatFormat(5, 2)
ZERO = dict(inner=optax.sgd(0.1), grads=codecs.QSGD(), params=codecs.QSGD(bits=8))
part = functools.partial


def step(tx):
  worker = lambda g: tx.update(g, tx.init(g), g)
  stack = {"w": jax.ShapeDtypeStruct((4, 16, 256), jnp.float32)}
  jax.eval_shape(jax.vmap(worker, axis_name="data"), stack)


def stepping(make, /, **base):
  """What makes a transformation, and steps."""
  return lambda **given: step(make(**{"axis_name": "data"} | base | given))


def coding(codec):
  return lambda **given: step(gradcomp.compress(codec(**given), axis_name="data"))


def feeding(kind):
  return lambda **given: step(gradcomp.qsgd(feedback=kind(**given), axis_name="data"))


def rounds(**given):
  given = {"codec": codecs.Dense(), "axis_name": "data", "every": 4} | given
  step(local.local_steps(optax.sgd(1.0), optax.sgd(1.0), **given))


def planning(**given):
  given = MODEL | {"candidates": []} | given
  given = PASSES | given if given.keys() & PASSES else given
  cost.plan(PARAMS, **with_options(cost.PlanOptions, given))


def grads(**given):
  take = gradcomp.value_and_grad(lambda p, x: jnp.mean(x), axis_name=None, **given)
  jax.eval_shape(take, PARAMS, jax.ShapeDtypeStruct((32, 16), jnp.float32))


def training(**given):
  where = {"axis_name": "data", "mesh": modes.mesh(4)}
  options = gradcomp.TrainOptions(**given)
  gradcomp.make_train_step(lambda p, x: 0.0, DENSE, options=options, **where)


def numbers(described, *left_out):
  hints = typing.get_type_hints(described)
  one = lambda hint: hint in (int, float) or any(map(one, typing.get_args(hint)))
  names = [x for x in inspect.signature(described).parameters if x in hints]
  return [x for x in names if one(hints[x]) and x not in ("key", *left_out)]


DOORS = [
  *((stepping(f, **NEEDED.get(x, {})), numbers(f)) for x, f in RECIPES.items()),
  *((coding(x), numbers(x)) for x in factories.codecs()),
  (stepping(gradcomp.qsgd, levels="nonuniform"), ["refit_every"]),
  (stepping(gradcomp.redsync, selection="sampled"), ["search_every"]),
  (stepping(gradcomp.qsgd), ["min_leaf_size", "message_bytes"]),
  (lambda **x: step(skip_nonfinite(DENSE, **x)), ["max_consecutive_errors"]),
  (stepping(gradcomp.wrappers.clip_by_local_norm), ["max_norm"]),
  (rounds, [*numbers(local.local_steps), "min_leaf_size", "message_bytes"]),
  (feeding(gradcomp.ErrorFeedback), numbers(gradcomp.ErrorFeedback)),
  (feeding(gradcomp.MomentumFeedback), numbers(gradcomp.MomentumFeedback)),
  (lambda **x: stepping(gradcomp.qsgd)(exchange=Hierarchical(**x)), ["group_size"]),
  # A floor of Adam's may be any number, and its rate a schedule.
  (stepping(adam, learning_rate=0.1), numbers(adam, "learning_rate", "eps")),
  (stepping(dion, learning_rate=0.1, rank=1), numbers(dion, "learning_rate")),
  (stepping(zero, **ZERO), numbers(zero)),
  *((x, numbers(x)) for x in (DoublingGaps, Stable, Eden)),
  (part(gradcomp.wrappers.replicable, DENSE, axis_name="data"), ["workers"]),
  *((part(f, DENSE, PARAMS), ["workers"]) for f in (gradcomp.explain, make_record)),
  (part(state_shapes, DENSE, PARAMS, axis_name="data"), ["workers"]),
  (training, numbers(gradcomp.TrainOptions)),
  (grads, ["accumulate"]),
  (part(floats.FloatFormat, exponent_bits=5, mantissa_bits=2), ["exponent_bits"]),
  (part(floats.all_reduce, jnp.ones(4), FORMAT, order="hierarchical"), ["group_size"]),
  (part(Link, latency=0.0, bytes_per_second=1.0), numbers(Link)),
  (part(CodecSpeed, **SPEED), numbers(CodecSpeed)),
  (CodecSpeed(**SPEED).times, ["factor"]),
  (part(Cluster, **MODEL), ["workers", "link", "add"]),
  (part(Cluster, inside=LINK, group_size=2, **MODEL), ["inside", "group_size"]),
  (
    part(cost.collective_seconds, "ppermute", nbytes=1.0, **MODEL),
    ["link", *numbers(cost.collective_seconds)],
  ),
  (part(cost.dense_seconds, elements=4, cluster=CLUSTER), ["elements", "cluster"]),
  (part(cost.step_seconds, messages=(), overlap=True, **PASSES), [*PASSES]),
  (planning, ["link", *numbers(cost.plan, "budget"), *numbers(cost.PlanOptions)]),
]
# What would run for as long as it is told.
KIT = [
  (part(gradcomp.testing.check_codec, codecs.Dense()), ["workers"]),
  (gradcomp.testing.CheckOptions, ["draws"]),
  (part(gradcomp.testing.check_transformation, DENSE), ["workers", "steps"]),
]


def each(doors):
  pairs = [(i, make, x) for i, (make, names) in enumerate(doors) for x in names]
  found = [pytest.param(make, name, id=f"{name}-{i}") for i, make, name in pairs]
  return pytest.mark.parametrize("make, name", found)


@each([*DOORS, *KIT])
def test_what_breaks_the_rule_is_refused_by_name(make, name):
  zero = [0] * (name not in ZEROS.split())
  for value in (*NEVER, *zero, *[1.5] * (name not in FRACTIONS.split())):
    with pytest.raises((ValueError, TypeError), match=says(f"`{name}`", "must", "got")):
      make(**{name: value})


@each(DOORS)
def test_what_is_taken_works(make, name):
  """Else int32 overflows in a step, or JAX fails in C++."""
  for value in HUGE:
    try:
      make(**{name: value})
    except (ValueError, TypeError) as error:
      assert f"`{name}`" in str(error)
