"""States that are made outside of a map, and copied to the workers or stacked."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from gradcomp.codecs import QSGD
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits
from tests.support.cases.local import local
from tests.support.cases.steps import OVER, N
from tests.support.cases.zero import coded

PARAMS = {"b": np.ones(64, np.float32), "w": np.ones((96, 64), np.float32)}
replicable, init_state = gradcomp.wrappers.replicable, gradcomp.init_state

# What flax.jax_utils.replicate does, but for devices.
copies = lambda tree, n=N: jax.tree.map(lambda x: jnp.stack([x] * n), tree)
zero = lambda inner: coded(inner, QSGD(bits=4), QSGD(bits=8))
sent = lambda exchange, **options: gradcomp.qsgd(
  bits=4, exchange=exchange, **{"feedback": "error"} | options, **OVER
)
INT8 = gradcomp.ErrorFeedback(residual_dtype="int8")
ALIKE = {
  "two_shot": lambda: sent("two_shot"),
  "no feedback": lambda: sent("two_shot", feedback=None),
  "momentum": lambda: sent("two_shot", feedback="momentum"),
  "int8": lambda: sent("ring", feedback=INT8),
  "groups": lambda: sent(gradcomp.exchange.Hierarchical(group_size=2)),
  "levels": lambda: sent("two_shot", levels="nonuniform"),
  "1-bit": lambda: gradcomp.onebit_sgd(**OVER),
  "redsync": lambda: gradcomp.redsync(density=0.01, **OVER),
  "low rank": lambda: gradcomp.powersgd(rank=2, **OVER),
  "sampled": lambda: gradcomp.topk(density=0.1, selection="sampled", **OVER),
  "zero": lambda: zero(optax.adam(0.1)),
  "local": lambda: local(optax.adam(0.1), optax.sgd(0.7), QSGD(bits=4), every=2),
}
# The first state of schedule_free has the parameters, of which a worker owns some.
ROWS = lambda: zero(optax.contrib.schedule_free(optax.sgd(0.1), 0.1))


def inside(tx):
  """The states of an init in the map, and those of an init for each worker."""
  return jax.pmap(tx.init, axis_name="data")(copies(PARAMS))


@pytest.mark.parametrize("name", ["two_shot", "rows", *slow(*list(ALIKE)[1:])])
def test_a_state_from_outside_has_the_bits_of_an_init_in_the_map(name):
  """Stacked, or copied to the workers, but where it differs between them."""
  tx = optax.chain((ALIKE | {"rows": ROWS})[name](), optax.scale(1.0))
  expected = inside(tx)
  assert_same_bits(init_state(tx, PARAMS, replicate=N, **OVER), expected)
  outside = replicable(tx, workers=N, **OVER)
  if name != "rows":
    assert_same_bits(copies(outside.init(PARAMS)), expected)
    return
  with pytest.raises(ValueError, match=r"init_state\(optimizer, params.*replicate=4"):
    outside.init(PARAMS)


@pytest.mark.bits
def test_the_cure_in_the_error_trains_with_the_bits_of_an_init_in_the_map():
  """A program that copies its state is told one line, and that line serves."""
  optimizer = optax.chain(ALIKE["two_shot"](), optax.scale(-0.1))
  rng = np.random.default_rng(0)
  normal = lambda x: np.float32(rng.standard_normal((N, *x.shape)))
  grads = [jax.tree.map(normal, PARAMS) for _ in range(3)]
  step = jax.pmap(optimizer.update, axis_name="data")
  with pytest.raises(ValueError, match=r"copies one state") as found:
    step(grads[0], copies(optimizer.init(PARAMS)))
  (cure,) = re.findall(r"gradcomp\.wrappers\.replicable\(.*?\)", str(found.value))

  def trained(state):
    for grad in grads:
      updates, state = step(grad, state)
    return updates, state

  outside = eval(cure, {"gradcomp": gradcomp, "optimizer": optimizer})
  expected = trained(inside(optimizer))
  assert_same_bits(trained(copies(outside.init(PARAMS))), expected)
  assert np.any(expected[1][0].server_residual[("data",)][0])


def test_inside_of_a_map_the_workers_are_counted():
  """Not those of the program outside; a mesh that is set is no map."""
  tx = ALIKE["two_shot"]()
  outside = replicable(tx, workers=N, **OVER)
  given = jax.eval_shape(lambda: copies(PARAMS, 2))
  of = lambda tx: jax.eval_shape(jax.vmap(tx.init, axis_name="data"), given)
  assert of(outside) == of(tx)
  alone = jax.eval_shape(outside.init, PARAMS)
  with jax.set_mesh(modes.mesh(2)):
    assert jax.eval_shape(outside.init, PARAMS) == alone
  both = [str(gradcomp.explain(x, PARAMS, workers=2)) for x in (outside, tx)]
  assert both[0] == both[1]


@pytest.mark.slow
def test_states_for_two_axes_are_stacked_by_both():
  axes = {"axis_name": ("host", "chip")}
  tx = gradcomp.qsgd(bits=4, exchange="hierarchical", feedback="error", **axes)
  init = jax.vmap(jax.vmap(tx.init, axis_name="chip"), axis_name="host")
  each = lambda tree: copies(copies(tree, 3), 2)
  expected = init(each(PARAMS))
  assert_same_bits(init_state(tx, PARAMS, replicate=(2, 3), **axes), expected)
  one = replicable(tx, workers=(2, 3), **axes).init(PARAMS)
  assert_same_bits(each(one), expected)
