"""A step with one text for all places, and optimizers with an exchange in them.

Its numbers round alike in every program: a gradient is one difference, and the rates of
SGD are powers of two.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import QSGD
from tests.support import laws, modes
from tests.support.cases.zero import coded

N = 4
OVER = {"axis_name": "data"}
SHAPES = {"w": (16, 256), "b": (256,), "v": (256, 32)}


class Held(NamedTuple):
  """What workers hold behind a step, ``[N, ...]``."""

  params: Any
  state: Any


def put(tree, mesh, *spec):
  return jax.device_put(tree, NamedSharding(mesh, P(*spec)))


def explicit_mesh(shape=(N,), names=("data",)):
  devices = jax.devices()[: int(np.prod(shape))]
  return jax.make_mesh(shape, names, (AxisType.Explicit,) * len(names), devices=devices)


def unreduced_axes(tree):
  """The axes that every leaf is unreduced over; they must be the same."""
  of = lambda x: frozenset(jax.typeof(x).sharding.spec.unreduced)
  (axes,) = set(map(of, jax.tree.leaves(tree)))
  return axes


def normal(seed, *lead):
  return laws.tree(SHAPES, *lead, seed=seed)


def loss_fn(params, targets):
  """The squared distance to a worker's target, ``[1, ...]``."""
  away = jax.tree.map(lambda x, y: jnp.sum((x - y[0]) ** 2) / 2, params, targets)
  return sum(away.values())


def own_loss(params, state, targets):
  """The loss at a worker's own parameters: those of all, but in local steps."""
  return loss_fn(gradcomp.local.local_params(params, state), targets)


def step_of(tx, **options):
  """A step whose text is the same in all places."""
  grad_fn = gradcomp.value_and_grad(own_loss, **OVER, **options)

  def step(params, state, targets):
    loss, grads = grad_fn(params, state, targets)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  return step


def mapped(tx, mesh):
  """The step in a map, whose types say what is equal on all workers."""

  def step(params, state, targets):
    specs = gradcomp.state_specs(state, **OVER)
    given = {"in_specs": (P(), specs, P("data")), "out_specs": (P(), specs, P())}
    return jax.shard_map(step_of(tx), mesh=mesh, **given)(params, state, targets)

  return step


def begun(tx, mesh, around=False):
  """Parameters and a state on a mesh; of gradients that wait for an exchange, too."""
  params = put(normal(0), mesh)
  with jax.set_mesh(mesh):
    if around:
      whole = jax.tree.map(lambda _: P(), params)
      return params, gradcomp.init_state(tx, params, param_specs=whole, **OVER)
    return params, jax.jit(tx.init)(params)


def targets_of(mesh, seed):
  return put(normal(seed, mesh.shape["data"]), mesh, "data")


def trained(place, tx, workers=N, steps=3, around=False):
  """Yields what workers hold behind each step, which takes what it is given."""
  if place in ("vmap", "pmap"):
    transform = {"vmap": jax.vmap, "pmap": jax.pmap}[place]
    step = jax.jit(transform(step_of(tx), **OVER))
    params = jax.tree.map(lambda x: np.stack([x] * workers), normal(0))
    state = jax.jit(transform(tx.init, **OVER))(params)
    for seed in range(1, steps + 1):
      targets = jax.tree.map(lambda x: x[:, None], normal(seed, workers))
      params, state, _ = step(params, state, targets)
      yield Held(jax.device_get(params), jax.tree.map(modes.words, state))
    return
  kind = AxisType.Explicit if place == modes.EXPLICIT else AxisType.Auto
  mesh = modes.mesh(workers, kind)
  params, state = begun(tx, mesh, around)
  if place == "step":
    step = gradcomp.make_train_step(loss_fn, tx, mesh=mesh, **OVER)
  else:
    plain = mapped(tx, mesh) if place == "shard_map" else step_of(tx)
    jitted = jax.jit(plain, donate_argnums=(0, 1))
    # JAX would compile once more for results, whose types say P() in other words.
    step = jitted.lower(params, state, targets_of(mesh, 0)).compile()
  for seed in range(1, steps + 1):
    before = params
    params, state, _ = step(params, state, targets_of(mesh, seed))
    assert place != "step" or all(x.is_deleted() for x in before.values())
    copies = jax.tree.map(lambda x: np.stack([x] * workers), jax.device_get(params))
    yield Held(copies, modes.of_each(state, workers))
  assert place != "step" or step._cache_size() == 1


qsgd4 = gradcomp.qsgd(bits=4, **OVER)
kept4 = gradcomp.qsgd(bits=4, feedback="error", **OVER)
dense = gradcomp.dense(**OVER)
SGD = optax.sgd(0.5, momentum=0.5)
KEPT = optax.chain(kept4, SGD)
FROZEN = {"w": False, "b": True, "v": False}
LABELS = {name: "frozen" if x else "train" for name, x in FROZEN.items()}
TRAINED = {name: not x for name, x in FROZEN.items()}
MASKED = optax.masked(kept4, TRAINED)
multi_steps = lambda tx: optax.MultiSteps(tx, 2).gradient_transformation()
_codec = optax.inject_hyperparams(gradcomp.compress)(
  codec=QSGD(bits=4), feedback="error", **OVER
)

# In front of an exchange, around it and behind it.
OPTIMIZERS = {
  "feedback": KEPT,
  "terngrad": gradcomp.terngrad(**OVER),
  "redsync": gradcomp.redsync(density=0.01, **OVER),
  "zero": coded(SGD, QSGD(bits=4), QSGD(bits=8), feedback="error"),
  "local": gradcomp.local.local_steps(
    SGD,
    optax.sgd(0.5, 0.5, nesterov=True),
    every=2,
    codec=QSGD(bits=4),
    fragments=2,
    delay=1,
    mixing=0.5,
    **OVER,
  ),
  "guarded": gradcomp.skip_nonfinite(
    optax.chain(gradcomp.onebit_sgd(**OVER), SGD), 3, **OVER
  ),
  "switch": optax.chain(gradcomp.wrappers.switch([1], [dense, qsgd4]), SGD),
  "injected": optax.inject_hyperparams(lambda r: optax.chain(kept4, optax.sgd(r)))(0.5),
  "injected codec": optax.chain(_codec, SGD),
  "frozen": gradcomp.wrappers.allow_frozen(
    optax.partition({"train": KEPT, "frozen": optax.set_to_zero()}, LABELS)
  ),
  "masked": gradcomp.wrappers.allow_frozen(
    optax.chain(MASKED, optax.masked(optax.set_to_zero(), FROZEN), SGD)
  ),
  "masks": optax.chain(MASKED, optax.masked(dense, FROZEN), SGD),
  "partition": optax.chain(
    optax.partition({"train": kept4, "frozen": dense}, LABELS), SGD
  ),
  "flatten": optax.chain(optax.flatten(kept4), SGD),
  "behind": optax.chain(
    qsgd4, optax.clip_by_global_norm(0.1), optax.apply_if_finite(multi_steps(SGD), 2)
  ),
  "scaled": optax.chain(optax.scale(0.5), kept4, SGD),
  "around": multi_steps(KEPT),
  "frozen around": gradcomp.wrappers.allow_frozen(multi_steps(KEPT)),
}
