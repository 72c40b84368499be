"""Makes gradients with the shapes of real models, and programs of sharded arrays."""

from typing import Any

import jax

import gradcomp


def placed(mesh: Any, tree: Any, specs: Any) -> Any:
  """Returns structs with shardings, by a tree of specs like the first of its levels."""
  sharding = lambda spec: jax.NamedSharding(mesh, spec)
  place = lambda spec, part: jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(spec)), part
  )
  return jax.tree.map(place, specs, tree, is_leaf=lambda x: isinstance(x, jax.P))


def mapped(
  mesh: Any, function: Any, args: Any, specs: Any, results: Any, **options: Any
) -> tuple[Any, Any]:
  """Returns a jitted map of a function over a mesh, and structs of its arguments."""
  donated = options.pop("donate_argnums", ())
  own = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=results, **options)
  return jax.jit(own, donate_argnums=donated), placed(mesh, args, specs)


def exchange(
  mesh: Any, tx: Any, leaves: Any, gradient: Any, spec: Any, **options: Any
) -> tuple[Any, tuple[Any, Any]]:
  """Returns a jitted update whose gradient is sharded so, and structs of both.

  It writes each array of the state where it was. Donated memory goes to the first
  result of its shape. The state comes first, as parameters in a train step; else the
  mean would be written over the residual.
  """
  with jax.set_mesh(mesh):
    state = jax.eval_shape(tx.init, leaves)
  specs = gradcomp.state_specs(state, axis_name="data")
  update = lambda gradient, state: tx.update(gradient, state)[::-1]
  ways = (spec, specs), (specs, jax.P())
  return mapped(mesh, update, (gradient, state), *ways, donate_argnums=1, **options)


def resnet50(leaves: int | None = None) -> list[jax.Array]:
  """Draws random gradients of ResNet-50's 161 leaves, or of its first ``leaves``."""
  shapes = resnet50_shapes()[:leaves]
  return [jax.random.normal(jax.random.key(i), s) for i, s in enumerate(shapes)]


def resnet50_shapes() -> list[tuple[int, ...]]:
  """Returns the shapes of ResNet-50's 161 leaves, which have 25,557,032 elements."""
  kernels, channels = [(7, 7, 3, 64)], 64
  for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
    for block in range(blocks):
      kernels += [(1, 1, channels, width), (3, 3, width, width)]
      kernels += [(1, 1, width, 4 * width)]
      kernels += [(1, 1, channels, 4 * width)] * (block == 0)
      channels = 4 * width
  normed = (x for kernel in kernels for x in (kernel, kernel[-1:], kernel[-1:]))
  return [*normed, (channels, 1000), (1000,)]
