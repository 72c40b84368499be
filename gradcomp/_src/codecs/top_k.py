"""Top-k: sends the elements of largest magnitude, with positions of 16 bits."""

import dataclasses
import math
import sys
from collections.abc import Hashable, Sequence

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from gradcomp._src import checks
from gradcomp._src.codecs import protocol, sparse
from gradcomp._src.codecs.sparse import Quantize, Selection
from gradcomp._src.codecs.sums.records import Context, Encoded, Leaf, Memory
from gradcomp._src.codecs.sums.sum import Sum
from gradcomp._src.codecs.sums.tiles import OF_BLOCKS, Entries
from gradcomp._src.floats.dtypes import limit_of
from gradcomp._src.kernels.gpu import dispatch
from gradcomp._src.kernels.selection import RowView, select

_SMALL = 1 << 15  # Fang 2018, sections 2.1 and 3.1: 128 KB of float32
# From this size on up to twice the needed elements are sent, which is no large message.
_LARGE = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(sparse.EntryRows):
  r"""Sends the ``k = ceil(density * n)`` elements of largest magnitude of each leaf.

  .. math:: Q(v)_i = v_i \text{ if } |v_i| \ge t, \quad 0 \text{ otherwise}

  where :math:`t` is the threshold that the selection finds:

  ==============  ==================================================================
  ``selection``   the elements that are sent
  ==============  ==================================================================
  ``exact``       the k largest, by sorting: ``jax.lax.top_k``. k slots
  ``trimmed``     the k largest of those that reach a threshold. k slots
  ``threshold``   all that reach a threshold which k to ``slack * k`` elements reach
  ``sampled``     the same, with the threshold of up to ``search_every`` steps before
  ``auto``        ``exact`` below 128 KB of float32, ``trimmed`` below 4 MB, else
                  ``threshold``
  ==============  ==================================================================

  Bisection finds the threshold on a sample of the leaf, and one pass over the leaf
  confirms it, unless the sample misled the search. (The paper reads the leaf for each
  step of bisection; it sends the same elements.) Where equal elements allow no such
  threshold, the larger ones are sent, and enough equal ones to make k. A ``sampled``
  threshold that more elements reach than there are slots is searched anew: no element
  is left out because of its place.

  A payload has a position of 16 bits and a value for each of ``slots`` entries, and 4
  bytes for each block of 65,536 elements (32,768 with ``"mean"``). The codec is biased:
  without feedback, unsent elements are lost. Non-finite elements are the largest of
  all, and are sent as they are; with a quantizer they spoil the mean.

  Attributes:
    density: the share of the elements to send, k / n, above 0 and at most 1; 1 for the
      dense exchange. Default: 0.001.
    selection: the way to select: ``"auto"``, ``"exact"``, ``"trimmed"``,
      ``"threshold"`` or ``"sampled"``, see :class:`gradcomp.codecs.TopK`. Default:
      ``"auto"``.
    quantize: ``"asq"`` sends one mean in place of the values: positive and negative
      elements take turns from step to step. ``"mean"`` (Strom) sends both signs, with a
      mean each. None sends the values. Keep the output layer out of quantization, by
      ``optax.partition``. Default: None.
    dtype: the type of values on the wire: ``float32``, ``bfloat16`` or ``float16``. The
      residual keeps the rounding error, and the excess over the largest number.
      ``hierarchical``, which sends sums, refuses ``float16``. Default: ``float32``.
    slack: slots for each of the k elements in ``threshold`` and ``sampled``, from 1 to
      2. A smaller number lets more samples mislead, each of which costs a pass.
      Default: 2.0.
    search_every: steps that use one ``sampled`` threshold, 1 or more. Default: 5.
    range_size: n, the consecutive elements of a row, from 1 to 2**30. None for whole
      leaves, for an Nth where workers own ranges, and for 2, 4, 8, ... times as many
      parts where these are longer. Default: None.
    implementation: the code that counts and marks elements, except with ``exact``; see
      :class:`gradcomp.codecs.Codec`. Default: None.

  Raises:
    ValueError: a hyperparameter is outside these, or a quantizer goes with ``sampled``
      or a 16-bit ``dtype``.

  Example:
    >>> codec = TopK(density=0.25)
    >>> x = jnp.array([1.0, -5.0, 0.5, 2.0])
    >>> codec.roundtrip(x)
    Array([ 0., -5.,  0.,  0.], dtype=float32)

  References:
    Fang et al., `RedSync <https://arxiv.org/abs/1808.04357>`_, 2018, sections 2.1 and
    2.2; Strom, `Scalable distributed DNN training
    <https://www.isca-archive.org/interspeech_2015/strom15_interspeech.html>`_, 2015
  """

  density: float = checks.field(0.001, sparse.DENSITY)
  selection: Selection = checks.field("auto", checks.choice(Selection))
  quantize: Quantize | None = checks.field(None, checks.choice(Quantize, none=True))
  dtype: DTypeLike = checks.field(jnp.float32, checks.FLOAT_DTYPE)
  slack: float = checks.field(2.0, checks.number("a number from 1 to 2", 1, 2))
  search_every: int = checks.field(5, checks.STEPS)
  range_size: int | None = checks.field(None, sparse.RANGE)
  implementation: dispatch.Implementation | None = checks.field(None, dispatch.RULE)

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.quantize is not None and self.selection == "sampled":
      raise ValueError(
        f'`selection` must not be "sampled" with quantize={self.quantize!r}: the '
        'threshold of one step does not suit the next one; take "threshold".'
      )
    if self.quantize is not None and self.dtype != jnp.float32:
      raise ValueError(
        f"`dtype` must be float32 with quantize={self.quantize!r}, which sends means "
        f"alone, got {self.dtype}."
      )

  @property
  def contraction(self) -> float:
    return self.density

  @property
  def sums(self) -> Sum:
    why = ""
    if self.dtype == jnp.float16:
      why = "float16 values, got {codec}: sums of groups may exceed the largest one; "
      why += "use dtype=jnp.bfloat16."
    elif self.selection == "sampled":
      why = "a codec that uses thresholds again, got {codec}: sums of groups have "
      why += 'other thresholds; use selection="auto".'
    return Entries(self, facts=OF_BLOCKS.refusing({"grouped": why} if why else {}))

  @property
  def papers(self) -> tuple[str, ...]:
    means = ("strom2015scalable",) if self.quantize == "mean" else ()
    return ("stich2018memory", "fang2018redsync", *means)

  @property
  def largest(self) -> float | None:
    return limit_of(self.dtype)

  @property
  def slots(self) -> int:
    sent = sparse.sent_of(self.density, self.tile_size)
    few = self.method in ("exact", "trimmed")
    return sent if few else min(self.tile_size, int(self.slack * sent))

  @property
  def method(self) -> Selection:
    """The selection of a row of this size, which is never ``"auto"``."""
    if self.selection != "auto":
      return self.selection
    if self.tile_size < _SMALL:
      return "exact"
    return "trimmed" if self.tile_size < _LARGE else "threshold"

  def encode_leaf(self, x: Array, context: Context, *, keep: bool = False) -> Encoded:
    return self.encode_several([x], [context], None)[0]

  def init(self, leaf: Leaf, key: Array) -> Memory:
    rows = -(-leaf.size // self.tile_size) if leaf.size else 0
    none = jnp.zeros(rows, jnp.float32)
    return Memory(own=sparse.Selected(none, jnp.zeros(rows, jnp.int32)))

  def used_entries(self, memory: Memory) -> Array | None:
    return memory.own.used if memory.own else None

  def joins(self, shape: tuple[int, ...]) -> tuple[Hashable, int]:
    """Lets one program encode all leaves of a size, where they lie."""
    return math.prod(shape), sys.maxsize

  def encode_several(
    self, leaves: Sequence[Array], contexts: Sequence[Context], after: Array | None
  ) -> list[Encoded]:
    matrices = [protocol.to_tiles(leaf, self) for leaf in leaves]
    given = [self._given(context) for context in contexts]
    every = sparse.encode_leaves(self, leaves, matrices, given)
    for i, old in enumerate(given if self.selection == "sampled" else ()):
      if old is not None:
        own = every[i].own
        kept = jnp.where(old > 0, old, own.threshold)
        every[i] = every[i]._replace(own=own._replace(threshold=kept))
    return every

  def encode_rows(self, tiles: Array, context: Context) -> Array:
    matrices, given = [tiles.reshape(-1, self.tile_size)], [self._given(context)]
    return sparse.encode_rows(self, matrices, given).words

  def _given(self, context: Context) -> Array | None:
    """Returns the thresholds to try first, the sign to send in this step, or None."""
    step, memory = context.step, context.memory
    if self.quantize == "asq":
      if step is None:
        return None
      return jnp.where(step % 2 == 0, 1.0, -1.0).astype(jnp.float32)
    sampled = self.selection == "sampled"
    if not sampled or step is None or memory is None or memory.own is None:
      return None
    if not memory.own:
      raise ValueError(
        f"`memory` must hold the thresholds of the last search of {self}, got none; "
        "make the state by optimizer.init."
      )
    # Zeros have a threshold searched anew.
    return jnp.where(step % self.search_every != 0, memory.own.threshold, 0.0)

  def select(self, x: RowView, given: Array | None) -> Array:
    sign, sent = None, sparse.sent_of(self.density, x.size)
    if self.quantize == "asq":
      sign = jnp.float32(1) if given is None else given
    return select(
      x,
      self.method,
      (sent, min(x.size, 2 * sent) if self.method == "trimmed" else self.slots),
      sign=sign,
      first=given if self.selection == "sampled" else None,
      implementation=self.implementation,
    )
