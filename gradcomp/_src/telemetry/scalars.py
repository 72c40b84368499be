"""``scalars``: metrics as the flat dictionary of floats that any logger takes."""

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey, keystr, tree_flatten_with_path

from gradcomp._src.telemetry.inspect import Inspection
from gradcomp._src.telemetry.replicas import Replicas

# A key in the path of a gradient's leaf, by which an inspection names it.
_KEY = re.compile(r"\['(.*?)'\]|\[(.*?)\]|\.(\w+)")
# Neither TensorBoard nor MLflow takes other characters in a name.
_REFUSED = re.compile(r"[^-/.\w]+")


def scalars(metrics: Any) -> dict[str, float]:
  """Returns metrics as a flat dictionary of floats on the host, for any logger.

  A name is the path of a leaf in the tree, joined by ``/``, with the paths of an
  :class:`Inspection` in it: ``leaves["['layer']['w']"].cosine`` is
  ``leaves/layer/w/cosine``. Characters that TensorBoard or MLflow refuse become ``_``.
  One ``jax.device_get`` waits for the step. It warns if by the :class:`Inspection` all
  workers have the same gradient. One process may call it alone, for replicated values.

  Args:
    metrics: a tree of real numbers, like those of a train step. :class:`Replicas` are
      one number, ``equal``: 1.0 if all workers agree, or else 0.0.

  Raises:
    ValueError: a leaf has axes, or two leaves have one name.
    TypeError: a leaf is no real number.

  Example:
    >>> optimizer = gradcomp.qsgd(bits=4)
    >>> grads = {"layer": {"w": jnp.linspace(-1.0, 1.0, 4096)}}
    >>> state = optimizer.init(grads)
    >>> *_, found = gradcomp.telemetry.inspect_update(optimizer, grads, state)
    >>> record = scalars({"loss": jnp.float32(0.5), "inspection": found})
    >>> record["loss"], record["inspection/leaves/layer/w/cosine"] > 0.99
    (0.5, True)
  """
  is_replicas = lambda x: isinstance(x, Replicas)
  leaves, treedef = tree_flatten_with_path(metrics, is_leaf=is_replicas)
  for path, x in (y for y in leaves if not is_replicas(y[1])):
    leaf = f"`metrics`{keystr(path)}"
    if np.ndim(x):
      raise ValueError(
        f"{leaf} must be one number, got the shape {np.shape(x)}; take its mean, or "
        "one worker's numbers by jax.tree.map(lambda x: x[0], metrics)."
      )
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    if not any(jnp.issubdtype(dtype, k) for k in (np.bool, np.integer, np.floating)):
      raise TypeError(f"{leaf} must be a real number, got {x!r}; leave it out.")
  result: dict[str, float] = {}
  values = jax.device_get([x for _, x in leaves])
  is_inspection = lambda x: isinstance(x, Inspection)
  for x in jax.tree.leaves(jax.tree.unflatten(treedef, values), is_leaf=is_inspection):
    if is_inspection(x) and x.warning:
      warnings.warn(x.warning, stacklevel=2)
  for (path, _), x in zip(leaves, values, strict=True):
    if is_replicas(x):
      path, x = (*path, GetAttrKey("equal")), not x.differing()
    parts = [keystr((key,), simple=True) for key in path]
    plain = [_KEY.sub(r"/\1\2\3", y).strip("/") if y[:1] in "[." else y for y in parts]
    name = _REFUSED.sub("_", "/".join(plain))
    if name in result:
      raise ValueError(
        f"`metrics`{keystr(path)} must have a name of its own, got {name!r}, which "
        "another leaf has, too; rename a key."
      )
    result[name] = float(x)
  return result
