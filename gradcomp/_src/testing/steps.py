"""Laws of transformations: of the updates, states and bytes of a run's steps."""

import json
import math
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from gradcomp._src.checkpoint import records, reshard, shapes
from gradcomp._src.codecs.protocol import from_tiles
from gradcomp._src.core.feedback import is_stored, kind, read_residual
from gradcomp._src.core.specs import state_specs
from gradcomp._src.core.state import is_state, states_in
from gradcomp._src.exchange.collectives import REPEAT
from gradcomp._src.exchange.plan import MessagePlan, owned_matrices
from gradcomp._src.report.explain import explain
from gradcomp._src.report.tracing import study
from gradcomp._src.report.wire_report import wire_report
from gradcomp._src.testing import kit, modes
from gradcomp._src.testing.kit import Findings, described, difference, first_wrong, law

__all__ = ["bytes_are_explained", "checkpoint_goes_on", "finite_gradients_stay_finite"]
__all__ += ["non_finite_gradients_are_seen", "nothing_is_lost", "record_is_its_own"]
__all__ += ["resharding_keeps_sums", "same_bits_in_every_mode", "spoiled"]
__all__ += ["state_is_stable", "steps_are_scanned", "workers_agree"]

_RUN = 'testing.modes.run("vmap", gradcomp.onebit_sgd(axis_name="data"), '
_RUN += "[jnp.arange(198.0).reshape(2, 99)] * 2)"
_ON_DEVICES = _RUN.replace("vmap", "shard_map")
_SPOILED = _RUN.replace("[jnp", "gradcomp.testing.laws.spoiled([jnp") + ")"
_SAME = "return a state of the structure and the types that it was given"


@law(_RUN, "what `update` puts into the state")
def state_is_stable(run: modes.Run) -> Findings:
  """A step returns a state of the structure, shapes and dtypes that it was given."""
  first = run.placed[0]
  kind_of = lambda x: described(x) + " (weak)" * getattr(x, "weak_type", False)
  for state in run.placed[1:]:
    was: Any = jax.tree.structure(first)
    now: Any = jax.tree.structure(state)
    yield _SAME, was != now and f"{was} becomes {now}"
    for path, *both in kit.zipped(first, state):
      was, now = map(kind_of, both)
      yield _SAME, was != now and f"{path} {was} becomes {now}"


@law(_RUN, "what `update` puts into the state")
def steps_are_scanned(run: modes.Run) -> Findings:
  """``lax.scan`` takes the steps, traced inside a checked ``jax.shard_map``."""
  axis = run.axis_name

  def scanned(state: Any, gradients: Any, params: Any) -> Any:
    step = lambda state, x: (run.transformation.update(x, state, params)[1], None)
    return lax.scan(step, state, jax.tree.map(lambda x: x[:, 0], gradients))[0]

  stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *run.gradients)
  workers: Any = {"workers": run.workers, "axis_name": axis}
  state = shapes.state_shapes(run.transformation, run.params, **workers)
  specs = state_specs(state, axis_name=axis)
  given: Any = {"in_specs": (specs, P(None, axis), P()), "out_specs": specs}
  given["mesh"] = AbstractMesh((run.workers,), (axis,), (AxisType.Auto,))
  try:
    jax.eval_shape(jax.shard_map(scanned, **given), state, stacked, run.params)
  except TypeError as error:  # of lax.scan, for the update itself has been traced
    yield _SAME, " ".join(str(error).split()).partition(". ")[0]


@law(_RUN, "what workers decode: it must be the same bytes")
def workers_agree(run: modes.Run) -> Findings:
  """Every worker gets the same bits, with the shapes and dtypes of the gradients.

  With ``exchange="local"`` each keeps its own.
  """
  for step, both in enumerate(zip(run.outputs, run.gradients, strict=True)):
    for path, got, like in kit.zipped(*both):
      told = None
      if (got.shape, got.dtype) != (like.shape, like.dtype):
        told = f"it is {described(got)} in place of {described(like)}"
      elif run.exchanges:
        told = difference(got, np.broadcast_to(got[:1], got.shape), bits=True)
      told = told and f"in step {step} of {path}, [worker, ...], {told}"
      yield "return the same updates on all workers, like the gradients", told


@law(f"{_RUN}, gradcomp.{_ON_DEVICES}", "products that jit adds without rounding; keys")
def same_bits_in_every_mode(run: modes.Run, *others: modes.Run) -> Findings:
  """Other modes have the bits of a run, in the updates and states of all steps."""
  for other in others:
    for path, got, own in kit.zipped(kept(other), kept(run)):
      told = difference(got, own, of=f"{path}, [worker, ...],", bits=True)
      yield f"have the bits in {other.mode} that it has in {run.mode}", told


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


