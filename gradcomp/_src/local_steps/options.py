"""The options of local steps, and their checks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from gradcomp._src import checks
from gradcomp._src.bibliography import (
  DOUILLARD_2023,
  DOUILLARD_2025,
  LIN_2018_LOCAL,
  Citation,
)
from gradcomp._src.checks import static_integer
from gradcomp._src.codecs.protocol import is_codec
from gradcomp._src.core.compression import Dither
from gradcomp._src.core.feedback import ErrorFeedback, Feedback, FeedbackName
from gradcomp._src.exchange.auto import Auto, ExchangeName, as_exchange
from gradcomp._src.exchange.message_size import MessageBytes
from gradcomp._src.exchange.one_stage import AllGather, Merge
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.mesh.closures import optimizer_with_note


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalOptions(checks.Checked):
  r"""The options of :func:`gradcomp.local.local_steps` that are seldom set.

  Attributes:
    exchange, min_leaf_size, message_bytes, key, dither: the options of the exchange,
      see :class:`gradcomp.CompressOptions`. It must send something.
    feedback: as there. ``"error"`` keeps no residual for a codec that is exact.
      ``gradcomp.ErrorFeedback(residual_decay=0.95)`` is :math:`\beta = 0.95`.
    fragments: P, the number of parts of about equal size, each of consecutive leaves,
      that are exchanged in different steps; from 1 to ``every``.
    delay: :math:`\tau`, the steps after which an exchange is applied, below ``every``.
    mixing: m, above 0 and at most 1. With 1, workers go on from the parameters, and
      drop their displacement of the ``delay``.
    merge: ``"mean"``, or ``"senders"``, which divides the sum of an element by the
      number of workers that sent it. Only sparse codecs allow that.
    start: T, the number of the first steps that are data-parallel.

  Raises:
    ValueError: ``mixing`` or ``merge`` breaks its rule;
      :func:`gradcomp.local.local_steps` checks the others.
  """

  exchange: ExchangeName | Auto | Exchange = "auto"
  min_leaf_size: int | None = None
  message_bytes: MessageBytes = "auto"
  key: ArrayLike = 0
  dither: Dither = "shared"
  feedback: FeedbackName | Feedback | None = "error"
  fragments: int = 1
  delay: int = 0
  mixing: float = checks.field(1.0, checks.ABOVE_0)
  merge: Merge = checks.field("mean", checks.choice(Merge))
  start: int = 0


def papers_of(options: LocalOptions) -> list[Citation]:
  """Returns the papers of local steps with these options."""
  papers = [Citation(DOUILLARD_2023, "Differences may be compressed, with feedback.")]
  if options.fragments > 1 or options.delay:
    why = "Fragments are consecutive leaves, of about as many elements each."
    papers.append(Citation(DOUILLARD_2025, why))
  if options.start:
    why = "Parameters are averaged in the first steps, and not gradients."
    papers.append(Citation(LIN_2018_LOCAL, why))
  return papers


def up_to(name: str, least: int, most: int, value: Any) -> int:
  """Returns an integer in a range; ValueError otherwise."""
  rule = f"a number, from {least} to {most}, which depends on `every`"
  return static_integer(name, rule, value, least=least, most=most)


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
