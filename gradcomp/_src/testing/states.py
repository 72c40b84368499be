"""Laws of a transformation's state: it is stable, scanned, saved and resharded."""

import json
import pickle
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from gradcomp._src.checkpoint import records, reshard, shapes
from gradcomp._src.core.specs import state_specs
from gradcomp._src.exchange.plan import MessagePlan
from gradcomp._src.report.tracing import study
from gradcomp._src.testing import broken, modes, steps
from gradcomp._src.testing import leaves as kit
from gradcomp._src.testing.broken import Findings, described, difference, law

__all__ = ["checkpoint_goes_on", "record_is_its_own", "resharding_keeps_sums"]
__all__ += ["state_is_stable", "steps_are_scanned"]

_SAME = "return a state of the structure and the types that it was given"


@law(steps.RUN, "what `update` puts into the state")
def state_is_stable(run: modes.Run) -> Findings:
  """A step returns a state of the structure, shapes and dtypes that it was given."""
  first = run.placed[0]
  for state in run.placed[1:]:
    trees: list[Any] = [jax.tree.structure(x) for x in (first, state)]
    told = None if trees[0] == trees[1] else f"{trees[0]} becomes {trees[1]}"
    yield steps.SUBJECT, _SAME, told
    for path, *both in kit.zipped(first, state):
      weak = [" (weak)" * getattr(x, "weak_type", False) for x in both]
      old, new = (f"{described(x)}{word}" for x, word in zip(both, weak, strict=True))
      yield steps.SUBJECT, _SAME, None if old == new else f"{path} {old} becomes {new}"


@law(steps.RUN, "what `update` puts into the state")
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
    yield steps.SUBJECT, _SAME, " ".join(str(error).split()).partition(". ")[0]


@law(steps.RUN, "what the state holds that is no array")
def checkpoint_goes_on(run: modes.Run) -> Findings:
  """The last step has the same bits from a state that was pickled."""
  state = pickle.loads(pickle.dumps(jax.device_get(run.placed[-2])))
  again = run.place.update(run.gradients[-1], state, run.params)
  for path, got, own in kit.zipped(again, (run.outputs[-1], run.placed[-1])):
    told = difference(got, own, of=path, bits=True)
    yield steps.SUBJECT, "go on from a saved state with the same bits", told


@law(steps.RUN, "`repr` of codec and feedback")
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
  yield steps.SUBJECT, "have a record that passes with itself", refused(saved)
  wrong = [{k: v for k, v in saved.items() if k != "workers"}]
  wrong += [saved | {"workers": [workers + 1]}] if saved["stacked"] else []
  for record in wrong:
    told = refused(record) or "it passes"
    found = None if "workers" in told else told
    yield steps.SUBJECT, "have a record that says of how many workers it is", found


@law(steps.RUN.replace("vmap", "shard_map"), "`state_specs` of what it keeps")
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
    yield from _resharded(run, run.planned[0], n, new)


def _resharded(run: modes.Run, plan: MessagePlan, n: int, new: int) -> Findings:
  state, expected = run.placed[-1], f"keep its sums from {n} to {new} workers"
  try:
    made = study(run.transformation, run.params, new).made
  except ValueError:  # groups do not divide the workers
    return
  given: Any = {"axis_name": run.axis_name, "old_workers": n, "workers": new}
  moved = reshard.reshard_state(run.transformation, run.params, state, **given)
  specs = jax.tree.leaves(state_specs(state, axis_name=run.axis_name))
  for (path, was, now), spec in zip(kit.zipped(state, moved), specs, strict=True):
    told = None if spec != P() else difference(now, was, of=f"the shared {path}")
    yield steps.SUBJECT, expected, told
  owned = [x.server_residual for x in (state, moved)]
  apart = state.estimate is None and all(owned)  # not where estimates take their place
  waited, was = steps.waiting(plan, state, n)
  waits, owns = steps.waiting(made[0][0], moved, new)
  largest = lambda *arrays: max(np.abs(x).max(initial=0) for x in arrays)
  for i, (path, _) in enumerate(kit.zipped(run.params)):
    # Each of at most N additions rounds, and storing does. Sums of up to 32, of which
    # rotated rows are made, round ten times both ways.
    turned = 20 * 2.0**-24 * largest(was[i])
    before, after, parts = waited[i].sum(axis=0), waits[i].sum(axis=0), [waits[i]]
    bound = 0.0
    if apart:
      wrong = ~(np.abs(owns[i] - was[i]) <= 2.0**-22 * np.abs(was[i]) + turned)
      told = broken.first_wrong(wrong, owns[i], was[i])
      yield steps.SUBJECT, expected, told and f"of what owners keep of {path} {told}"
    else:
      before, after, bound = before + was[i], after + owns[i], turned
    if state.estimate is not None:  # means of estimates, sums of gradients of about 1
      before, after, parts = before / n, after / new, [*parts, 1.0]
    bound += (n + 2) * (2.0**-23 + steps.storing(state, i)) * largest(waited[i], *parts)
    told = broken.first_wrong(~(np.abs(after - before) <= bound), after, before)
    yield steps.SUBJECT, expected, told and f"of what waits of {path} {told}"