@law(_RUN, "what the state holds that is no array")
def checkpoint_goes_on(run: modes.Run) -> Findings:
  """The last step has the same bits from a state that was pickled."""
  state = pickle.loads(pickle.dumps(jax.device_get(run.placed[-2])))
  again = run.place.update(run.gradients[-1], state, run.params)
  for path, got, own in kit.zipped(again, (run.outputs[-1], run.placed[-1])):
    told = difference(got, own, of=path, bits=True)
    yield "go on from a saved state with the same bits", told


@law(_RUN, "`repr` of codec and feedback")
def record_is_its_own(run: modes.Run) -> Findings:
  """A record passes with itself, and fails with another N and without a part."""
  if isinstance(run.sizes, tuple):
    return  # the record has a number for each axis
  workers, tx = run.sizes, run.transformation
  make = lambda: records.make_record(tx, run.params, workers=workers)

  def refused(record: Any) -> str | None:
    try:
      records.check_record(record, make())
    except (ValueError, TypeError) as error:
      return str(error)
    return None

  saved = json.loads(json.dumps(make()))
  yield "have a record that passes with itself", refused(saved)
  wrong = [{k: v for k, v in saved.items() if k != "workers"}]
  wrong += [saved | {"workers": [workers + 1]}] if saved["stacked"] else []
  for told in map(refused, wrong):
    found = "workers" not in (told or "") and (told or "it passes")
    yield "have a record that says of how many workers it is", found


