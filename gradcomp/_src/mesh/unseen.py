"""Maps over workers that a trace must not see, and the way back into them.

A user's function is traced as if it were in no map, so that its constraints may name
the axes of the workers: see ``training/constraints.py``. An exchange in it needs them.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.sharding import AxisType

from gradcomp._src.mesh.trees import is_array

# ``with UNSEEN(axes):`` around the trace of such a function, whose map binds the axes.
UNSEEN: Any = jax.make_user_context(frozenset())

# From one to the other mesh, which only types know. constraints.py removes it.
CROSS = Primitive("gradcomp_cross")
CROSS.def_abstract_eval(
  lambda x: jax.core.ShapedArray(x.shape, x.dtype, weak_type=x.weak_type)
)


def in_map(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
  """Calls a function that sees the map over the axes, on arrays of its mesh."""
  manual = dict.fromkeys(UNSEEN.value, AxisType.Manual)
  mesh = jax.sharding.get_abstract_mesh().update_axis_types(manual)
  cross = lambda tree: jax.tree.map(lambda x: CROSS.bind(x) if is_array(x) else x, tree)
  with UNSEEN(frozenset()), jax.sharding.use_abstract_mesh(mesh):
    args, kwargs = cross((args, kwargs))
    found = function(*args, **kwargs)
  return cross(found)
