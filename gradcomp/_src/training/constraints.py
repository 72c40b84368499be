"""Sharding constraints in a loss that a map over the workers runs.

Trainers of large models constrain activations: ``with_sharding_constraint(x, P("data",
None, "model"))``. In a map over ``data`` JAX refuses this name, although a worker has
its part there already. So the loss is traced as if it were in no map, the axes of the
map leave the jaxpr, and the result is evaluated in the map.

This file alone uses parts of JAX that are not public: ``eqn.ctx``, ``aval.update`` and
the class of variables.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.extend.core.primitives import sharding_constraint_p
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from gradcomp._src.mesh import axes, shard_maps


def over(
  function: Callable[..., Any],
  names: frozenset[str],
  mesh: Mesh | AbstractMesh,
  check: Callable[[Any], None] = lambda x: None,
  argument: str = "loss_fn",
) -> Callable[..., Any]:
  """Returns a function for a map over the axes, in which constraints may name them."""
  # `check` sees each array that the function closes over.

  def shape(x: Any) -> jax.ShapeDtypeStruct:
    # Arrays of the map have types with its mesh; these have none.
    weak = getattr(jax.typeof(x), "weak_type", False)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak)

  def call(*args: Any) -> Any:
    shapes = jax.tree.map(shape, args)
    with shard_maps.UNSEEN(names), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      closed, out = jax.make_jaxpr(function, return_shape=True)(*shapes)
    for x in closed.consts:
      check(x)
    moved = core.ClosedJaxpr(_Move(names, argument).jaxpr(closed.jaxpr), closed.consts)
    leaves = core.jaxpr_as_fun(moved)(*jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(out), leaves)

  return call


class _Move:
  """Moves jaxprs to the mesh of a map over the axes, which no constraint names then."""

  def __init__(self, names: frozenset[str], argument: str) -> None:
    self.names, self.argument = names, argument
    self.variables, self.contexts = dict[Any, Any](), dict[Any, Any]()

  def jaxpr(self, old: core.Jaxpr) -> Any:
    equations = [new for eqn in old.eqns if (new := self.equation(eqn))]
    names = "constvars", "invars", "outvars"
    return old.replace(eqns=equations, **{x: self.of(getattr(old, x)) for x in names})

  def equation(self, eqn: Any) -> Any:
    """Returns an equation of the map, or None for a constraint over no Auto axis."""
    constrains = eqn.primitive is sharding_constraint_p
    # JAX has no constraint that leaves no axis to the compiler.
    if eqn.primitive is shard_maps.CROSS or (
      constrains and not self.of(eqn.params["sharding"].mesh).auto_axes
    ):
      self.variables[eqn.outvars[0]] = self.of(eqn.invars[0])
      return None
    if twice := self.names.intersection(eqn.params.get("newly_manual_axes", ())):
      raise ValueError(
        f"`{self.argument}` must not map over the axis of the workers, which each have "
        f"their part already, got a shard_map over {sorted(twice)}; map over other "
        "axes: jax.shard_map(..., axis_names={'model'}), with specs of these."
      )
    if eqn.ctx not in self.contexts:
      mesh = self.of(eqn.ctx.cur_abstract_mesh)
      with eqn.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
        self.contexts[eqn.ctx] = type(eqn.ctx)()
    return eqn.replace(
      invars=self.of(eqn.invars),
      outvars=self.of(eqn.outvars),
      params={name: self.of(x) for name, x in eqn.params.items()},
      ctx=self.contexts[eqn.ctx],
    )

  def of(self, x: Any) -> Any:
    """Returns a variable, a type, a sharding or a parameter of an equation, or many."""
    match x:
      case core.Literal():
        return core.Literal(self.of(x.val), self.of(x.aval))
      case np.ndarray():  # JAX's own, of which a view has no type yet
        return x.view()
      case core.Var():
        if type(x) is core.Var and x not in self.variables:
          self.variables[x] = core.Var(self.of(x.aval))
        return self.variables.get(x, x)
      case Mesh() | AbstractMesh() if self.names.issubset(x.axis_names):
        manual = dict.fromkeys(self.names, AxisType.Manual)
        return x.abstract_mesh.update_axis_types(manual)
      case NamedSharding():
        spec = axes.restrict_spec(x.spec, {*x.mesh.axis_names} - self.names)
        return NamedSharding(self.of(x.mesh), spec, memory_kind=x.memory_kind)
      case core.Jaxpr():  # since JAX 0.12 a closed one is one, too
        moved, consts = self.jaxpr(x), getattr(x, "consts", ())
        return moved.with_consts(consts) if consts else moved
      case core.ClosedJaxpr():
        return core.ClosedJaxpr(self.jaxpr(x.jaxpr), x.consts)
      case jax.core.ShapedArray():
        return x.update(sharding=self.of(x.sharding))
      case tuple() | list() if type(x) in (tuple, list):
        return type(x)(map(self.of, x))
      case _ if hasattr(x, "inner_aval"):  # the type of a reference
        return x.update(inner_aval=self.of(x.inner_aval))
    return x
