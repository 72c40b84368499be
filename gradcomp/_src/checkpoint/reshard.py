"""``reshard_state``: moves an optimizer state from N to M workers."""

import functools
from typing import Any, TypeVar

import optax
from jax.sharding import Mesh

from gradcomp._src.checkpoint.placement import mesh_to_go_on, placed
from gradcomp._src.checkpoint.reshard_parts import Keep, Move
from gradcomp._src.checkpoint.shapes import first_state_of, number_of_workers
from gradcomp._src.checkpoint.validate import check_concrete, check_fits
from gradcomp._src.checks import one_of
from gradcomp._src.mesh.axes import AxisName, axis_names

State = TypeVar("State")


def reshard_state(  # noqa: PLR0913 - options of users, by keyword
  optimizer: optax.GradientTransformation,
  params: Any,
  opt_state: State,
  *,
  axis_name: AxisName,
  old_workers: int,
  workers: int,
  keep: Keep = "sum",
  param_specs: Any = None,
  mesh: Mesh | None = None,
) -> State:
  r"""Moves an optimizer state from N workers to M workers.

  No residual is lost. With the residuals :math:`e_i` of workers, and :math:`r` of
  owners (see :class:`gradcomp.exchange.TwoShot`),

  .. math:: \sum_{i \le M} e'_i + M r' = \sum_{i \le N} e_i + N r

  up to rounding in float32, and then to ``residual_dtype``, to nearest. Only zeros are
  added where workers join, so that these residuals keep their values; :math:`r' =
  (N / M) r` is rounded once. ``keep`` chooses the sum that is preserved.

  - Residuals, and gradcomp's momentum: new workers begin with zeros. Worker :math:`i`
    that leaves adds its own to those of worker :math:`i \bmod M`. So do gradients that
    an ``optax.MultiSteps`` around the exchange has collected.
  - Residuals of owners, and the rows of :func:`gradcomp.parallel.zero`: the same rows
    are split into M shares. If no worker owns rows any more, because ``"auto"`` takes
    another exchange for M workers, all workers share the owner residuals. If workers
    keep no residuals, these rounding errors of the last means are dropped.
  - Codec memories: the memory that all workers share stays. A worker's own stays with
    it, and new workers begin as in ``optimizer.init``. All do if ranges are others, as
    for :class:`gradcomp.codecs.TopK` in ``two_shot``, which then searches thresholds
    anew. Its counts are those of a worker's last message; the counts of workers that
    left are dropped.
  - Local steps: new workers, from N on, get the inner state of worker i mod N. This
    works only at the end of a round, where all displacements are zero.
  - Everything else is equal on all workers, and stays.

  Args:
    optimizer: the transformation that made the state.
    params: the parameters, or their ``jax.ShapeDtypeStruct``, whole.
    opt_state: the whole global state, as ``optimizer.init`` makes it under
      ``jax.set_mesh``, in NumPy's or JAX's arrays. If several processes have parts of
      JAX's, all of them call this, and each gathers one array after another. Under
      ``jax.vmap`` and ``jax.pmap`` arrays have another first axis: leave it out where
      workers are equal, and join it with the next where they are not.
    axis_name: the axis, or the tuple of axes, given to the gradcomp transformation.
    old_workers: N, the number of workers that the state was made for.
    workers: M, the number of workers that go on with it.
    keep: the sum that is preserved, which depends on the use of the state.
      ``"sum"`` is the sum above. The next means take it by :math:`1/M`, as a learning
      rate that grows with the number of workers, and the batch, asks for.
      ``"mean"`` is the mean :math:`\frac{1}{N} \sum e_i + r`, so that unsent updates
      keep their size: :math:`e'` is multiplied by :math:`M / N`, and
      :math:`r' = r`. Take it if batch and learning rate stay.
      ``"addends"`` is for ``update`` in plain ``jax.jit`` under Explicit axes, where no
      mean is taken: :math:`\sum e_i + r` stays, which is the sum and the update.
    param_specs: the specs of the parameters, if :func:`init_state` made the state.
    mesh: the M devices, of one or several processes; by default the mesh of
      ``jax.set_mesh``, if there is one.

  Returns:
    The state, in arrays on the mesh, sharded by :func:`state_specs`. Arrays that were
    sharded over other axes, too, stay so. Without a mesh, they are NumPy's arrays.

  Raises:
    ValueError: a number of workers is below 1, or ``workers`` is not that of the mesh;
      the state is not that of N workers with this optimizer and these parameters, and
      the error names the first arrays that differ; it is in the midst of a round; or an
      array is only on devices of other processes.

  Example:
    >>> tx = gradcomp.qsgd(bits=4, axis_name="data", feedback="error")
    >>> params = {"w": jnp.ones((2, 512))}
    >>> shapes = gradcomp.checkpoint.state_shapes(
    ...   tx, params, axis_name="data", workers=3
    ... )
    >>> state = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
    >>> moved = reshard_state(
    ...   tx, params, state, axis_name="data", old_workers=3, workers=2)
    >>> moved.residual["w"].shape, moved.residual["w"][:, 0].tolist()
    ((4, 512), [2.0, 2.0, 1.0, 1.0])
  """
  one_of("keep", Keep, keep)
  check_concrete(opt_state)
  old_workers = number_of_workers("old_workers", old_workers)
  workers = number_of_workers("workers", workers)
  names = axis_names(axis_name)
  mesh = mesh_to_go_on(mesh, names, workers)
  old, new = (
    first_state_of(
      optimizer,
      params,
      workers=count,
      axis_name=axis_name,
      param_specs=param_specs,
      mesh=mesh,
    )
    for count in (old_workers, workers)
  )
  check_fits(opt_state, old.shapes, old_workers)
  place = functools.partial(placed, mesh)
  return Move(old_workers, workers, names, keep, old, new, place).state(opt_state)