def spoiled(gradients: kit.Gradients, bad: float = math.nan) -> kit.Gradients:
  """Returns gradients with ``bad`` amid one worker's largest leaf in the last step."""
  leaves, treedef = jax.tree.flatten(gradients[-1])
  number = max(range(len(leaves)), key=lambda i: leaves[i].size)
  leaves[number] = np.array(leaves[number], order="C")
  flat = leaves[number].reshape(leaves[number].shape[0], -1)
  flat[-1, flat.shape[1] // 2] = bad
  return [*gradients[:-1], jax.tree.unflatten(treedef, leaves)]


@law(_SPOILED, "`decode_rows`, and what is kept of elements that are not finite")
def non_finite_gradients_are_seen(run: modes.Run) -> Findings:
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
      yield expected, bad and f"of gradcomp's states{path} is no longer finite"
  for i, (path, given, got) in enumerate(kit.zipped(run.gradients[-1], outputs)):
    has, sees = map(_spoiled, (given, got))
    # The key alone may have chosen other elements to be sent.
    drawn = run.planned and run.planned[0].codecs[i].facts.same_draws
    hidden = (has.any() if run.exchanges else has) & ~sees
    wrong = hidden.any() and not (drawn and not sees.any())
    told = f"worker {np.argmax(hidden)} gets finite updates alone of {path}"
    yield expected, wrong and told
  kept = [jax.tree.leaves(x.residual) if run.planned else [] for x in run.states[-2:]]
  plain = {x.dtype.name for x in kept[1]} == {"float32"} and run.state.velocity is None
  if not plain or not run.exchanges:
    return
  for (path, got), *both in zip(kit.zipped(outputs), *kept, strict=True):
    fine = _finite(got)
    was, now = (np.asarray(x).reshape(fine.shape) for x in both)
    expected = (
      f"keep the residual of {path} where no mean is finite, and go on elsewhere"
    )
    yield expected, difference(now[~fine], was[~fine])
    stays = not fine.all() and fine.any() and now.any() and (now == was).all()
    yield expected, stays and "it is what it was"


def _finite(x: Any) -> np.ndarray:
  """Returns where an array of any float dtype is finite."""
  return np.isfinite(np.asarray(x, np.float32))


def _spoiled(x: Any) -> np.ndarray:
  """Returns which workers have a number that is not finite, ``bool[N]``."""
  return np.logical_not(_finite(x).reshape(len(x), -1).all(axis=1))


@law(_RUN, "what is added in a dtype of few exponents")
def finite_gradients_stay_finite(run: modes.Run) -> Findings:
  """Updates of finite gradients are finite, also of halves near the largest number.

  In a single transformation a NaN spoils no other leaf; of ``exchange="local"`` no
  other worker.
  """
  for step, both in enumerate(zip(run.gradients, run.outputs, strict=True)):
    if not run.planned and any(_spoiled(x).any() for x in jax.tree.leaves(both[0])):
      continue
    for path, *pair in kit.zipped(*both):
      bad, hit = map(_spoiled, pair)
      wrong = (hit & ~(bad.any() if run.exchanges else bad)).any()
      told = wrong and f"those of {path} in step {step} are not"
      yield "return finite updates of finite gradients", told


@law(_RUN, "print(gradcomp.wire_report(compiled))")
def bytes_are_explained(run: modes.Run) -> Findings:
  """A compiled step sends the bytes of :func:`gradcomp.explain`, if devices suffice."""
  if len(jax.devices()) < run.workers:
    return
  tx = run.transformation
  where: Any = {"workers": run.workers, "axis_name": run.axis_name}
  told = explain(tx, run.params, workers=run.sizes).bytes_sent
  report = wire_report(run.program or modes.lowered(tx, run.params, **where))
  usual = [c.times * c.bytes_sent for c in report.collectives if REPEAT not in c.scope]
  # Each collective's bytes are rounded up.
  wrong = abs(sum(usual) - told) > len(usual)
  expected = f"send the {told} bytes a step that gradcomp.explain counts"
  yield expected, wrong and f"its collectives send {sum(usual)}"


@law(_RUN, "the residual: x - decode(encode(x))")
def nothing_is_lost(run: modes.Run) -> Findings:
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
    if any(_spoiled(x).any() for x in jax.tree.leaves(both[0])):
      return
    before, after = run.states[step : step + 2]
    (waited, was), (waits, owns) = (_waiting(plan, x, n) for x in (before, after))
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
      unit = (4 * n + 8) * 2.0**-23 + 2 * n * _storing(after, i)
      wrong = ~(np.abs(total - expected) <= unit * max(1.0, _largest(*parts)))
      told = first_wrong(wrong, total, expected)
      if told:
        shares = "{:.4g} sent, {:.4g} in residuals, {:.4g} with its owner"
        told += ": " + shares.format(*sums[:, wrong][:, 0])
      yield f"send or keep all of {path} in step {step}", told


@law(_ON_DEVICES, "`state_specs` of what it keeps")
def resharding_keeps_sums(run: modes.Run) -> Findings:
  """With one worker less and one more, sums that are not sent yet stay.

  Arrays that workers share stay, and so do the sums of the owners, if they have any
  before and after. A run of global arrays alone shows it, and a single transformation.
  """
  n, state = run.workers, run.placed[-1]
  if run.planned is None or run.place.where is None or isinstance(run.sizes, tuple):
    return
  if state.estimate is not None and run.mode == modes.EXPLICIT:
    return  # an estimate is of a sum there
  for new in sorted({max(1, n - 1), n + 1} - {n}):
    try:
      made = study(run.transformation, run.params, new).made
    except ValueError:  # groups do not divide the workers
      continue
    ((plan, _),) = made
    expected = f"keep its sums from {n} to {new} workers"
    given: Any = {"axis_name": run.axis_name, "old_workers": n, "workers": new}
    moved = reshard.reshard_state(run.transformation, run.params, state, **given)
    specs = jax.tree.leaves(state_specs(state, axis_name=run.axis_name))
    for (path, *both), spec in zip(kit.zipped(moved, state), specs, strict=True):
      told = spec == P() and difference(*both, of=f"the shared {path}")
      yield expected, told
    # Not where estimates take the place of owner residuals.
    apart = state.estimate is None and state.server_residual and moved.server_residual
    waited, was = _waiting(run.planned[0], state, n)
    waits, owns = _waiting(plan, moved, new)
    for i, (path, _) in enumerate(kit.zipped(run.params)):
      # Each of at most N additions rounds, and storing does. Sums of up to 32, of which
      # rotated rows are made, round ten times both ways.
      turned, bound = 20 * 2.0**-24 * _largest(was[i]), 0.0
      before, after, parts = waited[i].sum(axis=0), waits[i].sum(axis=0), [waits[i]]
      if apart:
        wrong = ~(np.abs(owns[i] - was[i]) <= 2.0**-22 * np.abs(was[i]) + turned)
        told = first_wrong(wrong, owns[i], was[i])
        yield expected, told and f"of what owners keep of {path} {told}"
      else:
        before, after, bound = before + was[i], after + owns[i], turned
      if state.estimate is not None:  # means of estimates, sums of gradients of about 1
        before, after, parts = before / n, after / new, [*parts, np.ones(())]
      unit = (n + 2) * (2.0**-23 + _storing(state, i))
      bound += unit * _largest(waited[i], *parts)
      told = first_wrong(~(np.abs(after - before) <= bound), after, before)
      yield expected, told and f"of what waits of {path} {told}"


def _waiting(
  plan: MessagePlan, state: Any, workers: int
) -> tuple[list[Any], list[Any]]:
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


def _storing(state: Any, i: int) -> float:
  """Returns the rounding error of a stored residual, over its largest element."""
  residual = jax.tree.leaves(state.residual, is_leaf=is_stored)
  errors = {"float32": 0.0, "bfloat16": 2.0**-7, "int8": 1 / 63}
  return errors[kind(residual[i])] if residual else 0.0


def _largest(*arrays: np.ndarray) -> float:
  return max(np.abs(x).max(initial=0) for x in arrays)
