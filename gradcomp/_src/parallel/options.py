"""Options of the collectives of models, their checks, and derivatives."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Required, TypedDict, TypeVar

import jax
import jax.numpy as jnp

from gradcomp._src import checks, public
from gradcomp._src.codecs import dense, policy, protocol
from gradcomp._src.core import inputs
from gradcomp._src.floats.dtypes import fitted
from gradcomp._src.kernels.common import threefry
from gradcomp._src.mesh import axes, types

Own = Literal["exact", "coded"]
Backward = protocol.LeafCodec | Literal["same"] | None
Key = jax.Array | None
Function = TypeVar("Function", bound=Callable[..., Any])
Send = Callable[[jax.Array, "Wire", Key], jax.Array]


class SumOptions(TypedDict, total=False):
  """The options of sums: each part is rounded that a worker sends, in one direction."""

  axis_name: Required[axes.AxisName]
  codec: Required[protocol.LeafCodec]
  key: Key


class PairOptions(SumOptions, total=False):
  """The options of collectives in which all that workers have travels."""

  backward: Backward


class CollectiveOptions(PairOptions, total=False):
  """The options of collectives of a model's layers, by keyword.

  Attributes:
    axis_name: the axis of the enclosing map, or a tuple of axes. Required.
    codec: the codec of the values. Required.
    backward: the codec of the cotangents; ``"same"`` for that of the values, None for
      ``float32``. Default: ``"same"``.
    own: ``"exact"`` leaves a worker's own part unrounded, so that results differ
      between workers, and so do later gradients of replicated weights. ``"coded"``
      rounds it, too: all have the same bits. Default: ``"exact"``.
    key: a key that all workers share, another one for each call, if a codec draws
      random numbers. The backward pass folds in 1. Default: None.

  Raises:
    ValueError: the axis is not bound; the codec is sparse, or needs a memory or error
      feedback; a codec lacks a key; or another argument is not as above.
    TypeError: ``x`` has no float dtype, ``codec`` is no codec, or there is no such
      option.
  """

  own: Own


@dataclasses.dataclass(frozen=True)
class Wire:
  """The axes and codecs of a collective."""

  axis_name: axes.AxisName
  codec: protocol.Codec  # of values, in the forward pass
  backward: protocol.Codec  # of their cotangents
  own: Own  # "coded": a worker also encodes its own part, which is not sent
  size: int

  @property
  def reversed(self) -> "Wire":
    """The wire of the backward pass."""
    return dataclasses.replace(self, codec=self.backward, backward=self.codec)


def wire(
  *,
  axis_name: axes.AxisName,
  codec: protocol.LeafCodec,
  backward: Backward = "same",
  own: Own = "exact",
  key: Key = None,
) -> tuple[Wire, Key]:
  """Validates the options of a call; returns the words of the key, ``uint32[2]``."""
  size = axes.require_size(axis_name)
  checks.one_of("own", Own, own)
  forward = back = policy.stateless("codec", codec)
  if not (isinstance(backward, str) and backward == "same"):
    back = codec_of("backward", backward)
  return Wire(axis_name, forward, back, own, size), checked_key(key, forward, back)


def shard_wires(
  axis_name: axes.AxisName, params: Any, grads: Any, residual: Any
) -> tuple[Wire, Wire]:
  """Returns the wires of a weight that is gathered, and of its gradient."""
  size = axes.require_size(axis_name)
  forward = codec_of("params", params)
  back = codec_of("grads", grads, corrected=residual is not None)
  of_weight = Wire(axis_name, forward, back, "coded", size)
  return of_weight, dataclasses.replace(of_weight.reversed, own="exact")


def codec_of(name: str, codec: Any, *, corrected: bool | None = None) -> protocol.Codec:
  """Returns a codec that carries nothing from call to call; ``float32`` for None."""
  if codec is None:
    return dense.Dense()
  return policy.stateless(name, codec, corrected=corrected)


def collective(function: Function) -> Function:
  """Shows :class:`CollectiveOptions` in the help of a function of some of them."""
  return public.shows_options(function, wire, CollectiveOptions.__doc__ or "")


def opened(
  function: Callable[..., Any], x: Any, given: Any, **own: Any
) -> tuple[jax.Array, Wire, Key]:
  """Returns a function's array, typed as varying over the workers, and its options."""
  of_call, key = wire(**public.checked(function, given), **own)
  return types.mark_varying(checked_floats(x), of_call.axis_name), of_call, key


def checked_key(key: Key, *codecs: Any, each: str = "call") -> Key:
  """Returns ``uint32[2]``, or None if no codec needs one; ValueError if missing."""
  for codec in codecs:
    if codec.needs_key and key is not None:
      return threefry.key_words(key)
    if codec.needs_key:
      raise ValueError(
        f"`key` must be given for {codec}, which draws random numbers: pass a "
        "jax.random.key that all workers share, another one for each "
        f"{each}{getattr(codec, 'without_key', '')}."
      )
  return None


def folded(key: Key, number: jax.Array | int) -> Key:
  """Returns the key of a later stage; None without a key."""
  return None if key is None else threefry.fold_key(key, number)


def checked_floats(x: Any, name: str = "x", *, real: bool = False) -> jax.Array:
  """Returns an array of floats; TypeError for other numbers."""
  x = jnp.asarray(x)
  if not jnp.issubdtype(x.dtype, jnp.floating if real else jnp.inexact):
    kind = "real float" if real else "float or complex"
    raise TypeError(f"`{name}` must have a {kind} dtype, got {x.dtype}.")
  return x


def checked_axis(name: str, axis: Any, ndim: int) -> int:
  """Returns the number of an array axis, 0 or more; ValueError otherwise."""
  rule = f"an axis of an array with {ndim} axes"
  return checks.static_integer(name, rule, axis, least=-ndim, most=ndim - 1) % ndim


# The bits of a message have no derivative: JAX would take zeros for it in silence.
@inputs.raises_under_derivatives(
  "A collective of gradcomp.parallel must be differentiated once, got a derivative of "
  "its derivative, which encoded arrays do not have; use jax.lax's collectives there."
)
def differentiated_once(tree: Any) -> Any:
  """Returns the argument of a rule; raises TypeError if JAX differentiates it."""
  return tree


def transposed(
  forward: Callable[..., tuple[jax.Array, Any]],
  backward: Callable[[Any, jax.Array], tuple[Any, ...]],
  *given: Any,
) -> jax.Array:
  """Returns ``forward(*given)[0]``; ``backward(saved, cotangent)`` is its gradient."""
  # `saved` is what else forward returns. Both functions must close over no array.
  function = jax.custom_vjp(lambda *given: forward(*given)[0])
  function.defvjp(
    lambda *given: forward(*differentiated_once(given)),
    lambda saved, cotangent: backward(saved, differentiated_once(cotangent)),
  )
  return function(*given)


def paired(send: Send, back: Send, x: jax.Array, wire: Wire, key: Key) -> jax.Array:
  """Returns ``send(x, wire, key)`` in x's dtype; ``back`` is its gradient."""

  def forward(x: jax.Array, key: Key) -> tuple[jax.Array, Key]:
    return fitted(send(x, wire, key), x.dtype), key

  def pull(key: Key, cotangent: jax.Array) -> tuple[jax.Array, None]:
    return fitted(back(cotangent, wire.reversed, folded(key, 1)), cotangent.dtype), None

  return inputs.like_complex(transposed(forward, pull, inputs.pairs(x), key), x)
