"""A pick gives the result of its array alone, and traces its function once."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

from gradcomp._src.kernels.materialize import pick
from tests.support import modes

ARRAYS = [jnp.arange(4.0) + 10 * k for k in range(5)]


def doubled(traces, number, around, *arrays):
  def function(x):
    traces.append(x)
    return x * around, {"sum": x.sum()}

  return pick(function, number, arrays)


def mapped(function):
  size = len(ARRAYS)
  each = lambda number: function(number, jnp.float32(2), *ARRAYS)
  return jax.lax.map(each, jnp.arange(size))


WAYS = {
  "loop": mapped,
  "batch of numbers": lambda f: jax.vmap(f, (0, None, *[None] * 5))(
    jnp.arange(5), jnp.float32(2), *ARRAYS
  ),
  "batch of arrays": lambda f: jax.vmap(f, (None, 0, 0, *[None] * 4))(
    jnp.int32(0), jnp.full(5, 2.0), jnp.stack(ARRAYS), *ARRAYS[1:]
  ),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_number_picks_its_array_and_the_function_is_traced_once(way):
  traces = []
  function = functools.partial(doubled, traces)
  found = jax.jit(lambda: WAYS[way](function))()
  arrays = jnp.stack(ARRAYS)
  chex.assert_trees_all_equal(found, (arrays * 2, {"sum": arrays.sum(1)}))
  assert len(traces) == 1


def test_workers_pick_alike_and_one_array_is_no_choice():
  typed = lambda *arrays: pick(lambda x: (x + 1, 2, x), jnp.uint8(2), arrays)
  specs = {
    "in_specs": jax.P("data"),
    "out_specs": (jax.P("data"), jax.P(), jax.P("data")),
  }
  step = jax.jit(jax.shard_map(typed, mesh=modes.mesh(2), **specs))
  chex.assert_trees_all_equal(step(*ARRAYS), (ARRAYS[2] + 1, 2, ARRAYS[2]))
  assert "stablehlo.case" in step.lower(*ARRAYS).as_text()
  assert "stablehlo.case" not in step.lower(ARRAYS[0]).as_text()
