"""Trees as users have them: untrained leaves, arrays in boxes, and ``PerWorker``.

A module of equinox has functions, numbers and keys among its leaves; only its float
arrays have gradients. A box is a node of one array that JAX takes for that array, like
a Variable of flax.nnx. ``PerWorker`` is the gradient of all workers, where no type can
say so.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from gradcomp._src.checks import see
from gradcomp._src.mesh.axes import AROUND, AxisName, is_spec

_ARRAYS = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct


def is_array(x: Any) -> bool:
  """Returns True for an array, or the shape of one; Python's numbers are none."""
  return isinstance(x, _ARRAYS)


def is_trainable(x: Any) -> bool:
  """Returns True for an array of real or complex floats."""
  return is_array(x) and _is_inexact(x.dtype)


@functools.cache  # a train step asks for each leaf in every step
def _is_inexact(dtype: Any) -> bool:
  return bool(jnp.issubdtype(dtype, jnp.inexact))


def split(tree: Any, has: Callable[[Any], bool] = is_trainable) -> tuple[Any, Any]:
  """Returns the leaves that are trained, and all others, with None for the rest."""
  leaves, treedef = jax.tree.flatten(tree)
  mine = [x if has(x) else None for x in leaves]
  others = [x if y is None else None for x, y in zip(leaves, mine, strict=True)]
  return jax.tree.unflatten(treedef, mine), jax.tree.unflatten(treedef, others)


def trainable(tree: Any) -> Any:
  """Returns a tree with None in the place of leaves that are not trained."""
  return split(tree)[0]


def combine(mine: Any, others: Any) -> Any:
  """Joins the two trees of :func:`split`."""
  choose = lambda x, y: y if x is None else x
  return jax.tree.map(choose, mine, others, is_leaf=lambda x: x is None)


def is_box(node: Any) -> bool:
  """Returns True for a node of one child that is an array to JAX, for ``is_leaf``."""
  if not hasattr(node, "__jax_array__") or jax.tree_util.all_leaves([node]):
    return False
  return len(_children(node)) == 1


def _children(node: Any) -> list[Any]:
  return jax.tree.leaves(node, is_leaf=lambda x: x is not node and x is not None)


def unboxed(tree: Any) -> Any:
  """Returns a tree with the content of each box in its place: an array, or a spec."""
  content = lambda x: _children(x)[0] if is_box(x) else x
  is_leaf = lambda x: isinstance(x, PartitionSpec | PerWorker) or is_box(x)
  return jax.tree.map(content, tree, is_leaf=is_leaf)


def boxed_like(like: Any, tree: Any) -> Any:
  """Puts the arrays of a tree into the boxes of another."""
  if not any(map(is_box, jax.tree.leaves(like, is_leaf=is_box))):
    return tree
  box = lambda whole: jax.tree.structure(whole, is_leaf=lambda x: x is not whole)
  choose = lambda x, new: jax.tree.unflatten(box(x), [new]) if is_box(x) else new
  return jax.tree.map(choose, like, tree, is_leaf=lambda x: is_box(x) or is_marked(x))


# The registries that make a class a node of jax.jit only, private in JAX 0.10 to 0.12.
# Without them it becomes a node of jax.tree, too.
try:
  from jax._src.tree_util import dispatch_registry, tracing_registry

  IN_JIT: tuple[Any, ...] = (dispatch_registry, tracing_registry)
except ImportError:
  IN_JIT = ()

_CURE = (
  "of a gradcomp.PerWorker is not defined: it holds the gradients of all workers, "
  "which no exchange has averaged, and takes elementwise operations only. "
  "Clip after the exchange, or use gradcomp.wrappers.clip_by_local_norm, or ask "
  "gradcomp.global_norm(grads) for each worker's own norm. Put other transformations "
  "after the exchange, too, or run them by gradcomp.wrappers.on_each_worker. Let an "
  "exchange see each leaf that is trained: optax.partition and optax.masked may have "
  f"left this one out. {AROUND} All rows are `.rows`."
)


