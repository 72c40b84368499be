"""The validated options of a differentiable collective."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.checks import one_of, static_integer
from gradcomp._src.codecs.dense import Dense
from gradcomp._src.codecs.policy import stateless
from gradcomp._src.codecs.protocol import Codec, LeafCodec
from gradcomp._src.core.inputs import raises_under_derivatives
from gradcomp._src.kernels.common.threefry import fold_key, key_words
from gradcomp._src.mesh.axes import AxisName, require_size
from gradcomp._src.mesh.types import mark_varying

Own = Literal["exact", "coded"]
Backward = LeafCodec | Literal["same"] | None
Key = jax.Array | None
Send = Callable[[jax.Array, "Wire", Key], jax.Array]


@dataclasses.dataclass(frozen=True)
class Wire:
  """The axes and codecs of a collective."""

  axis_name: AxisName
  codec: Codec  # of values, in the forward pass
  backward: Codec  # of their cotangents
  own: Own  # "coded": a worker also encodes its own part, which is not sent
  size: int

  @property
  def reversed(self) -> "Wire":
    """The wire of the backward pass."""
    return dataclasses.replace(self, codec=self.backward, backward=self.codec)


def wire(
  axis_name: AxisName, codec: LeafCodec, backward: Backward = "same", own: Own = "exact"
) -> Wire:
  """Validates the options of a call."""
  size = require_size(axis_name)
  one_of("own", Own, own)
  forward = stateless("codec", codec)
  if isinstance(backward, str) and backward == "same":
    return Wire(axis_name, forward, forward, own, size)
  other = Dense() if backward is None else stateless("backward", backward)
  return Wire(axis_name, forward, other, own, size)


def checked_key(key: Key, *codecs: Codec) -> Key:
  """Returns ``uint32[2]``, or None if no codec needs one; ValueError if missing."""
  for codec in codecs:
    if codec.needs_key and key is None:
      raise ValueError(
        f"`key` must be given for {codec}, which draws random numbers: pass a "
        f"jax.random.key that all workers share, another one for each "
        f"call{codec.without_key}."
      )
  if not any(codec.needs_key for codec in codecs):
    return None
  return None if key is None else key_words(key)


def inputs(x: Any, wire: Wire, key: Key) -> tuple[jax.Array, Key]:
  """Returns an array of floats, typed as varying over the workers, and its key."""
  key = checked_key(key, wire.codec, wire.backward)
  return mark_varying(checked_floats(x), wire.axis_name), key


# The bits of a message have no derivative: JAX would take zeros for it in silence.
@raises_under_derivatives(
  "A collective of gradcomp.parallel must be differentiated once, got a derivative of "
  "its derivative, which encoded arrays do not have; use those of jax.lax there."
)
def differentiated_once(tree: Any) -> Any:
  """Returns the argument of a rule; raises TypeError if JAX differentiates it."""
  return tree


def transposed(
  forward: Callable[..., jax.Array],
  backward: Callable[..., tuple[Any, ...]],
  x: jax.Array,
  *saved: Any,
) -> jax.Array:
  """Returns ``forward(x, *saved)``, with another gradient than JAX would take.

  ``backward(cotangent, *saved)`` returns the cotangents of ``x`` and of ``saved``. The
  two functions must close over no array.
  """
  function = jax.custom_vjp(forward)
  function.defvjp(
    lambda x, *saved: (forward(differentiated_once(x), *saved), saved),
    lambda saved, cotangent: backward(differentiated_once(cotangent), *saved),
  )
  return function(x, *saved)


def paired(send: Send, back: Send, wire: Wire, x: jax.Array, key: Key) -> jax.Array:
  """Returns ``send(x, wire, key)``; each of it and ``back`` is the other's gradient."""

  def pull(cotangent: jax.Array, key: Key) -> tuple[jax.Array, None]:
    return paired(back, send, wire.reversed, cotangent, folded(key, 1)), None

  run = lambda x, key: send(x, wire, key)
  return over_real_parts(lambda x: transposed(run, pull, x, key), x)


def folded(key: Key, number: jax.Array | int) -> Key:
  """Returns the key of a later stage; None without a key."""
  return None if key is None else fold_key(key, number)


def checked_floats(x: Any) -> jax.Array:
  """Returns an array of floats; TypeError for other numbers."""
  x = jnp.asarray(x)
  if not jnp.issubdtype(x.dtype, jnp.inexact):
    raise TypeError(f"`x` must have a float or complex dtype, got {x.dtype}.")
  return x


def over_real_parts(
  function: Callable[[jax.Array], jax.Array], x: jax.Array
) -> jax.Array:
  """Applies a function of real arrays to complex ones as pairs on a last axis."""
  if not jnp.iscomplexobj(x):
    return function(x)
  result = function(jnp.stack([x.real, x.imag], axis=-1))
  return lax.complex(result[..., 0], result[..., 1])


def checked_axis(name: str, axis: Any, ndim: int) -> int:
  """Returns the number of an array axis, 0 or more; ValueError otherwise."""
  rule = f"an axis of an array with {ndim} axes"
  number = static_integer(name, rule, axis)
  if not -ndim <= number < ndim:
    raise ValueError(f"`{name}` must be {rule}, got {number}.")
  return number % ndim


def check_divides(name: str, shape: tuple[int, ...], axis: int, workers: int) -> None:
  """Raises ValueError unless the workers get equal parts of an axis."""
  if shape[axis] % workers:
    raise ValueError(
      f"`{name}` must be one whose length the {workers} workers divide, got {axis} of "
      f"the shape {shape}; pad it with zeros."
    )
