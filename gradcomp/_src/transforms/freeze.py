"""``allow_frozen``: optax freezes parameters without an exchange of their gradients."""

from typing import Any

import jax
import optax
from jax.extend.core import Literal
from jax.tree_util import keystr, tree_leaves_with_path

from gradcomp._src.core.border import any_tree
from gradcomp._src.mesh import types
from gradcomp._src.mesh.shard_maps import arrays_of
from gradcomp._src.mesh.study import STUDY, Study


def allow_frozen(
  optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Lets an optimizer freeze parameters by ``optax.set_to_zero``, unexchanged.

  Inside ``jax.shard_map`` with ``check_vma=True``, and in plain ``jax.jit`` under
  Explicit axes, zeros that optax makes of a worker's gradient have its type, and JAX
  refuses to add them to a parameter that all workers share. The returned optimizer
  replaces gradients that the given one never reads by zeros that are equal on all
  workers. Elsewhere it changes nothing. :func:`gradcomp.make_train_step` does this
  itself.

  In plain ``jax.jit`` under Auto axes it runs the optimizer on each worker's gradients,
  in a map over the axes of :class:`gradcomp.PerWorker`: a norm before an exchange is
  the worker's own.

  Args:
    optimizer: an optax transformation, like ``optax.partition`` with gradcomp's and
      ``optax.set_to_zero`` in it.

  Returns:
    A gradient transformation with the state of ``optimizer``.

  Example:
    >>> labels = {"body": "frozen", "head": "train"}
    >>> train = optax.chain(gradcomp.qsgd(bits=4), optax.sgd(0.1))
    >>> parts = {"train": train, "frozen": optax.set_to_zero()}
    >>> optimizer = allow_frozen(optax.partition(parts, labels))
    >>> params = {"body": jnp.ones(4), "head": jnp.ones(4)}
    >>> updates, _ = optimizer.update(params, optimizer.init(params), params)
    >>> updates["body"]
    Array([0., 0., 0., 0.], dtype=float32)
  """
  optimizer = optax.with_extra_args_support(optimizer)

  def on_worker(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
    call = lambda updates: optimizer.update(updates, state, params, **extra_args)
    leaves, treedef = jax.tree.flatten(updates)
    # JAX refuses most work on unreduced gradients, so these are looked at first.
    if not types.unreduced_axes(updates):
      result = call(updates)
      if not types.unaveraged(result[0], params):
        return result
    # Zeros in place of gradients on which no result depends.
    jaxpr = _traced(optimizer, updates, state, params, extra_args)
    alive = {x for x in jaxpr.outvars if not isinstance(x, Literal)}
    for equation in reversed(jaxpr.eqns):
      if equation.effects or alive.intersection(equation.outvars):
        alive.update(x for x in equation.invars if not isinstance(x, Literal))
    pairs = zip(leaves, jaxpr.invars, strict=False)  # gradients come first
    given = [x if y in alive else types.zeros(x) for x, y in pairs]
    try:
      return call(jax.tree.unflatten(treedef, given))
    except Exception as error:
      if "reduced" in str(error):
        error.add_note(
          "If the error above is about an array that is unreduced: it may be the "
          "gradient of a leaf that optax.partition or optax.masked leaves out of every "
          "exchange. Let one see it, or freeze it by optax.set_to_zero."
        )
      raise

  return any_tree(optimizer.init, on_worker, {"axis_name": ..., "whole": True})


def decided(
  optimizer: optax.GradientTransformation, updates: Any, state: Any, *rest: Any
) -> list[str]:
  """Returns the paths in the next state of arrays that depend on the gradients."""
  names = [keystr(path) for path, _ in tree_leaves_with_path(state)]
  if not names:
    return []
  jaxpr = _traced(optimizer, updates, state, *rest)
  found = set(jaxpr.invars[: len(jax.tree.leaves(updates))])
  for equation in jaxpr.eqns:
    if any(x in found for x in equation.invars if not isinstance(x, Literal)):
      found.update(equation.outvars)
  last = zip(names, jaxpr.outvars[-len(names) :], strict=True)
  return [name for name, x in last if not isinstance(x, Literal) and x in found]


def _traced(optimizer: optax.GradientTransformation, *given: Any) -> Any:
  """Returns the program of ``update``, traced from shapes: nothing is exchanged."""
  arrays, with_arrays = arrays_of(given)

  def update(*arrays: jax.Array) -> Any:
    updates, state, params, extra_args = with_arrays(arrays)
    return optimizer.update(updates, state, params, **extra_args)

  shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
  with STUDY(Study(follows=True)), jax.disable_jit():
    # Without disable_jit, a jit that reads one argument would read all.
    return jax.make_jaxpr(update)(*shapes).jaxpr
