"""The state of a transformation, and the keys of a step that derive from it."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from gradcomp import sums
from gradcomp.exchange import Message, OwnerResiduals, Selected, Selections
from gradcomp.kernels import key_words
from gradcomp.workers import AxisName


class CompressState(NamedTuple):
  """The state of :func:`compress`, in plain arrays that any checkpointer saves.

  ``memory`` and ``selection`` are for codecs that remember: the first holds fitted
  levels, the second thresholds and counts of what was sent. Fields but ``step`` and
  ``key`` are None if nobody needs them. What is kept of complex parameters has a last
  axis of two more, for pairs of reals.

  Example:
    >>> state = gradcomp.onebit_sgd(min_leaf_size=0).init({"w": jnp.ones(2048)})
    >>> int(state.step), state.residual["w"].shape, state.momentum
    (0, (2048,), None)
  """

  step: jax.Array  # int32[], replicated
  key: jax.Array  # uint32[2], replicated
  residual: Any  # float32, like the parameters but at least 1-d, per worker; or None
  owner_residual: OwnerResiduals | None  # float32, rows that a worker owns; or None
  memory: jax.Array | None  # a fitted codec's memory, replicated; or None
  momentum: Any = None  # float32, like the residual; or None
  selection: Selections | None = None  # a selecting codec's, per worker; or None


def check_state(state: Any, needs: Mapping[str, Any], reason: str) -> None:
  """Raises an error for the state of another transformation.

  Args:
    state: what ``update`` was given.
    needs: by the names of fields, whether they must be kept, or the shape and dtype of
      the array that they must be.
    reason: the hyperparameters that need them.

  Raises:
    TypeError: it is no :class:`CompressState`.
    ValueError: a field is missing, or has another shape.
  """
  cure = "make the state with this transformation"
  if not isinstance(state, CompressState):
    raise TypeError(
      f"`state` must be a gradcomp.CompressState, got {type(state).__name__}; {cure}, "
      "and take the one of its place from the state of an optax.chain."
    )
  for name, needed in needs.items():
    value = getattr(state, name)
    if needed and value is None:
      raise ValueError(f"`state.{name}` must be kept with {reason}; {cure}.")
    if isinstance(needed, jax.ShapeDtypeStruct) and value.shape != needed.shape:
      raise ValueError(
        f"`state.{name}` must have the shape {needed.shape} with {reason}, got "
        f"{value.shape}; {cure}."
      )


def selected_shapes(rows: int) -> Any:
  """Returns the shapes of the selection state: a threshold and a count for each row."""
  dtypes = Selected(threshold=jnp.float32, used=jnp.int32)
  return jax.tree.map(lambda dtype: jax.ShapeDtypeStruct((rows,), dtype), dtypes)


def seed_words(key: ArrayLike) -> jax.Array:
  """Returns the ``uint32[2]`` of a seed or of a threefry key.

  It is a copy, which may be donated.
  """
  if not isinstance(key, int | jax.Array):
    key = jnp.asarray(key)
  if isinstance(key, int) or (
    key.shape == () and jnp.issubdtype(key.dtype, jnp.integer)
  ):
    key = jax.random.key(key, impl="threefry2x32")
  return jnp.array(key_words(key))


def step_keys(
  state: CompressState,
  messages: Sequence[Message],
  names: Sequence[str],
  axis_name: AxisName | None,
) -> jax.Array | None:
  """Returns the keys of a step, or None if no codec needs one.

  They are ``uint32[leaves + codecs, 2]``: one key for each leaf, and then one for the
  later stages of each codec. A key derives from the names of the leaves that it is for,
  and from no others. So two transformations of different leaves, as in
  ``optax.partition``, draw different bits, and a new leaf changes no bits of others.

  Args:
    state: has the seed and the step.
    messages: the plan, which holds every leaf once.
    names: the path of each leaf in the tree.
    axis_name: the axes of the workers, each of whom has keys of its own; or None.
  """
  layouts = [message.layout for message in messages]
  if not any(codec.needs_key for layout in layouts for codec in layout.codecs):
    return None
  fold = jax.random.fold_in
  step_key = fold(jax.random.wrap_key_data(state.key, impl="threefry2x32"), state.step)
  texts = [*names, *(text for message in messages for text in _stages(message, names))]
  words = jnp.array([_words(text) for text in texts], jnp.uint32)
  alike = any(sums.of(codec).alike for layout in layouts for codec in layout.codecs)
  # Workers that must choose the same elements have the same keys.
  worker = 0 if axis_name is None or alike else lax.axis_index(axis_name)

  def key(own: jax.Array) -> jax.Array:
    return fold(fold(fold(step_key, own[0]), own[1]), worker)

  return jax.random.key_data(jax.vmap(key)(words))


def _stages(message: Message, names: Sequence[str]) -> list[str]:
  """Returns a text for each codec of a message: the lines are its leaves' names."""
  texts = [""] * len(message.layout.codecs)
  for number, slot in zip(message.leaves, message.layout.slots, strict=True):
    texts[slot.group] += f"{names[number]}\n"
  return texts


def _words(text: str) -> np.ndarray:
  """Returns the first two words of a text's SHA-256, big-endian."""
  return np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], ">u4")
