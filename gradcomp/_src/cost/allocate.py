"""``allocate``: a codec for each leaf, for least bytes at the error of one codec."""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.codecs import dense, protocol, qsgd
from gradcomp._src.codecs.policy import Policy
from gradcomp._src.codecs.sums.records import Leaf
from gradcomp._src.core.border import pairs
from gradcomp._src.cost.planner.candidates import Candidate, as_candidate, name_of
from gradcomp._src.cost.planner.choice import named, shapes_of
from gradcomp._src.cost.planner.errors import encoder, energy, wide
from gradcomp._src.exchange.layout import plan_rows
from gradcomp._src.report.collectives import aligned

_Named = tuple[str, jax.ShapeDtypeStruct]  # the path and the shape of a leaf
PARTS = 1 << 15  # of the bound, in which errors are counted


class AllocatedLeaf(NamedTuple):
  """The codec of one leaf, and its bytes and error beside the uniform codec's."""

  path: str  # with `/` between keys
  codec: Any  # a LeafCodec; None for the sum of all leaves
  elements: int
  energy: float  # its squares, added over the gradients
  nbytes: int  # of one payload
  uniform_nbytes: int
  error: float  # squared, added over the gradients
  uniform_error: float


def least_bytes(leaves: Sequence[Sequence[Any]], bound: float) -> list[int] | None:
  """Returns an option for each leaf, or None: L-GreCo's dynamic program."""

  def cover(error: float) -> int:
    """Returns the parts of the bound that cover an error, PARTS + 1 for too many."""
    # Rounded up, so that the exact sum of errors is within the bound.
    if error > bound:
      return PARTS + 1
    return math.ceil(Fraction(error) * PARTS / Fraction(bound)) if error else 0

  # The least bytes of the leaves so far, by the parts that they take together.
  least = np.full(PARTS + 1, np.inf)
  least[0] = 0
  chosen = []
  for options in leaves:
    reached = np.full((len(options), PARTS + 1), np.inf)
    for row, option in zip(reached, options, strict=True):
      if (parts := cover(option.error)) <= PARTS:
        row[parts:] = least[: PARTS + 1 - parts] + option.nbytes
    least = reached.min(axis=0)
    chosen.append(reached.argmin(axis=0).astype(np.int16))  # the first of equal ones
  place = int(np.argmin(least))  # the fewest parts of those with equal bytes
  if not np.isfinite(least[place]):
    return None
  numbers = []
  for options, choice in zip(reversed(leaves), reversed(chosen), strict=True):
    numbers.append(int(choice[place]))
    place -= cover(options[numbers[-1]].error)
  return numbers[::-1]


_UNIFORM = qsgd.QSGD(bits=4)
_WIDTHS = (*(qsgd.QSGD(bits=bits) for bits in (2, 3, 4, 5, 6, 7, 8, 16)), dense.Dense())
_HEADER = "leaf", "elements", "codec", "bytes", "of uniform", "error", "of uniform"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allocation:
  """The result of :func:`allocate`; ``str(allocation)`` is a table.

  Attributes:
    uniform: the codec that sets the error.
    leaves: the choice for each leaf, by path.
  """

  uniform: protocol.LeafCodec
  leaves: tuple[AllocatedLeaf, ...]

  @property
  def rules(self) -> tuple[tuple[str, protocol.LeafCodec], ...]:
    """The rules of :func:`gradcomp.policy`: an expression for the path of each leaf."""
    return tuple((rf"\A{re.escape(x.path)}\Z", x.codec) for x in self.leaves)

  @property
  def policy(self) -> Policy:
    """The codec that applies the rules."""
    return Policy(self.rules)

  @property
  def total(self) -> AllocatedLeaf:
    """The sums over all leaves; its error is at most ``uniform_error``."""
    add: Any = lambda x: sum(x) if isinstance(x[0], int) else math.fsum(x)
    _, _, *numbers = zip(*self.leaves, strict=True)
    return AllocatedLeaf("total", None, *map(add, numbers))

  @property
  def candidate(self) -> Candidate:
    """The policy as a candidate of a plan; ``"paper"`` refuses it as untrained."""
    total = self.total
    densities = [getattr(leaf.codec, "density", None) for leaf in self.leaves]
    return as_candidate(self.policy)._replace(
      name="allocated",
      omega=total.error / total.energy if total.energy else 0.0,
      density=min((x for x in densities if x is not None), default=None),
    )

  def __str__(self) -> str:
    total = self.total
    rows: list[Sequence[str]] = [_HEADER]
    for x in (*self.leaves, total):
      size, *counts = (f"{n:,}" for n in (x.elements, x.nbytes, x.uniform_nbytes))
      codec = (size, name_of(x.codec)) if x.codec else ("", "")
      rows.append([x.path, *codec, *counts, f"{x.error:.3g}", f"{x.uniform_error:.3g}"])
    saved = 1 - total.nbytes / max(total.uniform_nbytes, 1)
    last = f"{saved:.1%} fewer bytes than {name_of(self.uniform)}."
    return "\n".join([*aligned(rows), last])


