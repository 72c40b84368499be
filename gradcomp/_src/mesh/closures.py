"""Turns arrays that a function closes over into arguments of a map.

Under Explicit axes, JAX 0.10 to 0.12 does not let a function inside ``jax.shard_map``
read an array of the mesh that is no argument of the map. Such functions are common: a
loss that reads batch statistics, a frozen base, or a moving average.
"""

import copy
import functools
import re
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType

# The second, where other axes of the mesh stay Explicit in the map.
_JAX_SAYS = ("Closing over inputs to shard_map", "should match the aval mesh")
_JITTED: Any = type(jax.jit(lambda: None))

Bind = Callable[[Sequence[Any]], Any]

OF_LOSS = (
  "`loss_fn`",
  "make it an argument: loss_fn(params, batch, array), and call the result of "
  "gradcomp.value_and_grad with (params, batch, array), or that of "
  "gradcomp.make_train_step with (params, opt_state, batch, array)",
)
OF_OPTIMIZER = (
  "`optimizer`",
  "make it of numbers, of NumPy's arrays, or by optax.inject_hyperparams, which keeps "
  "numbers in the state; or take the step by gradcomp.make_train_step",
)


def with_arrays(
  functions: Any,
  enter: Callable[[Bind, list[Any]], Any],
  about: tuple[str, str] = OF_LOSS,
) -> Any:
  """Enters a map with all arrays that functions close over, if JAX asks for them.

  ``enter(bind, arrays)`` enters the map with ``arrays`` as further arguments. Inside,
  ``bind(parts)`` returns the functions with their arrays replaced by ``parts``. It is
  called with no arrays first, and a second time if the functions then read one of the
  mesh. ValueError if they read one from a place that is not searched; ``about`` is the
  argument of the functions, and another cure, for the error.
  """
  try:
    return enter(lambda parts: functions, [])
  except (NotImplementedError, ValueError) as error:
    if not _is_of_closures(error):
      raise
  found: dict[int, jax.Array] = {}
  _Copier(lambda x: found.setdefault(id(x), x)).copy(functions)

  def bind(parts: Sequence[Any]) -> Any:
    part_of = dict(zip(found, parts, strict=True))
    return _Copier(lambda x: part_of[id(x)]).copy(functions)

  try:
    return enter(bind, list(found.values()))
  except (NotImplementedError, ValueError) as error:
    if not _is_of_closures(error):
      raise
    shape = "".join(re.findall(r"shape (\w+\[.*?\])", str(error)))
    name, cure = about
    raise ValueError(
      f"{name} must not close over arrays of the mesh in this way, got {shape}, "
      "which is neither in a closure nor in a global variable that gradcomp searches; "
      f"{cure}."
    ) from error


def _is_of_closures(error: Exception) -> bool:
  """Returns True for JAX's errors about an array that is no argument of a map."""
  return any(words in str(error) for words in _JAX_SAYS)


class _Copier:
  """Copies functions and their contents, with the arrays of a mesh replaced.

  It looks into trees, closures, defaults, partial applications, methods' owners, and
  into global variables and objects of the user's own modules. An object without such
  arrays is not copied.
  """

  def __init__(self, replace: Callable[[jax.Array], Any]):
    self._replace = replace
    self._seen: dict[int, tuple[Any, Any]] = {}  # the original, so that its id is kept

  def copy(self, x: Any) -> Any:
    if id(x) not in self._seen:
      self._seen[id(x)] = x, x  # for an object that holds itself
      self._seen[id(x)] = x, self._copied(x)
    return self._seen[id(x)][1]

  def _copied(self, x: Any) -> Any:
    if isinstance(x, jax.Array):
      # A deleted one may be in an object of which the function reads something else.
      gone = not isinstance(x, jax.core.Tracer) and x.is_deleted()
      kinds = jax.typeof(x).sharding.mesh.axis_types
      return x if gone or AxisType.Explicit not in kinds else self._replace(x)
    if isinstance(x, types.FunctionType):
      return self._function(x)
    if isinstance(x, types.MethodType):
      make_method = lambda y: types.MethodType(*y)
      return self._rebuilt(x, [x.__func__, x.__self__], make_method)
    if isinstance(x, functools.partial):
      kind: Any = type(x)
      held = [x.func, *x.args, *x.keywords.values()]

      def apply(held: list[Any]) -> Any:
        count = 1 + len(x.args)
        keywords = dict(zip(x.keywords, held[count:], strict=True))
        return kind(*held[:count], **keywords)

      return self._rebuilt(x, held, apply)
    if type(x) is dict:  # whose keys need not be in an order, as in a tree
      make = lambda y: dict(zip(x, y, strict=True))
      return self._rebuilt(x, list(x.values()), make)
    if isinstance(x, type | types.ModuleType):
      return x
    leaves, treedef = jax.tree.flatten(x, is_leaf=lambda y: y is not x)
    if len(leaves) == 1 and leaves[0] is x:
      return self._object(x)
    return self._rebuilt(x, leaves, functools.partial(jax.tree.unflatten, treedef))

  def _rebuilt(self, x: Any, held: list[Any], make: Callable[[list[Any]], Any]) -> Any:
    """Returns a copy of ``x``, or ``x`` if none of its contents is replaced."""
    copies = [self.copy(y) for y in held]
    same = all(a is b for a, b in zip(copies, held, strict=True))
    return x if same else make(copies)

  def _function(self, x: types.FunctionType) -> Any:
    cells = [cell for cell in x.__closure__ or () if not _is_empty(cell)]
    read = set() if _is_installed(x.__module__ or "") else _names(x.__code__)
    names = sorted(read.intersection(x.__globals__))
    held = [x.__defaults__, x.__kwdefaults__, *(cell.cell_contents for cell in cells)]

    def make(held: list[Any]) -> Any:
      defaults, keywords, *rest = held
      contents = dict(zip(map(id, cells), rest, strict=False))
      variables = dict(zip(names, rest[len(cells) :], strict=True))
      closure = tuple(
        types.CellType(contents[id(cell)]) if id(cell) in contents else cell
        for cell in x.__closure__ or ()
      )
      function = types.FunctionType(
        x.__code__, x.__globals__ | variables, x.__name__, defaults, closure
      )
      function.__kwdefaults__ = keywords
      return function

    return self._rebuilt(x, held + [x.__globals__[name] for name in names], make)

  def _object(self, x: Any) -> Any:
    if isinstance(x, _JITTED):  # the copy need not be: the map's caller compiles it
      return self._rebuilt(x, [x.__wrapped__], lambda y: y[0])
    attributes = getattr(x, "__dict__", None)
    if not isinstance(attributes, dict) or _is_installed(type(x).__module__):
      return x

    def make(held: list[Any]) -> Any:
      result = copy.copy(x)
      result.__dict__.update(zip(attributes, held, strict=True))
      return result

    return self._rebuilt(x, list(attributes.values()), make)


def _is_empty(cell: Any) -> bool:
  """Returns True for a variable that its function has not set yet."""
  try:
    cell.cell_contents  # noqa: B018
  except ValueError:
    return True
  return False


def _names(code: types.CodeType) -> set[str]:
  """Returns the names that a function, and its inner functions, may read as globals."""
  inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
  return set(code.co_names).union(*map(_names, inner))


def _is_installed(module: str) -> bool:
  """Returns True for modules of Python, of this package, and of installed packages."""
  root = module.partition(".")[0]
  if root in sys.stdlib_module_names or root == __name__.partition(".")[0]:
    return True
  if root == "__main__":  # the user's, also where a launcher's file runs
    return False
  file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
  return "site-packages" in file or "dist-packages" in file
