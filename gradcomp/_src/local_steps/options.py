"""Checks of the options of local steps, and their papers."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradcomp._src import bibliography, checks
from gradcomp._src.bibliography import Citation
from gradcomp._src.codecs.protocol import is_codec
from gradcomp._src.core.feedback import ErrorFeedback
from gradcomp._src.exchange.auto import Auto, as_exchange
from gradcomp._src.exchange.one_stage import AllGather
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.mesh.closures import optimizer_with_note


def papers_of(fragments: int, delay: int, start: int) -> list[Citation]:
  """Returns the papers of local steps with these options."""
  why = "Differences may be compressed, with feedback."
  papers = [Citation(bibliography.DOUILLARD_2023, why)]
  if fragments > 1 or delay:
    why = "Fragments are consecutive leaves, of about as many elements each."
    papers.append(Citation(bibliography.DOUILLARD_2025, why))
  if start:
    why = "Parameters are averaged in the first steps, and not gradients."
    papers.append(Citation(bibliography.LIN_2018_LOCAL, why))
  return papers


def up_to(name: str, least: int, most: int, value: Any) -> int:
  """Returns an integer in a range; ValueError otherwise."""
  rule = f"a number, from {least} to {most}, which depends on `every`"
  return checks.static_integer(name, rule, value, least=least, most=most)


def checked_optimizer(name: str, tx: Any) -> optax.GradientTransformationExtraArgs:
  """Returns an optimizer that takes extra arguments; TypeError for other objects."""
  if not all(callable(getattr(tx, part, None)) for part in ("init", "update")):
    raise TypeError(
      f"`{name}` must be an optax.GradientTransformation, like optax.sgd(0.1), got "
      f"{tx!r}."
    )
  return optimizer_with_note(tx)


def feedback_of(feedback: Any, codec: Any) -> Any:
  """Returns the feedback of displacements; None for an exact codec."""
  if feedback != "error":
    return feedback
  # A codec that is unbiased without random numbers is exact.
  exact = is_codec(codec) and codec.unbiased and not codec.needs_key
  return None if exact else ErrorFeedback()


def exchange_of_rounds(exchange: Any, merge: Any, codec: Any) -> Any:
  """Returns the exchange of displacements, which divides by the rule of ``merge``."""
  given = as_exchange(exchange)
  if isinstance(given, Exchange) and not given.sends:
    raise ValueError(
      "`exchange` must send what workers change, for all to have the same parameters, "
      f'got {exchange!r}; use exchange="auto", or `inner` alone to train without one.'
    )
  if merge == "mean":
    return exchange
  if is_codec(codec) and not codec.facts.drops:
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
