"""Arrays that a function of the user reads in a map: arguments of it, or an error.

Under Explicit axes, JAX 0.10 to 0.12 lets no function in ``jax.shard_map`` close over
an array of the mesh. docs/inside/architecture.md says why closures are not searched.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh

OF_LOSS = (
  "If the error above is about an array of the mesh that `loss_fn` closes over: make "
  "it an argument, loss_fn(params, batch, array), and call the result of "
  "gradcomp.value_and_grad with (params, batch, array), or that of "
  "gradcomp.make_train_step with (params, opt_state, batch, array); or pass "
  "jax.tree_util.Partial(loss_fn, name=array), whose arrays are arguments."
)
OF_BODY = (
  "If the error above is about an array of the mesh that `body` closes over: make it "
  "a part of `carry` or of `layers`, or pass jax.tree_util.Partial(body, name=array), "
  "for body(carry, layer, name), whose arrays are arguments."
)
OF_OPTIMIZER = (
  "If the error above is about an array of the mesh that `optimizer` closes over: make "
  "it of numbers or NumPy's arrays, or put optax.inject_hyperparams, which keeps "
  "numbers in the state, around the innermost transformation: "
  "zero(optax.inject_hyperparams(optax.adam)(rate), ...). If a function that `update` "
  "was given closes over it, like a batch: pass jax.tree_util.Partial, as in "
  "update(..., value_fn=jax.tree_util.Partial(f, batch=batch)), for f(params, batch)."
)


def arrays_of(tree: Any) -> tuple[list[jax.Array], Callable[[Sequence[Any]], Any]]:
  """Returns the arrays of a tree, and a function that replaces them by others."""
  leaves, treedef = jax.tree.flatten(tree)

  def with_arrays(arrays: Sequence[Any]) -> Any:
    parts = iter(arrays)
    own = [next(parts) if isinstance(x, jax.Array) else x for x in leaves]
    return jax.tree.unflatten(treedef, own)

  return [x for x in leaves if isinstance(x, jax.Array)], with_arrays


def with_note(
  function: Callable[..., Any],
  note: str,
  mesh: Mesh | AbstractMesh,
  names: Collection[str],
) -> Callable[..., Any]:
  """Wraps a function in a map over ``names``: errors for such arrays get its note."""
  kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
  explicit = {name for name, kind in kinds if kind == AxisType.Explicit}
  if not explicit:  # JAX raises no error
    return function
  # JAX raises a ValueError where the map leaves other axes Explicit.
  others = (ValueError,) if explicit.difference(names) else ()
  return _with_note(function, note, NotImplementedError, *others)


def optimizer_with_note(
  tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer likewise; it takes extra arguments."""
  functions = optax.with_extra_args_support(tx)
  noted = [_with_note(f, OF_OPTIMIZER, NotImplementedError) for f in functions]
  return optax.GradientTransformationExtraArgs(*noted)


def _with_note(
  function: Callable[..., Any], note: str, *errors: type[Exception]
) -> Callable[..., Any]:
  @functools.wraps(function, updated=())
  def noted(*args: Any, **kwargs: Any) -> Any:
    try:
      return function(*args, **kwargs)
    except errors as error:
      error.add_note(note)
      raise

  return noted
