"""What the planner refuses."""

import jax
import jax.numpy as jnp

from tests.errors import table
from tests.support.cases.plan import GIGABIT as GIGABIT
from tests.support.cases.plan import plan as plan

ROWS = """
plan(workers=v) for v in 0, 2.0, (2, 2, 2) -> `workers` must be ... got {v}
plan(workers=(2, 2)) -> `link` must be ... for two axes a pair
plan(link=(GIGABIT, GIGABIT)) -> `link` must be a Link ... workers=4
plan(link=125e6) -> `link` must be a Link, ... got 125000000.0
plan(forward=1.0) -> `backward` must be given with `forward`
plan(speeds={"QSGD-4": 3.0}) -> `speeds` must be CodecSpeeds by name, got QSGD-4
plan(speeds=3.0) -> `speeds` must be None, ... got 3.0
plan(budget="low") -> `budget` must be one of ('none', ... , got 'low'
plan(budget=v) for v in 0.0, nan -> `budget` must be a finite number above 0, got {v}
plan(candidates=v) for v in ["qsgd"], [QSGD] -> `candidates` must hold codecs, ... got
plan(candidates="qsgd") -> `candidates` must be a sequence of codecs, got 'qsgd'
plan(margin=1.0) -> `margin` must be a number of at least 0 and below 1, got 1.0
plan(params={}) ; plan(params={"w": jnp.zeros((0, 3))}) -> `params` ... an element, got
plan({"w": jnp.zeros(3), "ids": jnp.zeros(3, jnp.int32)}) -> TypeError: `params`['ids']
plan({"w": v}) for v in 3, 2**31, "w" -> TypeError: `params`['w'] must be an array of
plan(gradients={"v": jnp.ones((64, 512))}) -> `gradients` must have the tree
plan(gradients={"w": jnp.ones((64, 51))}) -> `gradients` must have the shapes
plan(gradients={}) -> `gradients` must have a leaf with an element, got 0 leaves
plan(gradients={"w": jnp.zeros((64, 512))}) -> `gradients` must have a norm ... 0.0
plan(platform="tpu") -> `speeds` must be given on 'tpu': the package
explain(compress(QSGD(bits=2, levels="nonuniform"), axis_name="data"), HUGE, workers=4)
  -> `params` must have leaves of fewer elements
collective_seconds("tree", 1.0, v, GIGABIT) for v in 0, -1, 0.5, nan, "4" ->
  `workers` ... got {v}
"""
HUGE = jax.ShapeDtypeStruct((8 * 10**15,), jnp.float32)


test_bad_calls = table.refused(ROWS, globals())
