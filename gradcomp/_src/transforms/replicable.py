"""``replicable``: a first state that a program may copy to all workers."""

from typing import Any

import optax

from gradcomp._src.mesh.axes import AxisName, bound_size, on_each, sizes_by_axis
from gradcomp._src.mesh.study import is_study


def replicable(
  optimizer: optax.GradientTransformation,
  *,
  axis_name: AxisName,
  workers: int | tuple[int, ...],
) -> optax.GradientTransformationExtraArgs:
  r"""Lets a program call ``init`` once, and copy the state to each of N workers.

  Most programs around ``jax.pmap`` do so, by ``flax.jax_utils.replicate``, and some
  trainers inside of their own code. There ``init`` cannot count the workers, of which
  each owns :math:`1/N` of the mean, and keeps what its second encoding loses. Now it
  can: it returns one worker's part, ``[ceil(rows / N), ...]`` where all workers
  together have ``rows``. All parts are zeros at first, so that copies of one have the
  bits of an ``init`` inside the map. ``update`` is that of ``optimizer``, and biased
  where that is.

  Inside of the map ``init`` is that of ``optimizer``, too. For plain ``jax.jit`` and
  ``jax.shard_map``, which take the arrays of all workers, use ``optimizer`` itself
  under ``jax.set_mesh``.

  Args:
    optimizer: an optax transformation with gradcomp's in it, like a whole chain.
    axis_name: the axis, or the tuple of axes, given to the gradcomp transformation.
    workers: N, of all processes together; of several axes a tuple of their sizes.

  Returns:
    A gradient transformation with the state of ``optimizer``.

  Raises:
    ValueError: ``workers`` is no such number; in ``init``, the first state differs
      between the workers, as where :func:`gradcomp.parallel.zero` is around an
      optimizer that keeps its rows of the parameters.

  Example:
    >>> tx = gradcomp.qsgd(bits=4, axis_name="data", feedback="error")
    >>> tx = replicable(optax.chain(tx, optax.adam(1e-3)), axis_name="data", workers=8)
    >>> state = tx.init({"w": jnp.zeros((512, 512))})
    >>> [rows.shape for rows in state[0].server_residual[("data",)]]
    [(8, 8, 512)]
  """
  sizes = sizes_by_axis("workers", axis_name, workers)
  optimizer = optax.with_extra_args_support(optimizer)

  def init_fn(params: Any) -> Any:
    if bound_size(axis_name) is not None or is_study():
      return optimizer.init(params)
    try:
      return on_each(lambda: optimizer.init(params), sizes, stacked=False)
    except ValueError as error:
      if "out_axes is None" not in str(error):
        raise
      raise ValueError(
        "`optimizer` must have a first state that is the same on all workers, which "
        "copies of one worker's are, but an array of it differs between those of "
        f"{axis_name!r}; make the states of all by gradcomp.init_state(optimizer, "
        f"params, axis_name={axis_name!r}, replicate={workers})."
      ) from None

  return optax.GradientTransformationExtraArgs(init_fn, optimizer.update)