def allocate(
  gradients: Sequence[Any],
  *,
  uniform: protocol.LeafCodec = _UNIFORM,
  candidates: Sequence[protocol.LeafCodec] = _WIDTHS,
  min_leaf_size: int | None = None,
) -> Allocation:
  r"""Returns a codec for each leaf: the least bytes at the error of one codec for all.

  Each candidate c encodes each leaf l of the gradients g. Of all choices c(l) it takes

  .. math:: \min_c \sum_l \text{bytes}(l, c(l)) \quad \text{with} \quad
     \sum_l \lVert Q_{c(l)}(g_l) - g_l \rVert^2 \le
     \sum_l \lVert Q_u(g_l) - g_l \rVert^2

  where u is the uniform codec. Neither the error nor the bytes are above those of u.
  Errors count in :math:`2^{15}` parts of the sum, rounded up: with L leaves no choice
  within :math:`1 - L / 2^{15}` of the sum has fewer bytes.

  Errors are of one encoding of these gradients, without residuals and the errors of
  owners; choose again where training has changed them. :func:`gradcomp.explain` counts
  the zeros of shares, too. Where a candidate is biased, workers keep residuals, and no
  codec that loses all of a leaf's energy is chosen.

  Args:
    gradients: trees like the parameters, of one worker each: a tree for each step, and
      worker, that counts. Take them before the exchange.
    uniform: the codec that sets the error.
    candidates: further codecs; by default QSGD of 2 to 8 and of 16 bits, and float32.
    min_leaf_size: as for :class:`gradcomp.CompressOptions`.

  Raises:
    ValueError: gradients differ or are not finite; a candidate is no codec; or one is
      biased, and ``uniform`` loses a leaf's energy.
    TypeError: a leaf is no array of floats.

  Example:
    >>> large, small = jax.random.normal(jax.random.key(0), (2, 64, 512))
    >>> found = allocate([{"a": large, "b": small / 100}])
    >>> print(found)
    leaf   elements  codec          bytes  of uniform  error  of uniform
    a        32,768  QSGD(bits=5)  22,792      16,640    256    1.19e+03
    b        32,768  QSGD(bits=2)   8,448      16,640   5.23       0.121
    total                          31,240      33,280    262    1.19e+03
    6.1% fewer bytes than QSGD().
    >>> exchange = gradcomp.policy(found.rules, axis_name="data")

  References:
    Markov et al., `L-GreCo <https://arxiv.org/abs/2210.17357>`_, 2024, section 4
  """
  if isinstance(candidates, str) or not isinstance(candidates, Sequence):
    raise ValueError(f"`candidates` must be a sequence of codecs, got {candidates!r}.")
  for name, codec in (("uniform", uniform), *(("candidates", x) for x in candidates)):
    if not protocol.is_codec(codec) or codec.facts.parts:
      raise ValueError(
        f"`{name}` must have codecs of gradcomp.codecs for one leaf, got {codec!r}."
      )
  like, steps = _finite(gradients)
  codecs = tuple(dict.fromkeys((uniform, *candidates)))
  sizes = [_payload_bytes(codec, like, min_leaf_size) for codec in codecs]
  biased = not all(codec.unbiased for codec in codecs)
  first, options = list[AllocatedLeaf](), list[list[AllocatedLeaf]]()
  # Leaves of one path have one rule, so that they are one leaf here.
  for path in sorted(steps[0]):
    leaves = [leaf for step in steps for leaf in step[path]]
    elements = sum(leaf.size for leaf in steps[0][path])
    wrong = lambda codec, leaf: wide(encoder(codec, min_leaf_size)(leaf)) - wide(leaf)
    lost = [energy(wrong(codec, leaf) for leaf in leaves) for codec in codecs]
    whole, nbytes = energy(leaves), [size[path] for size in sizes]
    found = [
      AllocatedLeaf(path, codec, elements, whole, count, nbytes[0], error, lost[0])
      for codec, count, error in zip(codecs, nbytes, lost, strict=True)
    ]
    grows = lambda x: biased and 0 < x.energy <= x.error  # a residual would
    if grows(found[0]):
      raise ValueError(
        "`uniform` must lose less than the energy of each leaf where a candidate is "
        f"biased, got a loss of {lost[0] / whole:.3g} of {path}; take more bits, "
        "smaller buckets, or only unbiased candidates."
      )
    first.append(found[0])
    options.append([x._replace(error=math.inf) if grows(x) else x for x in found])
  numbers = least_bytes(options, math.fsum(x.error for x in first)) or [0] * len(first)
  best = [own[i] for own, i in zip(options, numbers, strict=True)]
  both = lambda leaves: zip(*((x.nbytes, x.error) for x in leaves), strict=True)
  chosen = min(first, best, key=lambda leaves: [math.fsum(x) for x in both(leaves)])
  return Allocation(uniform=uniform, leaves=tuple(chosen))


