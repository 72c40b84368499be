"""Laws of transformations: updates, residuals and bytes of the steps of a run."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.codecs.protocol import from_tiles
from gradcomp._src.core.residual_storage import is_stored, kind, read_residual
from gradcomp._src.core.state import is_state, states_in
from gradcomp._src.exchange.collectives import REPEAT
from gradcomp._src.exchange.plan import MessagePlan, owned_matrices
from gradcomp._src.report.explain import explain
from gradcomp._src.report.wire_report import wire_report
from gradcomp._src.testing import broken, modes
from gradcomp._src.testing import leaves as kit

__all__ = ["bytes_are_explained", "finite_gradients_stay_finite"]
__all__ += ["non_finite_gradients_are_seen", "nothing_is_lost"]
__all__ += ["same_bits_in_every_mode", "spoiled", "workers_agree"]

SUBJECT = "the transformation"
RUN = 'testing.modes.run("vmap", gradcomp.onebit_sgd(axis_name="data"), '
RUN += "[jnp.arange(198.0).reshape(2, 99)] * 2)"


@broken.law(RUN, "what workers decode: it must be the same bytes")
def workers_agree(run: modes.Run) -> broken.Findings:
  """Every worker gets the same bits, with the shapes and dtypes of the gradients.

  With ``exchange="local"`` each keeps its own.
  """
  for step, both in enumerate(zip(run.outputs, run.gradients, strict=True)):
    for path, got, like in kit.zipped(*both):
      told = None
      if (got.shape, got.dtype) != (like.shape, like.dtype):
        told = f"it is {broken.described(got)} in place of {broken.described(like)}"
      elif run.exchanges:
        first = np.broadcast_to(np.asarray(got)[:1], got.shape)
        told = broken.difference(got, first, bits=True)
      found = told and f"in step {step} of {path}, [worker, ...], {told}"
      yield SUBJECT, "return the same updates on all workers, like the gradients", found


@broken.law(
  f"{RUN}, gradcomp.{RUN.replace('vmap', 'shard_map')}",
  "products that a compiler adds without rounding them first, and keys",
)
def same_bits_in_every_mode(run: modes.Run, *others: modes.Run) -> broken.Findings:
  """Other modes have the bits of a run, in the updates and states of all steps."""
  for other in others:
    for path, got, own in kit.zipped(kept(other), kept(run)):
      told = broken.difference(got, own, of=f"{path}, [worker, ...],", bits=True)
      yield SUBJECT, f"have the bits in {other.mode} that it has in {run.mode}", told


def kept(run: modes.Run) -> list[Any]:
  """Returns the outputs and states of each step, without memories of each worker."""

  # Under Explicit axes memories are of addends, gradients over N. Zeros in few bits
  # have one scale there and everywhere, so residuals are read.
  def shared(x: Any) -> Any:
    if not is_state(x):
      return x
    memory = x.memory and x.memory._replace(own=())
    return x._replace(memory=memory, residual=_floats(x.residual))

  states = [jax.tree.map(shared, x, is_leaf=is_state) for x in run.states[1:]]
  return list(zip(run.outputs, states, strict=True))


def _floats(residual: Any) -> Any:
  """Returns residuals as floats, by one program if they are stored in fewer bits."""
  read = lambda tree: jax.tree.map(read_residual, tree, is_leaf=is_stored)
  stored = any(map(is_stored, jax.tree.leaves(residual, is_leaf=is_stored)))
  return jax.jit(read)(residual) if stored else residual


def spoiled(gradients: kit.Gradients, bad: float = math.nan) -> kit.Gradients:
  """Returns gradients with ``bad`` amid one worker's largest leaf in the last step."""
  leaves, treedef = jax.tree.flatten(gradients[-1])
  number = max(range(len(leaves)), key=lambda i: leaves[i].size)
  leaves[number] = np.array(leaves[number], order="C")
  flat = leaves[number].reshape(leaves[number].shape[0], -1)
  flat[-1, flat.shape[1] // 2] = bad
  return [*gradients[:-1], jax.tree.unflatten(treedef, leaves)]


@broken.law(
  RUN.replace("[jnp", "gradcomp.testing.laws.spoiled([jnp") + ")",
  "`decode_rows`, and what is kept of elements that are not finite",
)
def non_finite_gradients_are_seen(run: modes.Run) -> broken.Findings:
  """A NaN of one worker reaches every worker's update, and no state.

  The gradients of the last step are :func:`spoiled`. Where the mean is not finite, the
  residual of a single transformation stays, and elsewhere it changes. An optimizer's
  own state is not tried.
  """
  expected = "bring a NaN to all workers' updates, and to no state"
  outputs = run.outputs[-1]
  for state in map(states_in, run.states):
    for path, x in kit.zipped(state):
      bad = jnp.issubdtype(x.dtype, jnp.floating) and not _finite(x).all()
      told = f"of gradcomp's states{path} is no longer finite" if bad else None
      yield SUBJECT, expected, told
  for i, (path, given, got) in enumerate(kit.zipped(run.gradients[-1], outputs)):
    has, sees = map(_spoiled, (given, got))
    # The key alone may have chosen other elements to be sent.
    drawn = run.planned and run.planned[0].codecs[i].facts.same_draws
    hidden = (has.any() if run.exchanges else has) & ~sees
    if hidden.any() and not (drawn and not sees.any()):
      told = f"worker {np.argmax(hidden)} gets finite updates alone of {path}"
      yield SUBJECT, expected, told
  kept = [jax.tree.leaves(x.residual) if run.planned else [] for x in run.states[-2:]]
  plain = {x.dtype.name for x in kept[1]} == {"float32"} and run.state.velocity is None
  if not plain or not run.exchanges:
    return
  for (path, got), *both in zip(kit.zipped(outputs), *kept, strict=True):
    fine = _finite(got)
    was, now = (np.asarray(x).reshape(fine.shape) for x in both)
    told = broken.difference(now[~fine], was[~fine])
    yield SUBJECT, f"keep the residual of {path} where no mean is finite", told
    if not fine.all() and fine.any() and now.any():
      told = "it is what it was" if (now == was).all() else None
      yield SUBJECT, f"go on with the residual of {path} elsewhere", told


def _finite(x: Any) -> np.ndarray:
  """Returns where an array of any float dtype is finite."""
  return np.isfinite(np.asarray(x, np.float32))


def _spoiled(x: Any) -> np.ndarray:
  """Returns which workers have a number that is not finite, ``bool[N]``."""
  return np.logical_not(_finite(x).reshape(len(x), -1).all(axis=1))


def _are_finite(gradients: Any) -> bool:
  return all(_finite(x).all() for x in jax.tree.leaves(gradients))


@broken.law(RUN, "what is added in a dtype of few exponents")
def finite_gradients_stay_finite(run: modes.Run) -> broken.Findings:
  """Updates of finite gradients are finite, also of halves near the largest number.

  In a single transformation a NaN spoils no other leaf; of ``exchange="local"`` no
  other worker.
  """
  for step, both in enumerate(zip(run.gradients, run.outputs, strict=True)):
    if not run.planned and not _are_finite(both[0]):
      continue
    for path, *pair in kit.zipped(*both):
      bad, hit = map(_spoiled, pair)
      wrong = (hit & ~(bad.any() if run.exchanges else bad)).any()
      told = f"those of {path} in step {step} are not" if wrong else None
      yield SUBJECT, "return finite updates of finite gradients", told


@broken.law(RUN, "print(gradcomp.wire_report(compiled))")
def bytes_are_explained(run: modes.Run) -> broken.Findings:
  """A compiled step sends the bytes of :func:`gradcomp.explain`, if devices suffice."""
  if len(jax.devices()) < run.workers:
    return
  tx = run.transformation
  where: Any = {"workers": run.workers, "axis_name": run.axis_name}
  told = explain(tx, run.params, workers=run.sizes).bytes_sent
  report = wire_report(run.program or modes.lowered(tx, run.params, **where))
  usual = [c.times * c.bytes_sent for c in report.collectives if REPEAT not in c.scope]
  total = sum(usual)
  # Each collective's bytes are rounded up.
  same = abs(total - told) <= len(usual)
  expected = f"send the {told} bytes a step that gradcomp.explain counts"
  yield SUBJECT, expected, None if same else f"its collectives send {total}"


@broken.law(RUN, "the residual: x - decode(encode(x))")
def nothing_is_lost(run: modes.Run) -> broken.Findings:
  """Updates, residuals and owner residuals add up to the gradients, with feedback.

  In each step the updates and residuals of all workers, and N times the residuals of
  the owners, are the sum of all gradients and of earlier residuals, to float32's
  rounding, or that of residuals with fewer bits. Momentum, ``m u + g``, takes the place
  of a gradient where it is sent. With ``feedback="ef21"`` the mean of the workers'
  estimates is the update plus the owner residuals. Two steps show residuals. A
  transformation without residuals passes, one with decaying ones, and a chain.
  """
  if run.planned is None or run.state.residual is None:
    return
  plan, feedback = run.planned
  if float(feedback.waits(jnp.float32(1.0))) != 1.0:  # it decays
    return
  n = run.workers
  for step, both in enumerate(zip(run.gradients, run.outputs, strict=True)):
    if not _are_finite(both[0]):
      return
    before, after = run.states[step : step + 2]
    (waited, was), (waits, owns) = (waiting(plan, x, n) for x in (before, after))
    velocity = jax.tree.leaves(before.velocity)
    for i, (path, *pair) in enumerate(kit.zipped(*both)):
      given, sent = (np.asarray(x, np.float64) for x in pair)
      if velocity:
        last = np.asarray(velocity[i], np.float32).reshape(given.shape)
        momentum = np.float64(np.float32(feedback.decay) * last) + given
        given = given + feedback.decay * momentum if feedback.nesterov else momentum
      sums = np.stack([sent.sum(axis=0), waits[i].sum(axis=0), owns[i]])
      expected = np.asarray((given + waited[i]).sum(axis=0) + was[i])
      if after.estimate is not None:  # residuals are negative estimates
        expected = np.zeros_like(expected)
      total = np.asarray(sums.sum(axis=0))
      # Each of at most 4 N + 8 numbers that are rounded is below the largest; one l2
      # norm a tensor makes residuals much larger than gradients.
      parts = (given, sent, waited[i], waits[i], was[i] / n, owns[i] / n)
      largest = max(1.0, *(np.abs(x).max(initial=0) for x in parts))
      unit = (4 * n + 8) * 2.0**-23 + 2 * n * storing(after, i)
      wrong = ~(np.abs(total - expected) <= unit * largest)
      told = broken.first_wrong(wrong, total, expected)
      if told:
        shares = "{:.4g} sent, {:.4g} in residuals, {:.4g} with its owner"
        told += ": " + shares.format(*sums[:, wrong][:, 0])
      yield SUBJECT, f"send or keep all of {path} in step {step}", told


def waiting(plan: MessagePlan, state: Any, workers: int) -> tuple[list[Any], list[Any]]:
  """Returns each leaf's unsent sums, float64 ``[N, ...]``, and N times its owners'."""
  kept: list[Any] = [np.zeros((workers, *x.shape)) for x in plan.leaves]
  owned, arrays = [x[0] for x in kept], state.server_residual
  for i, x in enumerate(jax.tree.leaves(_floats(state.residual))):
    kept[i] = np.asarray(x, np.float64).reshape(kept[i].shape)
  for axes, matrices in owned_matrices(plan).items() if arrays else ():
    for matrix, array in zip(matrices, arrays[axes], strict=True):
      rows: Any = np.asarray(array).reshape(-1, *matrix.shape[1:])
      for i, slot, like in matrix.leaves():
        leaf = from_tiles(rows[slot.start : slot.stop], like, matrix.codec)
        owned[i] = workers * np.asarray(leaf, np.float64)
  return kept, owned


def storing(state: Any, i: int) -> float:
  """Returns the rounding error of a stored residual, over its largest element."""
  residual = jax.tree.leaves(state.residual, is_leaf=is_stored)
  errors = {"float32": 0.0, "bfloat16": 2.0**-7, "int8": 1 / 63}
  return errors[kind(residual[i])] if residual else 0.0
