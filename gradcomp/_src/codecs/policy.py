"""Policy: chooses a codec for each leaf by the leaf's path."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np

from gradcomp._src.codecs import protocol
from gradcomp._src.codecs.dense import Dense
from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.sums.records import Leaf
from gradcomp._src.codecs.sums.sum import SumFacts, joined

_RULE = "a sequence of pairs (regular expression, codec)"


@dataclasses.dataclass(frozen=True)
class Policy:
  """Chooses the codec of each leaf by the first rule that matches the leaf's path.

  A path is like ``"encoder/layer_0/kernel"``: keys, indices and names of fields, joined
  by ``/``. A rule matches where ``re.search`` finds its regular expression in the path.
  A leaf without a matching rule travels in float32, as small leaves always do: see
  ``min_leaf_size``.

  A policy is unbiased if all its codecs are. Its ``contraction`` is the least of
  theirs.

  Attributes:
    rules: one or more pairs of a regular expression and a codec; the first that matches
      wins. Required.

  Raises:
    ValueError: ``rules`` is empty, an expression is invalid, or a codec is none; in
      ``init`` and ``update``, a rule matches no leaf.

  Example:
    >>> rules = [("bias", gradcomp.codecs.Dense()), (".", gradcomp.codecs.QSGD(bits=4))]
    >>> policy = Policy(rules)
    >>> [policy.rule(Leaf((8,), path=path)) for path in ("mlp/bias", "mlp/kernel")]
    ['bias', '.']
  """

  rules: Sequence[tuple[str, protocol.LeafCodec]]

  def __post_init__(self) -> None:
    given = self.rules
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
      raise ValueError(f"`rules` must be {_RULE}, got {given!r}.")
    for rule in given:
      if not isinstance(rule, Sequence) or isinstance(rule, str) or len(rule) != 2:
        raise ValueError(f"`rules` must be {_RULE}, got {rule!r} among them.")
      text, codec = rule
      if not isinstance(text, str):
        raise ValueError(f"`rules` must be {_RULE}, got {text!r} for an expression.")
      try:
        re.compile(text)
      except re.error as error:
        raise ValueError(f"`rules` must be {_RULE}, got {text!r}: {error}.") from error
      if not protocol.is_codec(codec):
        raise ValueError(
          f"`rules` must be {_RULE}, got {codec!r} for {text!r}; take a codec of "
          "gradcomp.codecs, not a transformation; powersgd, which is one, gets leaves "
          "of its own by optax.partition."
        )
    object.__setattr__(self, "rules", tuple((text, codec) for text, codec in given))

  @property
  def codecs(self) -> tuple[protocol.LeafCodec, ...]:
    """The codecs of all rules."""
    return tuple(codec for _, codec in self.rules)

  @property
  def unbiased(self) -> bool:
    return all(codec.unbiased for codec in self.codecs)

  @property
  def needs_key(self) -> bool:
    return any(codec.needs_key for codec in self.codecs)

  @property
  def contraction(self) -> float:
    return min(codec.contraction for codec in self.codecs)

  @property
  def facts(self) -> SumFacts:
    return joined([codec.facts.naming(codec) for codec in self.codecs])

  def bind(self, leaf: Leaf) -> Codec:
    """Returns the codec of a leaf, bound to it."""
    return self._match(leaf)[1].bind(leaf)

  def check_leaves(self, leaves: Sequence[Leaf]) -> None:
    """Raises ValueError for a rule that matches no leaf."""
    paths = [leaf.path for leaf in leaves]
    for text, codec in self.rules:
      if paths and not any(re.search(text, path) for path in paths):
        shown = ", ".join(map(repr, paths[:5])) + (", ..." if paths[5:] else "")
        raise ValueError(
          f"`rules` must each match a leaf, but {text!r} for {codec} matches none of "
          f"{shown}; mend the expression, or leave the rule out."
        )

  def rule(self, leaf: Leaf) -> str:
    """Returns the expression that matches a leaf, or "" for none."""
    return self._match(leaf)[0]

  def _match(self, leaf: Leaf) -> tuple[str, protocol.LeafCodec]:
    matching = (rule for rule in self.rules if re.search(rule[0], leaf.path))
    return next(matching, ("", Dense()))


def stateless(name: str, codec: Any, *, corrected: bool | None = None) -> Codec:
  """Returns the codec, if one payload can represent the whole array; else an error."""
  # `name` is the argument it was given for. `corrected` says whether a residual holds
  # what the payload lacks; None where there can be none.
  if not protocol.is_codec(codec):
    raise TypeError(
      f"`{name}` must be a codec of gradcomp.codecs, got {codec!r}; "
      "gradcomp.codecs.Dense() sends float32."
    )
  large = Leaf((1024, 1024))  # so large that no codec leaves it dense
  init, key = codec.bind(large).init, jax.ShapeDtypeStruct((2,), np.uint32)
  if codec.facts.parts:
    rule = "be a codec of one array, and not a policy"
  elif codec.facts.drops:
    rule = "send every element, because no residual sends the others later"
  elif codec.facts.needs_feedback and not corrected:
    rule = "work without error feedback, because there is no residual here"
    if corrected is not None:
      rule = "work without error feedback where `residual` is None"
  elif jax.tree.leaves(jax.eval_shape(lambda key: init(large, key), key)):
    rule = "work without a memory, because none is kept from call to call"
  else:
    if corrected:
      protocol.require_contraction(name, codec, "`residual=None`")
    return cast(Codec, codec)
  raise ValueError(
    f"`{name}` must {rule}, got {codec}; choose EightBit, QSGD, FloatCast, Natural, "
    "Ternary or Dense. Gradients of weights go through gradcomp.compress, which has "
    "residuals and memories."
  )
