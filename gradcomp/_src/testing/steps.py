"""Laws of transformations: updates, states, residuals and bytes of workers' steps."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from gradcomp._src.checkpoint.shapes import state_shapes
from gradcomp._src.codecs.protocol import from_tiles
from gradcomp._src.core.residual_storage import is_stored, kind, read_residual
from gradcomp._src.core.specs import state_specs
from gradcomp._src.core.state import CompressState, is_state, states_in
from gradcomp._src.exchange.collectives import REPEAT
from gradcomp._src.exchange.plan import MessagePlan, owned_matrices
from gradcomp._src.report import tracing
from gradcomp._src.report.explain import explain
from gradcomp._src.report.wire_report import wire_report
from gradcomp._src.testing import leaves as kit
from gradcomp._src.testing import modes
from gradcomp._src.testing.broken import Findings, described, difference, law
from gradcomp._src.testing.leaves import Gradients, Transformation

__all__ = ["bytes_are_explained", "non_finite_gradients_are_seen", "nothing_is_lost"]
__all__ += ["same_bits_in_every_mode", "state_is_stable", "workers_agree"]

_SUBJECT = "the transformation"


@law(
  'natural(axis_name="data"), [jnp.ones((2, 600))]',
  "what workers decode: it must be the same bytes",
)
def workers_agree(
  transformation: Transformation, gradients: Gradients, *, axis_name: str = "data"
) -> Findings:
  """Every worker gets the same bits, with the shapes and dtypes of the gradients."""
  outputs = modes.run("vmap", transformation, gradients, axis_name=axis_name).outputs
  for step, (output, given) in enumerate(zip(outputs, gradients, strict=True)):
    for path, got, like in kit.zipped(output, given):
      told = difference(got, np.broadcast_to(np.asarray(got)[:1], got.shape), bits=True)
      if (got.shape, got.dtype) != (like.shape, like.dtype):
        told = f"it is {described(got)} in place of {described(like)}"
      expected = "return the same updates on all workers, like the gradients"
      found = told and f"in step {step} of {path}, [worker, ...], {told}"
      yield _SUBJECT, expected, found


@law(
  'natural(axis_name="data"), [jnp.ones((2, 600))], ["shard_map"]',
  "products that a compiler adds without rounding them first, and keys",
)
def same_bits_in_every_mode(
  transformation: Transformation,
  gradients: Gradients,
  places: Sequence[str] | None = None,
  *,
  axis_name: str = "data",
) -> Findings:
  """All modes have the bits of emulated workers, in updates and states.

  ``places`` are the modes, by default all of ``modes.modes_for``.
  """
  every = modes.modes_for(kit.workers_of(gradients)) if places is None else places
  expected = modes.run("vmap", transformation, gradients, axis_name=axis_name)
  for mode in (x for x in every if x != "vmap"):
    found = modes.run(mode, transformation, gradients, axis_name=axis_name)
    for path, got, own in kit.zipped(_kept(found), _kept(expected)):
      told = difference(got, own, of=f"{path}, [worker, ...],", bits=True)
      yield _SUBJECT, f"have the bits in {mode} that it has in jax.vmap", told


def _kept(run: modes.Run) -> Any:
  """Returns the outputs and states of a run, without memories of each worker."""

  # Under Explicit axes memories are of addends, gradients over N. Zeros in few bits
  # have one scale there and everywhere, so residuals are read.
  def shared(x: Any) -> Any:
    if not is_state(x):
      return x
    memory = x.memory and x.memory._replace(own=())
    residual = jax.tree.map(read_residual, x.residual, is_leaf=is_stored)
    return x._replace(memory=memory, residual=residual)

  return run._replace(state=jax.tree.map(shared, run.state, is_leaf=is_state))


@law(
  'natural(axis_name="data"), [jnp.ones((2, 600))]',
  "`decode_rows`, and what is kept of elements that are not finite",
)
def non_finite_gradients_are_seen(
  transformation: Transformation,
  gradients: Gradients,
  bad: float = math.nan,
  *,
  axis_name: str = "data",
) -> Findings:
  """A NaN of one worker reaches every worker's update, and no residual.

  An element of the last gradients' largest leaf becomes ``bad``, NaN or an infinity.
  An optimizer's own state is not tested.
  """
  leaves, treedef = jax.tree.flatten(gradients[-1])
  number = max(range(len(leaves)), key=lambda i: leaves[i].size)
  leaves[number] = np.array(leaves[number], order="C")
  flat = leaves[number].reshape(leaves[number].shape[0], -1)
  flat[-1, flat.shape[1] // 2] = bad
  dirty = [*gradients[:-1], jax.tree.unflatten(treedef, leaves)]
  outputs, state = modes.run("vmap", transformation, dirty, axis_name=axis_name)
  expected = f"bring a {bad} of one worker to all workers' updates, and to no residual"
  got = np.asarray(jax.tree.leaves(outputs[-1])[number], np.float32)
  hidden = np.isfinite(got.reshape(got.shape[0], -1)).all(axis=1)
  if hidden.any():
    yield _SUBJECT, expected, f"worker {np.argmax(hidden)} gets finite updates alone"
  for path, leaf in kit.zipped(states_in(state)):
    floats = jnp.issubdtype(leaf.dtype, jnp.floating)
    if floats and not np.isfinite(np.asarray(leaf, np.float32)).all():
      yield _SUBJECT, expected, f"of gradcomp's states{path} is no longer finite"


@law(
  'dense(axis_name="data"), [jnp.ones((2, 600))]',
  "print(gradcomp.wire_report(compiled))",
)
def bytes_are_explained(
  transformation: Transformation, gradients: Gradients, *, axis_name: str = "data"
) -> Findings:
  """A compiled step sends the bytes of :func:`gradcomp.explain`.

  One tree of gradients is enough. It passes if there are fewer devices than workers.
  """
  workers = kit.workers_of(gradients)
  params = kit.params_of(gradients)
  told = explain(transformation, params, workers=workers).bytes_sent
  expected = f"send the {told} bytes a step that gradcomp.explain counts"
  where: Any = {"workers": workers, "axis_name": axis_name}
  yield _SUBJECT, expected, sent_otherwise(told, transformation, params, **where)


def sent_otherwise(
  explained: int, tx: Transformation, params: Any, *, axis_name: str, workers: int
) -> str | None:
  """Describes the bytes of a compiled step, if they are not the explained ones."""
  if len(jax.devices()) < workers:
    return None
  report = wire_report(modes.lowered(tx, params, axis_name=axis_name, workers=workers))
  usual = [c for c in report.collectives if REPEAT not in c.scope]
  total = sum(c.times * c.bytes_sent for c in usual)
  # Each collective's bytes are rounded up.
  same = abs(total - explained) <= len(usual)
  return None if same else f"its collectives send {total}"


@law(
  'onebit_sgd(axis_name="data"), [jnp.ones((2, 600))]',
  "what `update` puts into the state",
)
def state_is_stable(
  transformation: Transformation, gradients: Gradients, *, axis_name: str = "data"
) -> Findings:
  """A step returns a state like its own, with which ``lax.scan`` runs all steps.

  The steps are traced in a scan inside a checked ``jax.shard_map``, which types arrays
  as varying, and run in a scan inside ``jax.vmap``.
  """
  expected = "return a state of the structure and the types that it was given"

  def step(gradient: Any) -> tuple[Any, Any]:
    state = transformation.init(gradient)
    return state, transformation.update(gradient, state, gradient)[1]

  states = jax.eval_shape(jax.vmap(step, axis_name=axis_name), gradients[0])
  trees: list[Any] = [jax.tree.structure(state) for state in states]
  if trees[0] != trees[1]:
    yield _SUBJECT, expected, f"{trees[0]} becomes {trees[1]}"
  for path, old, new in kit.zipped(*states):
    weak = " (weak)" if old.weak_type != new.weak_type else ""
    same = not weak and (old.shape, old.dtype) == (new.shape, new.dtype)
    told = f"{path}, [worker, ...], {described(old)} becomes {described(new)}{weak}"
    yield _SUBJECT, expected, None if same else told
  stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *gradients)

  def scanned(state: Any, gradients: Any, params: Any) -> Any:
    step = lambda state, x: (transformation.update(x, state, params)[1], None)
    return lax.scan(step, state, gradients)[0]

  try:
    _trace_in_a_map(transformation, scanned, stacked, axis_name)
  except TypeError as error:  # of lax.scan, for the update itself has been traced
    yield _SUBJECT, expected, " ".join(str(error).split()).partition(". ")[0]

  def emulated(gradients: Any) -> Any:
    params = jax.tree.map(lambda x: jnp.zeros_like(x[0]), gradients)
    return scanned(transformation.init(params), gradients, params)

  mapped = jax.vmap(emulated, in_axes=1, axis_name=axis_name)
  jax.block_until_ready(jax.jit(mapped)(stacked))


def _trace_in_a_map(
  transformation: Transformation, scanned: Any, stacked: Any, axis_name: str
) -> None:
  """Traces a scan of steps inside a checked map, over an abstract mesh."""
  params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), stacked)
  workers = jax.tree.leaves(stacked)[0].shape[1]
  state = state_shapes(transformation, params, workers=workers, axis_name=axis_name)
  specs = state_specs(state, axis_name=axis_name)
  own = lambda gradients: jax.tree.map(lambda x: x[:, 0], gradients)
  local = lambda state, gradients, params: scanned(state, own(gradients), params)
  mesh = AbstractMesh((workers,), (axis_name,), (AxisType.Auto,))
  places = specs, P(None, axis_name), P()
  mapped = jax.shard_map(local, mesh=mesh, in_specs=places, out_specs=specs)
  jax.eval_shape(mapped, state, stacked, params)


# The rounding error of a stored residual, as a part of the largest element.
STORING = {"float32": 0.0, "bfloat16": 2.0**-7, "int8": 1 / 63}


@law(
  'onebit_sgd(axis_name="data"), [jnp.arange(1200.0).reshape(2, 600)] * 2',
  "the residual: x - decode(encode(x))",
)
def nothing_is_lost(
  transformation: Transformation, gradients: Gradients, *, axis_name: str = "data"
) -> Findings:
  """Updates, residuals and owner residuals add up to the gradients, with feedback.

  In each step the updates and residuals of all workers, and N times the residuals of
  the owners, are together the sum of all gradients and of what waited before, to
  float32's rounding, or that of residuals with fewer bits. Momentum, ``m u + g``, takes
  the place of a gradient where it is sent. With ``feedback="ef21"`` the mean of the
  workers' estimates is the update and the owner residuals. Two steps show residuals. A
  transformation without residuals passes; so does one with decaying residuals, and a
  chain of several, because its updates are not means.
  """
  params, workers = kit.params_of(gradients), kit.workers_of(gradients)
  place = modes.started("vmap", transformation, workers, axis_name=axis_name)
  state = place.init(params)
  if not isinstance(state, CompressState) or state.residual is None:
    return
  ((plan, options),) = tracing.study(transformation, params, workers).made
  feedback = options["feedback"]
  if float(feedback.waits(jnp.float32(1.0))) != 1.0:  # it decays
    return
  for number, gradient in enumerate(gradients):
    output, after = place.update(gradient, state, params)
    for path, found in lost_in_step(plan, feedback, gradient, output, state, after):
      expected = f"keep what it does not send: in step {number} what is sent and what"
      expected += f" waits of {path} are the sum of all gradients, and what waited"
      yield _SUBJECT, expected, found
    state = after


def lost_in_step(
  plan: MessagePlan,
  feedback: Any,
  gradients: Any,
  updates: Any,
  before: CompressState,
  after: CompressState,
) -> Iterator[tuple[str, str]]:
  """Yields leaf and words for each element that a step loses; leaves ``[N, ...]``."""
  was, owns = (owned_leaves(plan, x.server_residual) for x in (before, after))
  old, new = (jax.tree.leaves(x.residual, is_leaf=is_stored) for x in (before, after))
  velocity = jax.tree.leaves(before.velocity)
  for i, (path, *both) in enumerate(kit.zipped(gradients, updates)):
    given, sent = (np.asarray(x, np.float64) for x in both)
    if sent.shape != given.shape:
      yield path, f"it has the shape {sent.shape[1:]}, not {given.shape[1:]}"
      continue
    residuals = (np.asarray(read_residual(x[i]), np.float64) for x in (old, new))
    waited, waits = (x.reshape(given.shape) for x in residuals)
    if velocity:
      last = np.asarray(velocity[i], np.float32).reshape(given.shape)
      momentum = np.float64(np.float32(feedback.decay) * last) + given
      given = given + feedback.decay * momentum if feedback.nesterov else momentum
    workers = len(given)
    sums = np.stack([sent.sum(axis=0), waits.sum(axis=0), workers * owns[i]])
    expected = np.asarray((given + waited).sum(axis=0) + workers * was[i])
    if after.estimate is not None:  # residuals are negative estimates
      expected = np.zeros_like(expected)
    total = np.asarray(sums.sum(axis=0))
    # Each of at most 4 N + 8 numbers that are rounded is below the largest; one l2 norm
    # a tensor makes residuals much larger than gradients.
    parts = (given, sent, waited, waits, was[i], owns[i])
    largest = max(np.abs(x).max(initial=0) for x in parts)
    unit = (4 * workers + 8) * 2.0**-23 + 2 * workers * STORING[kind(new[i])]
    wrong = np.argwhere(~(np.abs(total - expected) <= unit * max(1.0, largest)))
    for at in map(tuple, wrong.tolist()):
      kept = "{:.4g} sent, {:.4g} in residuals, {:.4g} with its owner"
      words = kept.format(*(x[at] for x in sums))
      told = f"element {list(at)} is {total[at]:.7g}, not {expected[at]:.7g}, {words}"
      yield path, told


def owned_leaves(plan: MessagePlan, owned: Any) -> list[np.ndarray]:
  """Returns the owner residuals in the shapes of their leaves; zeros without any."""
  leaves: list[Any] = [np.zeros(x.shape) for x in plan.leaves]
  for axes, matrices in owned_matrices(plan).items() if owned else ():
    for matrix, array in zip(matrices, owned[axes], strict=True):
      rows: Any = np.asarray(array).reshape(-1, *matrix.shape[1:])
      for i, slot, like in matrix.leaves():
        leaf = from_tiles(rows[slot.start : slot.stop], like, matrix.codec)
        leaves[i] = np.asarray(leaf, np.float64)
  return leaves