def _finite(gradients: Any) -> tuple[list[_Named], list[dict[str, list[np.ndarray]]]]:
  """Returns the leaves that all gradients share, and each gradient's; or ValueError."""
  rule = "a list or a tuple of trees like the parameters, one or more"
  if not isinstance(gradients, (list, tuple)) or not gradients:
    raise ValueError(
      f"`gradients` must be {rule}, got {type(gradients).__name__}"
      f"{'' if gradients else ', empty'}; put one tree in a list."
    )
  first, *_ = trees = [shapes_of(tree, "gradients") for tree in gradients]
  like, steps = named(first), list[dict[str, list[np.ndarray]]]()
  told = lambda tree: ", ".join(f"{x} {y.dtype}{list(y.shape)}" for x, y in named(tree))
  for number, (tree, own) in enumerate(zip(gradients, trees, strict=True)):
    tree_of: Any = jax.tree.structure
    if tree_of(own) != tree_of(first) or named(own) != like:
      raise ValueError(
        f"`gradients` must be trees of the same arrays, but number {number} has "
        f"{told(own)}, and number 0 {told(first)}."
      )
    steps.append({})
    for x, (path, shape) in zip(jax.tree.leaves(tree), like, strict=True):
      leaf = np.asarray(x, jnp.promote_types(shape.dtype, np.float32))
      steps[-1].setdefault(path, []).append(leaf)
      if not np.isfinite(leaf).all():
        raise ValueError(
          f"`gradients` must be finite, but number {number} has "
          f"{leaf[~np.isfinite(leaf)][0]} in {path}; take the gradients of other steps."
        )
  return like, steps


def _payload_bytes(
  codec: protocol.LeafCodec, like: list[_Named], min_leaf_size: int | None
) -> Mapping[str, int]:
  """Returns the bytes of each path in a payload: the rows of its leaves."""
  real, found = [pairs(x) for _, x in like], collections.Counter[str]()
  whole = zip(real, like, strict=True)
  places = [Leaf(x.shape, addends=2, path=path) for x, (path, _) in whole]
  layout = plan_rows(real, codec, min_leaf_size=min_leaf_size, places=places)
  for place, (group, start, stop) in zip(places, layout.slots, strict=True):
    found[place.path] += 4 * layout.codecs[group].row_words * (stop - start)
  return found
