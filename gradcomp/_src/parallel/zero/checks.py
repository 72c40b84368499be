"""Checks of the codecs of :func:`gradcomp.parallel.zero`."""

from typing import Any

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.protocol import LeafCodec, is_codec
from gradcomp._src.codecs.sums.records import Leaf

# Large enough that every codec saves bytes on it.
_PROBE = Leaf((1024, 1024))


def check_codecs(grads: Any, params: Any) -> None:
  """Raises TypeError or ValueError for codecs that zero cannot use."""
  for name, given in {"grads": grads, "params": params}.items():
    if not is_codec(given):
      raise TypeError(f"`{name}` must be an instance of a codec, got {given!r}.")
    if given.facts.drops:
      raise ValueError(
        f"`{name}` must send all elements, got the sparse codec {given}; use a "
        "quantizer like gradcomp.codecs.QSGD(bits=4)."
      )
    check_of_leaf(name, given, _PROBE)
  refusal = grads.facts.naming(grads).refusals.get("owned")
  if refusal:
    raise ValueError(
      f"`grads` must be a codec that owners of rows can add, not {refusal}"
    )
  check_alone(params, _PROBE)


def check_of_leaf(name: str, codec: LeafCodec, leaf: Leaf) -> None:
  """Raises ValueError for a codec that sends other arrays in a leaf's place."""
  if not all(part.of_leaf for part in codec.bind(leaf).rounds(leaf.shape)):
    raise ValueError(
      f"`{name}` must encode the elements of a leaf, of which each worker owns some, "
      f"got {codec}, which sends other arrays in the place of a leaf of the shape "
      f"{leaf.shape}; use a quantizer like gradcomp.codecs.QSGD(bits=4)."
    )


def check_alone(codec: LeafCodec, leaf: Leaf) -> None:
  """Raises ValueError for a parameter codec that needs a key or agreed statistics."""
  last = codec.bind(leaf).rounds(leaf.shape)[-1].codec.to_nearest()
  if last.needs_key:
    raise ValueError(
      f"`params` must be a codec that rounds to nearest, for owners keep what it "
      f"loses, got {codec}, which always draws; use 2 bits or more."
    )
  like = jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
  if jax.eval_shape(last.agree, like) is not None:
    raise ValueError(
      f"`params` must be a codec whose rows can be decoded alone, got {codec}, whose "
      "workers agree on a scale; give it scales of its own (share_scale=False)."
    )
