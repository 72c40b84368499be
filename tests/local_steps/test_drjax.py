"""``mean_over`` against drjax, in whose loops it has the place of ``reduce_mean``."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import QSGD, Dense
from tests.support import modes

drjax = pytest.importorskip("drjax")

WORKERS, EVERY, STEPS = 4, 5, 40


def test_it_is_reduce_mean():
  """Both round narrow sums once, in each dtype."""
  normal = np.random.default_rng(0).standard_normal((WORKERS, 64, 64))
  tree = {"w": normal.astype(np.float32), "b": (jnp.asarray(normal[:, 0], "bfloat16"),)}
  program = drjax.program(placements={"diloco": WORKERS})
  reduce_mean = jax.jit(program(lambda tree: drjax.reduce_mean(tree)))
  got, expected = gradcomp.mean_over(tree, codec=Dense()), reduce_mean(tree)
  chex.assert_trees_all_equal_dtypes(got, expected)
  np.testing.assert_allclose(got["w"], expected["w"], rtol=1e-5, atol=1e-7)
  narrow = lambda tree: np.asarray(tree["b"][0], np.float32)
  np.testing.assert_allclose(narrow(got), narrow(expected), rtol=2**-7, atol=1e-7)


def diloco(reduce):
  """A step as MaxText takes it: of each worker, and each fifth time of all."""
  outer = optax.sgd(0.6, 0.3, nesterov=True)
  loss_fn = lambda w, x: jnp.mean((x @ w - x[:, ::-1]) ** 2)

  def local_step(w, x):
    loss, grad = jax.value_and_grad(loss_fn)(w, x)
    return w - 2.0 * grad, loss

  @jax.jit
  @drjax.program(placements={"diloco": WORKERS})
  def step(state, batch):
    inner, losses = drjax.map_fn(local_step, (state["inner"], batch))
    state = state | {"inner": inner, "count": state["count"] + 1}

    def synchronize(state):
      delta = drjax.broadcast(state["params"]) - state["inner"]
      mean, kept = reduce(delta, state["kept"])
      updates, momentum = outer.update(mean, state["momentum"], state["params"])
      params = optax.apply_updates(state["params"], updates)
      new = {"params": params, "momentum": momentum, "kept": kept}
      return state | new | {"inner": drjax.broadcast(params)}

    due = state["count"] % EVERY == 0
    state = jax.lax.cond(due, synchronize, lambda state: state, state)
    return state, drjax.reduce_mean(losses)

  return step, outer


def trained(codec=None):
  """The losses of a training, and the bytes that a synchronization sends."""
  given = {"codec": codec, "mesh_axis": "diloco"}
  reduce = lambda delta, kept: (drjax.reduce_mean(delta), kept)
  if codec is not None:
    reduce = lambda delta, kept: gradcomp.mean_over(delta, state=kept, **given)
  mesh = modes.mesh(WORKERS, AxisType.Auto, axis_name="diloco")
  put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
  step, outer = diloco(reduce)
  data = np.random.default_rng(1).standard_normal((STEPS, WORKERS, 64, 64))
  with jax.set_mesh(mesh):
    params = put(jnp.zeros((64, 64)))
    inner = put(jnp.zeros((WORKERS, 64, 64)), "diloco")
    state = {"params": params, "inner": inner, "momentum": outer.init(params)}
    kept = None if codec is None else gradcomp.local.mean_state(inner, **given)
    state = state | {"kept": kept, "count": jnp.int32(0)}
    batches = [put(x.astype(np.float32), "diloco") for x in data]
    compiled = step.lower(state, batches[0]).compile()
    losses = []
    for batch in batches:
      state, loss = compiled(state, batch)
      losses.append(float(loss))
  return losses, gradcomp.wire_report(compiled).bytes_sent


def test_one_line_of_diloco_sends_four_bits():
  """It trains as float32 does, and sends a quarter of its bytes in one stage."""
  losses, sent = trained()
  exact, exact_sent = trained(Dense())
  few, few_sent = trained(QSGD(bits=4))
  assert losses[-1] < losses[0] / 50
  # Eight sums of four numbers in another order, each off by up to 2**-22.
  np.testing.assert_allclose(exact, losses, rtol=1e-4)
  # A loss is off by what the last synchronization lacks: measured, up to 0.5 %.
  np.testing.assert_allclose(few, losses, rtol=0.02)
  loss = 4 * 3 / 2  # each step sends the mean of four losses
  assert exact_sent == sent
  # Gathered: three rows of 4 bits and a scale to 512, where a sum takes 3/2 of 32 bits.
  assert few_sent - loss == (sent - loss) * 2 * (4 + 32 / 512) / 32
