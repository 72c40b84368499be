"""Laws of transformations: updates, states and bytes of workers, step by step."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradcomp._src.core.residual_storage import is_stored, read_residual
from gradcomp._src.core.state import is_state, states_in
from gradcomp._src.report.explain import explain
from gradcomp._src.report.wire_report import wire_report
from gradcomp._src.testing import modes
from gradcomp._src.testing.broken import BrokenLaw, described, difference
from gradcomp._src.testing.leaves import Gradients, workers_of, zipped


def workers_agree(
  transformation: optax.GradientTransformation,
  gradients: Gradients,
  *,
  axis_name: str = "data",
) -> None:
  """Every worker gets the same bits, with the shapes and dtypes of the gradients.

  Args:
    transformation: over the axis.
    gradients: trees with leaves ``[N, ...]``, one tree a step.
    axis_name: the name of the axis.

  Example:
    >>> from gradcomp.testing import laws
    >>> tx = gradcomp.qsgd(bits=4, axis_name="data", exchange="all_gather")
    >>> laws.workers_agree(tx, [{"w": jax.random.normal(jax.random.key(0), (2, 600))}])
  """
  outputs = modes.run("vmap", transformation, gradients, axis_name=axis_name).outputs
  for step, (output, given) in enumerate(zip(outputs, gradients, strict=True)):
    for path, got, like in zipped(output, given):
      told = difference(got, np.broadcast_to(np.asarray(got)[:1], got.shape), bits=True)
      if (got.shape, got.dtype) != (like.shape, like.dtype):
        told = f"it is {described(got)} in place of {described(like)}"
      if told:
        raise BrokenLaw(
          "workers_agree",
          "the transformation",
          "return the same updates on all workers, like the gradients",
          f"in step {step} of {path}, [worker, ...], {told}",
          "what workers decode: it must be the same bytes",
        )


def same_bits_in_every_mode(
  transformation: optax.GradientTransformation,
  gradients: Gradients,
  places: Sequence[str] | None = None,
  *,
  axis_name: str = "data",
) -> None:
  """All modes have the bits of emulated workers, in updates and states.

  Args:
    transformation: over the axis.
    gradients: trees with leaves ``[N, ...]``, one tree a step.
    places: the modes; by default all of ``modes.modes_for``.
    axis_name: the name of the axis.

  Example:
    >>> from gradcomp.testing import laws
    >>> tx = gradcomp.qsgd(bits=4, axis_name="data", exchange="all_gather")
    >>> steps = [{"w": jax.random.normal(jax.random.key(0), (2, 600))}]
    >>> laws.same_bits_in_every_mode(tx, steps, ["shard_map"])
  """
  workers = workers_of(gradients)
  expected = modes.run("vmap", transformation, gradients, axis_name=axis_name)
  for mode in modes.modes_for(workers) if places is None else places:
    if mode == "vmap":
      continue
    found = modes.run(mode, transformation, gradients, axis_name=axis_name)
    for path, got, own in zipped(_kept(found), _kept(expected)):
      if told := difference(got, own, bits=True):
        raise BrokenLaw(
          "same_bits_in_every_mode",
          "the transformation",
          f"have the bits in {mode} that it has in jax.vmap",
          f"of {path}, [worker, ...], {told}",
          "products that a compiler adds without rounding them first, and keys",
        )


def non_finite_gradients_are_seen(
  transformation: optax.GradientTransformation,
  gradients: Gradients,
  bad: float = math.nan,
  *,
  axis_name: str = "data",
) -> None:
  """A NaN of one worker reaches every worker's update, and no residual.

  So a guard behind the exchange, like ``optax.apply_if_finite``, sees it everywhere.
  An optimizer's own state is not tested.

  Args:
    transformation: over the axis.
    gradients: trees with leaves ``[N, ...]``, one tree a step. An element of the last
      one's largest leaf becomes ``bad``.
    bad: NaN or an infinity.
    axis_name: the name of the axis.

  Example:
    >>> from gradcomp.testing import laws
    >>> tx = gradcomp.qsgd(bits=4, axis_name="data", exchange="all_gather")
    >>> laws.non_finite_gradients_are_seen(tx, [{"w": jnp.ones((2, 600))}])
  """
  leaves, treedef = jax.tree.flatten(gradients[-1])
  number = max(range(len(leaves)), key=lambda i: leaves[i].size)
  flat = leaves[number].reshape(leaves[number].shape[0], -1)
  position = flat.shape[1] // 2
  flat = flat.at[-1, position].set(bad)
  leaves[number] = flat.reshape(leaves[number].shape)
  dirty = [*gradients[:-1], jax.tree.unflatten(treedef, leaves)]
  outputs, state = modes.run("vmap", transformation, dirty, axis_name=axis_name)
  got = np.asarray(jax.tree.leaves(outputs[-1])[number], np.float32)
  finite = np.isfinite(got.reshape(got.shape[0], -1))
  told = None
  if finite.all(axis=1).any():
    told = f"worker {int(np.argmax(finite.all(axis=1)))} gets finite updates alone"
  kept = states_in(state)
  for path, leaf in jax.tree_util.tree_leaves_with_path(kept):
    floats = jnp.issubdtype(leaf.dtype, jnp.floating)
    if floats and not np.isfinite(np.asarray(leaf, np.float32)).all():
      told = f"of gradcomp's states{jax.tree_util.keystr(path)} is no longer finite"
  if told:
    raise BrokenLaw(
      "non_finite_gradients_are_seen",
      "the transformation",
      f"bring a {bad} of one worker to all workers' updates, and to no residual",
      told,
      "`decode_rows`, and what is kept of elements that are not finite",
    )


def bytes_are_explained(
  transformation: optax.GradientTransformation,
  gradients: Gradients,
  *,
  axis_name: str = "data",
) -> None:
  """A compiled step sends the bytes of :func:`gradcomp.explain`.

  It passes if there are fewer devices than workers.

  Args:
    transformation: over the axis.
    gradients: trees with leaves ``[N, ...]``, of which one is enough.
    axis_name: the name of the axis.

  Example:
    >>> from gradcomp.testing import laws
    >>> tx = gradcomp.dense(axis_name="data")
    >>> laws.bytes_are_explained(tx, [{"w": jnp.ones((2, 600))}])
  """
  workers = workers_of(gradients)
  if len(jax.devices()) < workers:
    return
  params = jax.tree.map(lambda leaf: leaf[0], gradients[0])
  told = explain(transformation, params, workers=workers)
  report = wire_report(
    modes.lowered(transformation, params, axis_name=axis_name, workers=workers)
  )
  # Each collective's bytes are rounded up.
  if abs(report.bytes_sent - told.bytes_sent) > len(report.collectives):
    raise BrokenLaw(
      "bytes_are_explained",
      "the transformation",
      f"send the {told.bytes_sent} bytes a step that gradcomp.explain counts",
      f"the collectives of a compiled step send {report.bytes_sent}",
      "print(gradcomp.wire_report(compiled))",
    )


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
