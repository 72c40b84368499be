"""The layers of a train step that the loss gives to its ``scan``."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import tree_leaves_with_path

from gradcomp._src.core.state import ScanState, is_scan
from gradcomp._src.kernels.common.dithers import fold_key
from gradcomp._src.mesh import shard_maps, study, trees, types
from gradcomp._src.mesh.axes import axes_in, is_spec
from gradcomp._src.parallel.scan import LayerScan
from gradcomp._src.training.gradients import Function, LossForm

_IN_OPTIMIZER = (
  'optax.partition({"layers": gradcomp.parallel.compress_in_scan(...), "others": '
  "gradcomp.compress(...)}, labels)"
)


def takes_scan(loss_fn: Callable[..., Any]) -> bool:
  """Returns True for a loss with a parameter ``scan``."""
  try:
    return "scan" in inspect.signature(loss_fn).parameters
  except (TypeError, ValueError):  # of callables that show none
    return False


def value_and_grad(
  loss_fn: Function, form: LossForm, scanned: Any, params: Any, *rest: Any
) -> tuple[Any, Any, dict[str, Any]]:
  """Returns a worker's value, gradients (means of layers), and args of ``update``."""
  layer_scan, state, places = scanned  # what scanned_layers returns
  key = fold_key(state.layers.key, state.layers.count)
  leaves, treedef = jax.tree.flatten(params)
  specs = jax.tree.leaves(shard_maps.shards_of(params)[0], is_leaf=is_spec)
  if cut := axes_in([specs[i] for i in places] if specs else []):
    raise ValueError(
      "`params` must have layers that no Auto axis shards where the loss scans them, "
      "because words would be sent over it, got layers sharded over "
      f"{sorted(cut)}; call gradcomp.parallel.scan in a jax.shard_map over all axes of "
      "the mesh."
    )
  paths = [jax.tree_util.keystr(x) for x, _ in tree_leaves_with_path(params)]
  # Leaves by their numbers.
  layers = {i: leaves[i] for i in places}
  others = {i: x for i, x in enumerate(leaves) if i not in layers}
  together = lambda x: jax.tree.unflatten(treedef, [x[i] for i in sorted(x)])

  def loss(parts: Any, *args: Any) -> Any:
    others, layers, residual = parts
    seen = {i: _only_in_scan(paths[i], x) for i, x in layers.items()}
    known, called = [*seen.values()], list[bool]()

    def scan(body: Any, carry: Any, tree: Any) -> Any:
      floats, rest = trees.split(tree)
      given, treedef = jax.tree.flatten(floats)
      same = [any(x is y for y in known) for x in given]
      if called or list(map(id, given)) != list(map(id, known)):
        raise ValueError(
          "`scan` must be called once, with all layers of compress_in_scan as they are "
          f"in the parameters, got {sum(same)} of {len(known)} in "
          f"{'another' if called else 'this'} call, and {len(same) - sum(same)} other "
          "arrays of floats; cast layers in the body, and close over other arrays."
        )
      called.append(True)
      whole = trees.combine(jax.tree.unflatten(treedef, [*layers.values()]), rest)
      return layer_scan(body, carry, whole, residual=residual, key=key)

    result = loss_fn(together(others | seen), *args, scan=scan)
    if not called:
      raise ValueError(
        "`loss_fn` must call the `scan` that it is given, as scan(body, carry, "
        "layers), or no gradient of its layers is exchanged; call it, or take "
        "gradcomp.compress in place of compress_in_scan."
      )
    return result

  # Layers stay typed as equal on all workers, and so do their means.
  axis_name = layer_scan.keywords["axis_name"]
  parts = types.mark_varying(others, axis_name), layers, state.residual
  value, grads = form.value_and_grad(loss, axis_name)(parts, *rest)
  kept = {} if state.residual is None else {"scan_residual": grads[2]}
  return value, together(grads[0] | grads[1]), kept


def _only_in_scan(path: str, x: jax.Array) -> jax.Array:
  """Returns an array; ValueError where it has a gradient of its own."""
  same = jax.custom_vjp(lambda x: x)

  def backward(_: None, cotangent: Any) -> tuple[jax.Array]:
    if isinstance(cotangent, SymbolicZero):
      like: Any = cotangent.aval
      return (jnp.zeros(like.shape, like.dtype),)
    raise ValueError(
      f"`params`{path} must reach the loss only through its `scan`, which averages "
      "its gradient, but the loss reads it elsewhere, too; let compress_in_scan have "
      f"only layers, by {_IN_OPTIMIZER}, and put a decay of weights into the optimizer."
    )

  same.defvjp(lambda x: (x.value, None), backward, symbolic_zeros=True)
  return same(x)


def scanned_layers(
  optimizer: optax.GradientTransformation,
  params: Any,
  opt_state: Any,
  used: dict[str, bool],
  takes: bool,
) -> tuple[LayerScan, ScanState, list[int]] | None:
  """Returns the options and the state of scanned layers, and their places, if any."""
  states = [x for x in jax.tree.leaves(opt_state, is_leaf=is_scan) if is_scan(x)]
  if not states and not takes:
    return None
  with study.STUDY(study.Study()):
    jaxpr = jax.make_jaxpr(optimizer.init)(params).jaxpr
  notes = [x for x in jaxpr.eqns if x.primitive is study.NOTE]
  found = [x for x in notes if isinstance(x.params["about"], LayerScan)]
  if len(found) != 1 or not takes:
    has = "a parameter `scan`" if takes else "no parameter `scan`"
    raise ValueError(
      "`loss_fn` must have a parameter `scan` where the optimizer has one "
      f"gradcomp.parallel.compress_in_scan, and only there, got {has} and "
      f"{len(found)} of them; scan the layers by scan(body, carry, layers), and "
      f"exchange their gradients by {_IN_OPTIMIZER}."
    )
  number: dict[Any, int] = {x: i for i, x in enumerate(jaxpr.invars)}
  places = [number[x] for x in found[0].invars if x in number]
  if len(places) < len(found[0].invars):
    raise ValueError(
      "`optimizer` must give compress_in_scan the parameters as they are, but a "
      "transformation around its init changes them; put it after the exchange."
    )
  # These would exchange layers, or drop residuals.
  is_outer = lambda x: is_scan(x) or isinstance(x, optax.MultiStepsState)
  outer = map(is_scan, jax.tree.leaves(opt_state, is_leaf=is_outer))
  several = {"optax.MultiSteps": bool(states) and not any(outer)}
  for name, given in (used | several).items():
    if given:
      raise ValueError(
        f"`{name}` must not be used with a loss that takes `scan`, which exchanges "
        "the gradients of layers in each backward pass; exchange them after the loop, "
        "by gradcomp.compress and jax.lax.scan."
      )
  (state,) = states  # as many as their notes
  return found[0].params["about"], state, places
