"""Explains candidates for a model, of whose leaves it joins many to a few."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr

from gradcomp._src.core.transform import compress
from gradcomp._src.cost.planner.candidates import Candidate, is_last
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.report.explain import Explanation, explain

_FEW = 8  # leaves that are not worth joining
# Elements from which leaves are hardly ever so small that they travel in float32, and
# elements from which a sparse message has more slots than elements to send.
_SIZES = (1 << 15, 1 << 20)

Leaf = jax.ShapeDtypeStruct


class Model(NamedTuple):
  """The shapes of parameters, hashable.

  Attributes:
    treedef: of the parameters.
    leaves: the shape and dtype of each.
    paths: the path of each.
  """

  treedef: Any
  leaves: tuple[Leaf, ...]
  paths: tuple[str, ...]

  @property
  def params(self) -> Any:
    """The parameters' shapes, in their tree."""
    return jax.tree.unflatten(self.treedef, self.leaves)

  @property
  def elements(self) -> int:
    """The number of elements of all leaves."""
    return sum(math.prod(leaf.shape) for leaf in self.leaves)

  def joined(self, *, sparse: bool) -> "Model":
    """Returns a model of about as many elements in few leaves; this one if it has few.

    Tracing hundreds of leaves takes seconds, and there are dozens of candidates. What
    fills up the rows of leaves is lost, so that bytes come out too low, if anything:
    the row that seems best is traced anew. Output layers stay apart.

    Args:
      sparse: whether messages have more slots for leaves of 2**20 elements and more.
        Those stay apart from others then, which are not joined to such leaves.
    """
    if len(self.leaves) <= _FEW:
      return self
    kinds: dict[Any, list[tuple[str, int]]] = {}
    for path, leaf in zip(self.paths, self.leaves, strict=True):
      size = math.prod(leaf.shape)
      place = sum(size >= bound for bound in _SIZES[: 1 + sparse])
      kinds.setdefault((is_last(path), place, leaf.dtype), []).append((path, size))
    joined: dict[str, Leaf] = {}
    for (_, place, dtype), found in kinds.items():
      total = sum(size for _, size in found)
      count = -(-total // (_SIZES[-1] - 1)) if sparse and place < len(_SIZES) else 1
      for number in range(count):  # all of one shape, which is traced once
        joined[f"{found[0][0]}/{number}"] = Leaf((-(-total // count),), dtype)
    return model_of(joined)


def model_of(params: Any, name: str = "params") -> Model:
  """Returns the shapes of parameters, or of what the argument ``name`` is.

  Raises:
    ValueError: they have no elements.
    TypeError: a leaf is no array of floats.
  """
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    kind = getattr(leaf, "dtype", type(leaf).__name__)
    if not hasattr(leaf, "shape") or not jnp.issubdtype(kind, jnp.inexact):
      raise TypeError(
        f"`{name}`{keystr(path)} must be an array of floats, whose gradients are "
        f"exchanged, got {kind}; leave out what is not trained."
      )
  like = jax.eval_shape(lambda params: params, params)
  found, treedef = jax.tree_util.tree_flatten_with_path(like)
  model = Model(
    treedef,
    tuple(Leaf(leaf.shape, leaf.dtype) for _, leaf in found),
    tuple(keystr(path, simple=True, separator="/") for path, _ in found),
  )
  if not model.elements:
    raise ValueError(
      f"`{name}` must have a leaf with an element, got {len(found)} leaves without."
    )
  return model


def transformation(
  candidate: Candidate,
  exchange: Exchange,
  paths: Sequence[str],
  axis_name: AxisName | None,
) -> optax.GradientTransformationExtraArgs:
  """Returns what exchanges gradients by a candidate.

  Raises:
    ValueError: the codec or the axes do not allow the exchange.
  """
  return compress(
    candidate.codec_for(paths),
    axis_name=axis_name,
    exchange=exchange,
    feedback="error" if candidate.feedback else None,
  )


@functools.lru_cache(maxsize=1024)
def explained(
  candidate: Candidate, exchange: Exchange, model: Model, workers: int | tuple[int, int]
) -> Explanation:
  """Returns what a candidate sends.

  Its codec is traced without kernels for GPUs, which takes half the time: bytes are the
  same.

  Raises:
    ValueError: the codec or the axes do not allow the exchange.
  """
  axis_name = ("between", "inside") if isinstance(workers, tuple) else "workers"
  plain = candidate.without_kernels()
  tx = transformation(plain, exchange, model.paths, axis_name)
  return explain(tx, model.params, workers=workers)
