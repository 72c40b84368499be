"""The source of layers of FSDP, which gathers the shards of all workers."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.exchange.collectives import as_floats, gather
from gradcomp._src.kernels.common.threefry import fold_key
from gradcomp._src.mesh.axes import AxisName, require_size
from gradcomp._src.mesh.trees import combine, split, trainable
from gradcomp._src.parallel import options, transport
from gradcomp._src.parallel.options import Wire
from gradcomp._src.parallel.scan_backward import like


@dataclasses.dataclass(frozen=True, eq=False)
class Gathered:
  """The source of layers that are sharded over the workers.

  ``inner`` are the axes of workers that together keep the words of a layer, so that the
  backward pass asks nobody else; None keeps none, and asks all.
  """

  wire: Wire
  axis: int
  inner: AxisName | None

  ahead: ClassVar[int] = 1

  @property
  def axis_name(self) -> AxisName:
    return self.wire.axis_name

  def ask(self, given: Any, key: jax.Array) -> list[jax.Array]:
    leaves = jax.tree.leaves(trainable(given))
    send = lambda i, x: transport.gather_lines(x, self.wire, fold_key(key, i))
    return [send(i, x) for i, x in enumerate(leaves)]

  def keep(self, asked: Sequence[jax.Array]) -> list[jax.Array] | None:
    if self.inner is None:
      return None
    count, worker = require_size(self.inner), lax.axis_index(self.inner)
    shares = [x.reshape(count, -1, *x.shape[1:]) for x in asked]
    return [lax.dynamic_index_in_dim(x, worker, keepdims=False) for x in shares]

  def again(
    self, given: Any, kept: Sequence[jax.Array] | None, key: jax.Array
  ) -> list[jax.Array]:
    if self.inner is None or kept is None:
      return self.ask(given, key)
    result = []
    for share, shard in zip(kept, jax.tree.leaves(trainable(given)), strict=True):
      name = as_floats(len(share) * shard.size, self.inner)
      shares = gather(share, self.inner, name, axis=1)
      result.append(shares.reshape(-1, *share.shape[1:]))
    return result

  def layer(self, given: Any, asked: Sequence[jax.Array]) -> Any:
    mine, others = split(given)
    shards, treedef = jax.tree.flatten(mine)
    pairs = zip(asked, shards, strict=True)
    whole = [transport.joined(x, self.wire, y, self._axis(y)) for x, y in pairs]
    return combine(jax.tree.unflatten(treedef, whole), others)

  def like(self, given: Any) -> Any:
    """Returns zeros in place of a whole layer, of its shapes and types."""
    mine, others = split(given)
    shape = lambda x: whole_shape(x.shape, self.axis, self.wire.size)
    zeros = lambda x: like(jnp.zeros(shape(x), x.dtype), x)
    return combine(jax.tree.map(zeros, mine), others)

  def _axis(self, x: jax.Array) -> int:
    return options.checked_axis("axis", self.axis, x.ndim)


def whole_shape(shape: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
  """Returns the shape of an array of a layer, by the shape of its shard."""
  axis = options.checked_axis("axis", axis, len(shape))
  return (*shape[:axis], shape[axis] * size, *shape[axis + 1 :])
