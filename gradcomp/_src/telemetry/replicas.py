"""``compare_replicas``: compares the copies of a tree on all workers."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from gradcomp._src.core.fingerprint import leaf_fingerprints
from gradcomp._src.exchange.collectives import STAGE, gather
from gradcomp._src.mesh.axes import AxisName, axis_names
from gradcomp._src.mesh.types import around, leaves_cut, mark_varying


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Replicas:
  """The fingerprints of :func:`compare_replicas`, with the leaves that differ.

  Attributes:
    words: ``uint32[workers, leaves, 2]``, the fingerprint of each leaf at each worker,
      equal on all workers; zeros if nothing was compared in this step.
    leaves: the paths of the leaves.
  """

  words: jax.Array
  leaves: tuple[str, ...] = dataclasses.field(metadata={"static": True})

  @property
  def equal(self) -> jax.Array:
    """Whether all workers have equal leaves, as ``bool[]``, also in a program."""
    return jnp.all(self.words == self.words[:1])

  def differing(self) -> dict[str, list[int]]:
    """Returns by leaf the workers that differ from the majority; all without one."""
    found = {}
    words = np.asarray(self.words)
    for number, name in enumerate(self.leaves):
      _, kinds, counts = np.unique(
        words[:, number], axis=0, return_inverse=True, return_counts=True
      )
      if len(counts) > 1:
        most = np.argmax(counts) if 2 * counts.max() > len(words) else -1
        found[name] = np.flatnonzero(kinds.reshape(-1) != most).tolist()
    return found

  def require_equal(self) -> None:
    """Raises RuntimeError in every process, with leaves and workers that differ."""
    if bool(self.equal):  # outside of programs: it blocks until the step ends
      return
    differing = self.differing()
    of = lambda x: f"worker{'s' * (len(x) > 1)} {', '.join(map(str, x))}"
    half = "no more than half of the workers agree"
    who = lambda x: half if len(x) == len(self.words) else of(x)
    lines = [f"{name}: {who(x)}" for name, x in differing.items()]
    raise RuntimeError(
      f"{len(differing)} of {len(self.leaves)} leaves must be equal on all "
      f"{len(self.words)} workers, and are not:\n  " + "\n  ".join(lines) + "\nGo on "
      "from a checkpoint, and look at these workers' memory and devices."
    )


def compare_replicas(
  tree: Any, *, axis_name: AxisName, mesh: Mesh | None = None
) -> Replicas:
  """Returns the fingerprints of the workers' copies of a tree, equal on all workers.

  Parameters that a type calls replicated may differ, after a bit flipped or where a
  process computed something else. This gathers the :func:`fingerprint` of each leaf, 8
  bytes a leaf and worker. Call it in a map, or outside for arrays of a mesh, on all
  workers in the same steps, as ``compare_every=`` of :func:`gradcomp.make_train_step`
  does. ``require_equal()`` of the result raises RuntimeError, with leaf and worker.

  Args:
    tree: arrays, equal on all workers, like parameters. Other axes may shard them.
    axis_name: the axis of the workers, or a tuple of axes.
    mesh: the devices, outside of a map; by default the arrays', or of ``jax.set_mesh``.

  Raises:
    ValueError: the axis is not there, or an array is sharded over it.
    TypeError: JAX would drop bits of a leaf's dtype.

  Example:
    >>> params = {"b": jnp.zeros((3, 2)), "w": jnp.ones((3, 2)).at[2, 0].set(-0.0)}
    >>> compare = lambda params: compare_replicas(params, axis_name="data")
    >>> found = jax.vmap(compare, axis_name="data", out_axes=None)(params)
    >>> bool(found.equal), found.differing()
    (False, {"['w']": [2]})
  """
  on, kind = around(tree, axis_name, mesh)
  if kind == AxisType.Manual:
    return _compared(tree, axis_name)
  for path, cut, got in leaves_cut(tree, axis_name):
    raise ValueError(
      f"`tree`{path} must be whole along {axis_name!r}, so that each worker has a "
      f"copy, but is sharded over {cut}, got {got}; leave it out, or name an axis "
      "along which it is whole."
    )
  if not set(axis_names(axis_name)).issubset(on.axis_names):
    raise ValueError(
      f"`axis_name` must be an axis of an enclosing map or of the mesh, got "
      f"{axis_name!r} and a mesh with the axes {on.axis_names}; pass mesh=, or call "
      "this under jax.set_mesh(mesh)."
    )
  return _on_mesh(tree, axis_name, on)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _on_mesh(tree: Any, axis_name: AxisName, mesh: Any) -> Replicas:
  compared = functools.partial(_compared, axis_name=axis_name)
  given: Any = {"in_specs": P(), "out_specs": P(), "mesh": mesh}
  return jax.shard_map(compared, axis_names={*axis_names(axis_name)}, **given)(tree)


def _compared(tree: Any, axis_name: AxisName) -> Replicas:
  """Gathers the fingerprints of all workers, inside a map."""
  # An array that is replicated by its type would be taken from one worker.
  own = leaf_fingerprints(mark_varying(tree, axis_name))
  words = gather(own.reshape(-1), axis_name, STAGE).reshape(-1, *own.shape)
  paths = jax.tree_util.tree_leaves_with_path(tree)
  return Replicas(words, tuple(jax.tree_util.keystr(path) for path, _ in paths))
