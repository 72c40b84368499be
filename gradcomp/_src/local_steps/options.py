"""Checks of the options of ``local_steps``, and of the arguments of its ``update``."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradcomp._src.checks import one_of, share_above_0, static_integer
from gradcomp._src.codecs import sums
from gradcomp._src.codecs.protocol import is_codec
from gradcomp._src.core.feedback import ErrorFeedback
from gradcomp._src.exchange.all_gather import AllGather, Merge
from gradcomp._src.exchange.auto import Auto, as_exchange
from gradcomp._src.exchange.protocol import Exchange


def up_to(name: str, least: int, most: int, value: Any) -> int:
  """Returns an integer in a range; ValueError otherwise."""
  rule = f"a number, from {least} to {most}, which depends on `every`"
  number = static_integer(name, rule, value, least=least)
  if number > most:
    raise ValueError(f"`{name}` must be {rule}, got {number}.")
  return number


def checked_optimizer(name: str, tx: Any) -> optax.GradientTransformationExtraArgs:
  """Returns an optimizer that takes extra arguments; TypeError for other objects."""
  if not all(callable(getattr(tx, part, None)) for part in ("init", "update")):
    raise TypeError(
      f"`{name}` must be an optax.GradientTransformation, like optax.sgd(0.1), got "
      f"{tx!r}."
    )
  return optax.with_extra_args_support(tx)


def kept_of(feedback: Any, decay: float, codec: Any) -> Any:
  """Returns the feedback for the unsent part of a displacement."""
  decay = share_above_0("feedback_decay", decay)
  if feedback == "error":
    # A codec that is unbiased without random numbers is exact.
    exact = getattr(codec, "unbiased", False) and not codec.needs_key
    return None if exact else ErrorFeedback(residual_decay=decay)
  if decay != 1:
    raise ValueError(
      f'`feedback_decay` must be 1 unless feedback is "error", got {decay}; pass '
      "feedback=gradcomp.ErrorFeedback(residual_decay=...) with options of its own."
    )
  return feedback


def exchange_of_rounds(exchange: Any, merge: Any, codec: Any) -> Any:
  """Returns the exchange of displacements, which divides by the rule of ``merge``."""
  one_of("merge", Merge, merge)
  given = as_exchange(exchange)
  if isinstance(given, Exchange) and not given.sends:
    raise ValueError(
      "`exchange` must send what workers change, for all to have the same parameters, "
      f'got {exchange!r}; use exchange="auto", or `inner` alone to train without one.'
    )
  if merge == "mean":
    return exchange
  if is_codec(codec) and not sums.facts(codec).drops:
    raise ValueError(
      f'`merge` must be "mean" for a codec of which each worker sends all elements, '
      f'got "senders" and {codec}; use a sparse one like gradcomp.codecs.TopK().'
    )
  if given not in (Auto(), AllGather(), AllGather(merge=merge)):
    raise ValueError(
      '`exchange` must be "auto" or "all_gather" with merge="senders", for nobody else '
      f"knows who sent what, got {exchange!r}."
    )
  return AllGather(merge=merge)


def check_floats(name: str, tree: Any) -> None:
  """Raises TypeError for leaves that are not real floats."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
      raise TypeError(
        f"`{name}`{jax.tree_util.keystr(path)} must have a real float dtype, got "
        f"{dtype or leaf!r}; freeze what is not trained by "
        "optax.partition and optax.set_to_zero, and keep complex numbers as pairs."
      )
