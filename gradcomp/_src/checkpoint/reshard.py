"""``reshard_state``: moves an optimizer state from N to M workers, on the host."""

import functools
import math
from typing import Any, TypeVar

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from gradcomp._src.checkpoint import placement, shapes
from gradcomp._src.checkpoint.regroup_workers import Keep, Move
from gradcomp._src.checks import one_of
from gradcomp._src.core.state import CompressState, OwnedRows, OwnSteps
from gradcomp._src.mesh import platforms, types
from gradcomp._src.mesh.axes import AxisName, axis_names
from gradcomp._src.mesh.specs import axes_in, is_spec
from gradcomp._src.mesh.trees import boxed_like, unboxed

State = TypeVar("State")

_leaves = functools.partial(jax.tree_util.tree_leaves_with_path, is_leaf=is_spec)


def reshard_state(  # noqa: PLR0913 - options of users, by keyword
  optimizer: optax.GradientTransformation,
  params: Any,
  opt_state: State,
  *,
  axis_name: AxisName,
  old_workers: int,
  workers: int,
  old_platform: str | None = None,
  keep: Keep = "sum",
  param_specs: Any = None,
  mesh: Mesh | None = None,
) -> State:
  r"""Returns an optimizer state that moved from N workers to M workers.

  No residual is lost. With the residuals :math:`e_i` of workers, and :math:`r` of
  owners (see :class:`gradcomp.exchange.TwoShot`),

  .. math:: \sum_{i \le M} e'_i + M r' = \sum_{i \le N} e_i + N r

  up to rounding in float32, and then to ``residual_dtype``, to nearest. With as many
  workers on another platform, which may cut other messages, every bit is preserved.

  - Residuals, gradcomp's momentum, and what ``optax.MultiSteps`` around the exchange
    has collected: new workers begin with zeros. Worker :math:`i` that leaves adds its
    own to those of worker :math:`i \bmod M`.
  - Residuals of owners, and the rows of :func:`gradcomp.parallel.zero`: the same rows
    are split into M shares. If ``"auto"`` takes an exchange without owners for M
    workers, all workers share the owner residuals, or drop them if they keep none.
  - Codec memories: shared memory stays. A worker's own stays with it, and new workers
    begin as in ``optimizer.init``. All do if ranges change, as for
    :class:`gradcomp.codecs.TopK` in ``two_shot``.
  - Estimates of ``feedback="ef21"``: the shared one becomes each worker's own, and
    owner residuals become zero. So no sum is preserved.
  - Local steps: worker i gets the inner state of worker i mod N. This works only at the
    end of a round, where all displacements are zero.
  - Everything else is equal on all workers, and stays.

  Args:
    optimizer, params: those of the state; shapes of whole parameters will do.
    opt_state: the whole global state, as ``optimizer.init`` makes it under
      ``jax.set_mesh``, in NumPy's or JAX's arrays. If several processes have parts of
      JAX's, all of them call this. Of ``jax.vmap`` and ``jax.pmap``, take one row where
      workers are equal, else join the first two axes.
    axis_name: the axis, or the tuple of axes, given to the gradcomp transformation.
    old_workers, workers: N, that the state was made for, and M, that go on with it.
    old_platform: that of the N, by which ``message_bytes="auto"`` cut messages, in the
      record of :func:`gradcomp.checkpoint.make_record`; by default that of the M.
    keep: the sum that is preserved. ``"sum"`` is that above, for a learning rate that
      grows with the number of workers, and the batch. ``"mean"`` is :math:`\frac{1}{N}
      \sum e_i + r`: take it if batch and learning rate stay. ``"addends"`` is
      :math:`\sum e_i + r`, for ``update`` in plain ``jax.jit`` under Explicit axes.
    param_specs: the specs of the parameters, if :func:`init_state` made the state.
    mesh: the M devices, of one or several processes; by default the mesh of
      ``jax.set_mesh``. Arrays lie on it by :func:`state_specs`, and over other axes as
      before; without a mesh they are NumPy's.

  Raises:
    ValueError: ``workers`` is not that of the mesh, or an option is bad; the state is
      not that of N workers with this optimizer and these parameters, or in the midst of
      a round; or an array is only on devices of other processes.

  Example:
    >>> tx = gradcomp.qsgd(bits=4, axis_name="data", feedback="error")
    >>> params = {"w": jnp.ones((2, 512))}
    >>> with jax.set_mesh(jax.make_mesh((3,), ("data",))):
    ...   state = jax.tree.map(jnp.ones_like, tx.init(params))
    >>> options = {"axis_name": "data", "old_workers": 3, "workers": 2}
    >>> moved = reshard_state(tx, params, state, **options)
    >>> moved.residual["w"].shape, moved.residual["w"][:, 0].tolist()
    ((4, 512), [2.0, 2.0, 1.0, 1.0])
  """
  one_of("keep", Keep, keep)
  for path, x in _leaves(opt_state):
    if isinstance(x, jax.core.Tracer):
      raise ValueError(
        f"`opt_state`{jax.tree_util.keystr(path)} must be an array, got "
        f"{x.aval.str_short()} inside a transformed function; call "
        "gradcomp.reshard_state outside of jax.jit."
      )
  old_workers = shapes.number_of_workers("old_workers", old_workers)
  workers = shapes.number_of_workers("workers", workers)
  names = axis_names(axis_name)
  mesh = jax.sharding.get_mesh() if mesh is None else mesh
  here = math.prod(mesh.shape.get(name, 0) for name in names)
  if not mesh.empty and here != workers:
    raise ValueError(
      f"`workers` must be the number of workers on the axes {names} of the mesh, "
      f"which has {dict(mesh.shape)}, got {workers}; pass mesh=, or call this under "
      "jax.set_mesh(mesh) with the mesh that goes on."
    )
  options: Any = {"axis_name": axis_name, "param_specs": param_specs, "mesh": mesh}
  first = functools.partial(shapes.first_state_of, optimizer, params, **options)
  with platforms.planned_on(mesh):
    with platforms.planned_for(old_platform, "old_platform"):
      old, _, old_plans, _ = first(workers=old_workers)
    new, specs, plans, sizes = first(workers=workers)
  given, was, now, specs = map(unboxed, (opt_state, old, new, specs))
  shapes.check_fits(given, was, old_workers)
  places = lambda axes: math.prod(sizes[x] for x in axes if x not in names)
  pairs = zip(old_plans, plans, strict=True)
  move = Move(old_workers, workers, keep, places, pairs)
  ours = lambda x: isinstance(x, CompressState | OwnedRows | OwnSteps)
  moved = jax.tree.map(move, given, was, now, is_leaf=ours)
  before, to = dict(_leaves(given)), dict(_leaves(specs))

  def place(path: Any, x: Any) -> Any:
    """Puts an array on devices by its spec, or as it lay over more axes."""
    if mesh.empty:
      return x if placement.is_key(x) else placement.host_array(x)
    spec, own = to[path], types.placed_spec(before.get(path, x))
    if axes_in(spec) <= axes_in(own) <= {*mesh.axis_names}:
      spec = own
    return placement.put(x, NamedSharding(mesh, spec))

  return boxed_like(opt_state, jax.tree_util.tree_map_with_path(place, moved))