class UndefinedError(TypeError, AttributeError):
  """The error for operations on several elements; ``hasattr`` takes it for no."""

  def __init__(self, name: str):
    super().__init__(f"`{name}` {_CURE}{see('holds-the-gradients-of-all-workers')}")


class _Named(type):
  """Puts the cure into errors of others, which name the type that they refuse."""

  def __repr__(cls) -> str:
    return f"<class 'gradcomp.PerWorker'>, and `array` {_CURE}"


def _refused(name: str) -> Callable[..., Any]:
  def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise UndefinedError(name)

  return refuse


def _operators(function: Callable[..., Any]) -> tuple[Any, Any]:
  """Returns an operator of the rows and a number or an array, and its reflection."""

  def operate(self: Any, other: Any, swapped: bool = False) -> Any:
    if is_marked(other):
      fits = (other.axis_name, other.shape) == (self.axis_name, self.shape)
    else:
      fits = np.broadcast_shapes(jnp.shape(other), self.shape) == self.shape
    if not fits:
      raise UndefinedError(function.__name__)
    call = (lambda x, y: function(y, x)) if swapped else function
    if is_marked(other):
      return on_rows(call, self, other)
    return on_rows(lambda x: call(x, other), self)

  return operate, functools.partialmethod(operate, swapped=True)


def _node(kind: type) -> type:
  """Makes a class a node of ``jax.jit`` and its kin, and a leaf of ``jax.tree``."""
  flatten = lambda x: ((x.rows,), (x.axis_name, x.spec))
  unflatten = lambda static, rows: kind(*rows, *static)
  for registry in IN_JIT:
    registry.register_node(kind, flatten, unflatten)
  if not IN_JIT:
    jax.tree_util.register_pytree_node(kind, flatten, unflatten)
  return kind


@_node
@dataclasses.dataclass(frozen=True, eq=False)
class PerWorker(metaclass=_Named):
  """The gradient of all workers in plain ``jax.jit`` under Auto axes.

  :func:`gradcomp.value_and_grad` returns one for each array there. Every ``update`` of
  this library takes trees of them, and returns the mean as plain arrays, or such trees
  if it sends nothing. Row :math:`i` is worker :math:`i`'s gradient: ``[N, ...]``,
  sharded over the axis.

  It is a leaf of ``jax.tree`` with the shape of the parameter, and an argument and a
  result of ``jax.jit``. Sums, differences, products and quotients with numbers and
  arrays of the parameter's shape work on each worker's gradient, so ``optax.scale`` and
  weight decay work before the exchange. All else is an error, like norms, means and
  clipping: ask :func:`gradcomp.global_norm`, or put
  :func:`gradcomp.wrappers.on_each_worker` around such a transformation.

  Attributes:
    rows: the gradients, ``[N, ...]``; or, for ``update``, a tree of such arrays.
    axis_name: the axis of the workers, or a tuple of axes.
    spec: the parameter's spec over other axes of the mesh.

  Example:
    >>> grads = {"w": PerWorker(jnp.zeros((8, 3)), axis_name="data")}
    >>> jax.tree.map(jnp.shape, grads)["w"]
    (3,)
    >>> (0.5 * grads["w"] + 1).rows.shape
    (8, 3)
  """

  rows: Any
  axis_name: AxisName
  spec: PartitionSpec = PartitionSpec()

  shape = property(lambda self: self.rows.shape[1:])
  dtype = property(lambda self: self.rows.dtype)
  ndim = property(lambda self: len(self.shape))
  size = property(lambda self: math.prod(self.shape))

  __add__, __radd__ = _operators(operator.add)
  __sub__, __rsub__ = _operators(operator.sub)
  __mul__, __rmul__ = _operators(operator.mul)
  __truediv__, __rtruediv__ = _operators(operator.truediv)
  __pow__, __rpow__, __matmul__, __rmatmul__ = map(_refused, ("**", "**", "@", "@"))
  __lt__, __le__, __gt__, __ge__ = map(_refused, ("<", "<=", ">", ">="))
  __eq__, __ne__ = map(_refused, ("==", "!="))
  __abs__, __getitem__, __iter__, __bool__ = map(
    _refused, ("abs", "[]", "iter", "bool")
  )
  __hash__ = object.__hash__
  __array_ufunc__ = None  # operators of NumPy's arrays leave it alone

  def __str__(self) -> str:
    return f"{self!r}, and `array` {_CURE}"  # optax's errors end so

  def __neg__(self) -> "PerWorker":
    return self * -1

  def astype(self, dtype: Any) -> "PerWorker":
    """Returns the gradients in another dtype."""
    return dataclasses.replace(self, rows=self.rows.astype(dtype))

  def block_until_ready(self) -> "PerWorker":
    """Blocks until the rows are there, as ``jax.block_until_ready`` asks each leaf."""
    jax.block_until_ready(self.rows)
    return self

  def copy_to_host_async(self) -> None:
    """Starts the copy that ``jax.device_get`` asks each leaf for."""
    jax.copy_to_host_async(self.rows)

  def __array__(self, *given: Any, **options: Any) -> Any:
    # jax.device_get takes any result, and NumPy refuses what is no array.
    if given or options:
      raise UndefinedError("numpy.asarray")
    return dataclasses.replace(self, rows=jax.device_get(self.rows))

  def __array_function__(
    self, function: Any, types: Any, args: Any, kwargs: Any
  ) -> Any:
    if function is np.shape:  # which jnp.zeros_like asks for
      return self.shape
    raise UndefinedError(f"numpy.{function.__name__}")

  def __getattr__(self, name: str) -> Any:
    raise AttributeError(name) if name.startswith("__") else UndefinedError(name)


