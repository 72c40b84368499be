"""Sharding constraints in a loss that a map over the workers runs.

Trainers of large models constrain activations: ``with_sharding_constraint(x, P("data",
None, "model"))``. In a map over ``data`` JAX refuses this name. But there a worker has
its part alone, so that a constraint over ``data`` holds already, and the rest of the
spec is for the compiler. So the loss is traced as if it were in no map, the axes of the
map leave the jaxpr, and the result is evaluated in the map.

This file alone uses parts of JAX that are not public: ``eqn.ctx``, ``aval.update`` and
the class of variables.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from gradcomp._src import checks
from gradcomp._src.mesh import specs


def over(
  function: Callable[..., Any], names: frozenset[str], mesh: Mesh | AbstractMesh
) -> Callable[..., Any]:
  """Returns a function for a map over the axes, in which constraints may name them."""

  def call(*args: Any) -> Any:
    # Arrays of the map have types with its mesh; these have none.
    bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    with jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh)):
      closed, out = jax.make_jaxpr(function, return_shape=True)(*bare)
    moved = core.ClosedJaxpr(_in_map(closed.jaxpr, names, {}), closed.consts)
    leaves = core.jaxpr_as_fun(moved)(*jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(out), leaves)

  return call


def _in_map(
  jaxpr: core.Jaxpr, names: frozenset[str], contexts: dict[Any, Any]
) -> core.Jaxpr:
  """Returns a jaxpr on the mesh of a map over the axes, which no constraint names."""
  known = dict[Any, Any]()  # a variable, and what stands for it

  def value(x: Any) -> Any:
    if isinstance(x, core.Literal):
      return x
    if isinstance(x, core.Var):
      if type(x) is core.Var and x not in known:
        known[x] = core.Var(value(x.aval))
      return known.get(x, x)
    if isinstance(x, Mesh | AbstractMesh):
      if not names.issubset(x.axis_names):
        return x
      return x.abstract_mesh.update_axis_types(dict.fromkeys(names, AxisType.Manual))
    if isinstance(x, NamedSharding):
      others = {*x.mesh.axis_names} - names
      spec = specs.restrict_spec(x.spec, others)
      return NamedSharding(value(x.mesh), spec, memory_kind=x.memory_kind)
    if isinstance(x, core.Jaxpr):  # in JAX 0.12 closed ones, too
      return _in_map(x, names, contexts)
    if isinstance(x, core.ClosedJaxpr):
      return core.ClosedJaxpr(value(x.jaxpr), x.consts)
    if isinstance(x, jax.core.ShapedArray):
      return x.update(sharding=value(x.sharding))
    if hasattr(x, "inner_aval"):  # the type of a reference
      return x.update(inner_aval=value(x.inner_aval))
    return type(x)(map(value, x)) if type(x) in (tuple, list) else x

  def context(old: Any) -> Any:
    if old not in contexts:
      mesh = value(old.cur_abstract_mesh)
      with old.manager, jax.sharding.use_abstract_mesh(mesh):
        contexts[old] = type(old)()
    return contexts[old]

  eqns = []
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "sharding_constraint":
      mesh = value(eqn.params["sharding"].mesh)
      if not mesh.auto_axes:  # JAX has no constraint that leaves nothing to the compiler
        known[eqn.outvars[0]] = value(eqn.invars[0])
        continue
    if twice := names.intersection(eqn.params.get("newly_manual_axes", ())):
      raise ValueError(
        "`loss_fn` must not map over the axis of the workers, where each has its part "
        f"already, but a shard_map in it is over {sorted(twice)}; map over other axes "
        "alone: jax.shard_map(..., axis_names={'model'}), with specs of these."
      )
    eqns.append(
      eqn.replace(
        invars=value(eqn.invars),
        outvars=value(eqn.outvars),
        params={name: value(x) for name, x in eqn.params.items()},
        ctx=context(eqn.ctx),
      )
    )
  return jaxpr.replace(
    constvars=value(jaxpr.constvars),
    invars=value(jaxpr.invars),
    outvars=value(jaxpr.outvars),
    eqns=eqns,
  )
