"""A small net that trains on a mesh, and goes on with another number of workers."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradcomp
from gradcomp.codecs import QSGD, BlockTop, LeafCodec

BATCH = 120  # of all workers together: one learning rate for any number of them
KINDS = "residual", "rows"  # of what a worker has of its own; owners keep rows
# How local steps are exchanged, and the learning rate that goes with it. The options of
# BlockTop are those of SparseLoCo, which sends too little for the rate of QSGD.
CODECS: dict[str, tuple[LeafCodec, gradcomp.local.LocalOptions, float]] = {
  "qsgd-4": (QSGD(bits=4), gradcomp.local.LocalOptions(exchange="two_shot"), 1e-2),
  "blocktop": (
    BlockTop(),
    gradcomp.local.LocalOptions(
      feedback=gradcomp.ErrorFeedback(residual_decay=0.95), merge="senders"
    ),
    3e-3,
  ),
}
State = tuple[Any, Any]
Parts = dict[int, list[np.ndarray]]  # what hosts saved, leaf by leaf


def first_params() -> dict[str, np.ndarray]:
  normal = np.random.default_rng(0).standard_normal
  return {
    "w": normal((16, 256), np.float32) / 4,
    "b": np.zeros(256, np.float32),
    "v": normal((256, 32), np.float32) / 16,
  }


def loss_fn(params: Any, batch: Any) -> jax.Array:
  hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
  return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


def read_batch(step: int) -> dict[str, np.ndarray]:
  """Returns the batch of all workers, with the outputs of a net to be learned."""
  x = np.random.default_rng([0, step]).standard_normal((BATCH, 16), np.float32)
  net = np.random.default_rng(1).standard_normal((16, 32), np.float32) / 4
  return {"x": x, "y": np.tanh(x @ net)}


class Training:
  """Trains a small net on a mesh, also from a state of another number of workers.

  Args:
    mesh: one device a worker.
    local_steps: the local steps before each exchange; 0 for none.
    codec: of local steps, a name of ``CODECS``.

  Attributes:
    kept: the last two states of parameters and optimizer, and the steps behind them.
  """

  def __init__(
    self, mesh: jax.sharding.Mesh, local_steps: int = 0, codec: str = "qsgd-4"
  ):
    self._mesh, self._round = mesh, local_steps
    self._params = first_params()
    self._optimizer = optax.chain(
      gradcomp.qsgd(bits=4, axis_name="data", exchange="two_shot", feedback="error"),
      optax.adam(1e-2),
    )
    if local_steps:
      code, options, rate = CODECS[codec]
      self._optimizer = gradcomp.local.local_steps(
        optax.adam(rate),
        optax.sgd(1.0),  # momentum would need more rounds than this training has
        axis_name="data",
        every=local_steps,
        codec=code,
        options=options,
      )
    # Without donation: a step that fails leaves what it was given.
    self._train_step = gradcomp.make_train_step(
      loss_fn, self._optimizer, axis_name="data", mesh=mesh, donate=False
    )
    with jax.set_mesh(mesh):
      state = self._params, self._optimizer.init(self._params)
    self.kept: collections.deque[tuple[int, State]] = collections.deque(maxlen=2)
    self._keep(0, state)

  def _keep(self, step: int, state: State) -> None:
    specs = gradcomp.state_specs(state, axis_name="data")
    place = lambda leaf, spec: jax.device_put(leaf, jax.NamedSharding(self._mesh, spec))
    self.kept.append((step, jax.tree.map(place, state, specs)))

  @property
  def step(self) -> int:
    return self.kept[-1][0]

  @property
  def params(self) -> Any:
    return self.kept[-1][1][0]

  def record(self, workers: int) -> dict[str, Any]:
    """Returns the record of a state with ``workers`` workers."""
    return gradcomp.checkpoint.record(self._optimizer, self._params, workers=workers)

  def advance(self, *, inspect: bool = False) -> dict[str, Any]:
    """Takes a step, and returns its loss, and the inspection if asked."""
    step, state = self.kept[-1]
    rows = BATCH // self._mesh.size * jax.local_device_count()
    own = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)
    cut = jax.NamedSharding(self._mesh, jax.P("data"))
    batch = {
      name: jax.make_array_from_process_local_data(cut, x[own])
      for name, x in read_batch(step).items()
    }
    *state, metrics = self._train_step(*state, batch, inspect=inspect)
    # JAX runs ahead of the devices: the errors of this step must be raised here.
    self.kept.append((step + 1, jax.block_until_ready(tuple(state))))
    return jax.device_get(jax.tree.map(_mean_here, metrics))

  def resume(
    self, step: int, parts: Parts, hosts: list[int], residuals: list[int]
  ) -> None:
    """Goes on from the parts that other workers left after a step.

    In the midst of a round it goes on from the last exchange, for only then do all have
    the same parameters. Residuals from before it are kept, and so are the states of the
    workers' own optimizers. The steps of the round are done again.

    Args:
      step: the number of steps.
      parts: of the hosts that left one; zeros are taken for the others.
      hosts: all that made the state, in their order.
      residuals: the same hosts, in the order in which the workers here take up their
        residuals. These are terms of a sum, unlike rows, whose order matters.
    """
    shapes = gradcomp.checkpoint.state_shapes(
      self._optimizer, self._params, workers=len(hosts), axis_name="data"
    )
    some = next(iter(parts.values()))
    whole = []
    for i, (kind, like) in enumerate(zip(self.kinds(), some, strict=True)):
      if not kind:
        whole.append(like)
        continue
      order = hosts if kind == "rows" else residuals
      own = [parts[x][i] if x in parts else np.zeros_like(like) for x in order]
      whole.append(np.concatenate(own))
    treedef = jax.tree.structure((self._params, shapes))
    params, opt_state = jax.tree.unflatten(treedef, whole)
    if self._round:
      step -= step % self._round
      opt_state = _at_the_exchange(opt_state, step)
    opt_state = gradcomp.reshard_state(
      self._optimizer,
      params,
      opt_state,
      axis_name="data",
      old_workers=len(hosts),
      workers=self._mesh.size,
      keep="mean",  # for the batch and the learning rate stay
      mesh=self._mesh,
    )
    self.kept.clear()
    self._keep(step, (params, opt_state))

  def kinds(self) -> list[str]:
    """Returns for each leaf the kind of a worker's own part, or ""."""
    specs = gradcomp.state_specs(self.kept[-1][1], axis_name="data")
    is_spec = lambda x: isinstance(x, jax.P)
    leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)
    return [_kind(path) if spec != jax.P() else "" for path, spec in leaves]

  def unsent(self, part: list[np.ndarray]) -> str:
    """Describes the unsent part of a worker in words."""
    pairs = list(zip(self.kinds(), part, strict=True))
    own = {kind: [x.ravel() for k, x in pairs if k == kind] for kind in KINDS}
    norms = {kind: np.linalg.norm(np.concatenate(x)) for kind, x in own.items() if x}
    return " and ".join(f"{kind} of norm {x:.2g}" for kind, x in norms.items())


def _kind(path: Any) -> str:
  """Returns the kind at a path: one of ``KINDS``, or "steps" for local steps."""
  text = jax.tree_util.keystr(path)
  if ".server_residual" in text:
    return "rows"
  return "residual" if ".residual" in text else "steps"


def _at_the_exchange(
  state: gradcomp.state.LocalStepsState, step: int
) -> gradcomp.state.LocalStepsState:
  """Takes all workers back to the parameters that they share."""
  away = jax.tree.map(np.zeros_like, state.own.moved)
  ((axes, (_, inner_state)),) = state.own.by_axes.items()
  own = type(state.own)({axes: (away, inner_state)})
  return state._replace(count=np.int32(step), own=own)


def _mean_here(x: jax.Array) -> jax.Array | np.floating:
  """Averages over this process's workers, where each has a value of its own."""
  if x.is_fully_replicated:
    return x
  return np.mean([part.data for part in x.addressable_shards])
