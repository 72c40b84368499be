"""A step with one text for all places, and optimizers around an exchange."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import QSGD

WORKERS = 4
OVER = {"axis_name": "data"}


def loss_fn(params, batch):
  hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
  return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


def problem(mesh, specs=None):
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  params = {"w": normal(16, 256) / 4, "b": normal(256), "v": normal(256, 32) / 16}
  rows = 8 * mesh.shape["data"]
  batch = {"x": normal(rows, 16), "y": normal(rows, 32)}
  place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
  put = {name: place(x, (specs or {}).get(name, P())) for name, x in params.items()}
  return put, place(batch, P("data"))


def own_loss(params, state, batch):
  """The loss at a worker's own parameters: those of all, but in local steps."""
  return loss_fn(gradcomp.local.local_params(params, state), batch)


def step_of(tx, **options):
  """A step whose text is the same in all places."""
  grad_fn = gradcomp.value_and_grad(own_loss, **OVER, **options)

  def step(params, state, batch):
    loss, grads = grad_fn(params, state, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  return step


def mapped(tx, mesh, check_vma=True):
  def step(params, state, batch):
    specs = gradcomp.state_specs(state, **OVER)
    given = {"in_specs": (P(), specs, P("data")), "out_specs": (P(), specs, P())}
    run = jax.shard_map(step_of(tx), mesh=mesh, check_vma=check_vma, **given)
    return run(params, state, batch)

  return step


def trained(step, tx, mesh):
  """Parameters, loss and state after three steps, which take what they are given."""
  params, batch = problem(mesh)
  with jax.set_mesh(mesh):
    state = tx.init(params)
  step = jax.jit(step, donate_argnums=(0, 1))
  for _ in range(3):
    params, state, loss = step(params, state, batch)
  return (params, loss), state


qsgd4 = gradcomp.qsgd(bits=4, **OVER)
kept4 = gradcomp.qsgd(bits=4, feedback="error", **OVER)
SGD = optax.sgd(0.1)
FROZEN = {"w": False, "b": True, "v": False}
LABELS = {name: "frozen" if x else "train" for name, x in FROZEN.items()}
TRAINED = {name: not x for name, x in FROZEN.items()}


def partitioned():
  parts = {"train": optax.chain(kept4, SGD), "frozen": optax.set_to_zero()}
  return optax.partition(parts, LABELS)


def masked():
  zeros = optax.masked(optax.set_to_zero(), FROZEN)
  return optax.chain(optax.masked(kept4, TRAINED), zeros, SGD)


# In front of an exchange, around it and behind it.
CHAINS = {
  "feedback": kept4,
  "terngrad": gradcomp.terngrad(**OVER),
  "redsync": gradcomp.redsync(density=0.01, **OVER),
  "zero": gradcomp.parallel.zero(
    SGD, grads=QSGD(bits=4), params=QSGD(bits=8), feedback="error", **OVER
  ),
  "local": gradcomp.local.local_steps(
    SGD,
    optax.sgd(0.7, 0.9, nesterov=True),
    every=2,
    codec=QSGD(bits=4),
    options=gradcomp.local.LocalOptions(fragments=2, delay=1, mixing=0.5),
    **OVER,
  ),
  "guarded": gradcomp.skip_nonfinite(
    optax.chain(gradcomp.onebit_sgd(**OVER), SGD), 3, **OVER
  ),
  "switch": optax.chain(
    gradcomp.wrappers.switch([1], [gradcomp.dense(**OVER), qsgd4]), SGD
  ),
  "injected": optax.inject_hyperparams(lambda r: optax.chain(kept4, optax.sgd(r)))(0.1),
  "partition": gradcomp.wrappers.allow_frozen(partitioned()),
  "masked": gradcomp.wrappers.allow_frozen(masked()),
  "behind": optax.chain(
    qsgd4,
    optax.clip_by_global_norm(0.1),
    optax.apply_if_finite(optax.MultiSteps(SGD, 2).gradient_transformation(), 2),
  ),
  # JAX has no rule for it under Explicit axes.
  "scaled": optax.chain(optax.scale(0.5), kept4, SGD),
}

AROUND = {
  "MultiSteps": optax.MultiSteps(optax.chain(qsgd4, SGD), 2).gradient_transformation(),
  "flatten": optax.flatten(optax.chain(qsgd4, SGD)),
  "masked": optax.masked(qsgd4, TRAINED),
  "apply_if_finite": optax.apply_if_finite(optax.chain(qsgd4, SGD), 2),
  "no exchange": optax.adam(0.1),
}