def is_marked(x: Any) -> bool:
  """Returns True for a :class:`PerWorker`, also as ``is_leaf``."""
  return isinstance(x, PerWorker)


def of_all(tree: Any) -> bool:
  """Returns True for a tree with a :class:`PerWorker` in it."""
  return any(map(is_marked, jax.tree.leaves(tree, is_leaf=is_marked)))


def on_rows(function: Callable[..., Any], x: Any, *others: Any) -> Any:
  """Applies a function of arrays to a leaf; of a :class:`PerWorker` to its rows."""
  if not is_marked(x):
    return function(x, *others)
  rows = jax.tree.map(function, x.rows, *(y.rows for y in others))
  return dataclasses.replace(x, rows=rows)


def with_rows(tree: Any) -> Any:
  """Returns a tree with the rows in the place of each :class:`PerWorker`."""
  rows = lambda x: x.rows if is_marked(x) else x
  return jax.tree.map(rows, tree, is_leaf=is_marked)


def marked(rows: Any, axis_name: AxisName, specs: Any) -> Any:
  """Marks each array of a tree; one spec may stand for a whole subtree."""
  mark = lambda spec, part: jax.tree.map(lambda x: PerWorker(x, axis_name, spec), part)
  return jax.tree.map(mark, specs, rows, is_leaf=is_spec)


def unmarked(tree: Any) -> tuple[Any, Any, AxisName]:
  """Returns rows, a tree of their specs, and the axis; ValueError for other leaves."""
  leaves, treedef = jax.tree.flatten(tree, is_leaf=is_marked)
  axes = {x.axis_name for x in leaves if is_marked(x)}
  if len(axes) != 1 or not all(map(is_marked, leaves)):
    raise ValueError(
      "`updates` must be gradients of all workers of one axis, as gradcomp."
      f"value_and_grad returns them, got {sum(map(is_marked, leaves))} of "
      f"{len(leaves)} that are a gradcomp.PerWorker, over {sorted(map(str, axes))}."
    )
  rows = jax.tree.unflatten(treedef, [x.rows for x in leaves])
  specs = [jax.tree.map(lambda _, x=x: x.spec, x.rows) for x in leaves]
  return rows, jax.tree.unflatten(treedef, specs), axes.pop()
