"""Tests of a codec or a transformation by all laws."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradcomp._src.checks import static_integer
from gradcomp._src.codecs import sums
from gradcomp._src.codecs.leaf import Leaf
from gradcomp._src.codecs.protocol import LeafCodec, is_codec
from gradcomp._src.codecs.rounds import rounds_of
from gradcomp._src.core.transform import compress
from gradcomp._src.exchange.auto import ExchangeName, as_exchange
from gradcomp._src.exchange.hierarchical import Hierarchical
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.exchange.ring import Ring
from gradcomp._src.testing import laws
from gradcomp._src.testing.leaves import ragged, tile_of

SIZES = (0, 1, 2, 3, 31, 33, 127, 200)
_COUNT_RULE = "a number of 1 or more"


def check_codec(
  codec: LeafCodec,
  *,
  workers: int = 4,
  sizes: Sequence[int] = SIZES,
  draws: int = 1000,
  constants: Sequence[float] = (),
  spoils: int | str | None = "any",
  own_statistics: bool = False,
  most_variance: float = 1.0,
  same_bits: bool = True,
  exchanges: Sequence[ExchangeName | Exchange] = ("all_gather", "two_shot"),
  keeps_range: bool = True,
) -> tuple[str, ...]:
  """Tests a codec by every law of this library, by itself and in exchanges.

  First the codec by itself: it is a value and pure, shapes and dtypes return, zeros
  stay zeros, NaN is seen, padding leaks nowhere, rows are independent, it is unbiased
  if ``unbiased`` is true, and its bytes are its claim. Then transformations with it and
  with error feedback, over ``workers``: see :func:`check_transformation`. Exchanges
  that the codec's sum refuses are left out, and modes with too few devices: set
  ``jax_num_cpu_devices``.

  It takes some seconds, most of them to compile. Every law is also a function of
  ``testing.laws``.

  Args:
    codec: the codec, as users make it.
    workers: N, which should be a power of two for all modes to be compared.
    sizes: further sizes of leaves, to the default of two rows and a part of a third.
    draws: the encodings whose mean is compared with a leaf, if the codec is unbiased.
    constants: values that a leaf of one value decodes to exactly.
    spoils: the elements that one which is not finite may spoil: see
      :func:`gradcomp.testing.laws.non_finite_elements_are_seen`.
    own_statistics: whether a codec computes statistics of a leaf's own elements, among
      which zeros behind the leaf would count, as in means.
    most_variance: the largest variance of the mean of workers that share a dither,
      relative to independent ones.
    same_bits: whether all modes must have the same bits: not for a codec that
      multiplies matrices, because a compiler chooses the order of their sums.
    exchanges: the exchanges to try.
    keeps_range: whether rows can hold all float16 numbers, and sums of four of them:
      not for a codec that casts to a smaller type without a scale.

  Returns:
    The names of the laws that were tried and hold.

  Raises:
    BrokenLaw: a law does not hold. It is an AssertionError with the law, the expected
      and the found result, and the place to look.
    TypeError: ``codec`` is no codec of a leaf.
    ValueError: ``workers`` or ``draws`` is below 1, or ``exchanges`` has an unknown
      one.

  Example:
    >>> from gradcomp.testing import check_codec
    >>> codec = gradcomp.codecs.Dense(dtype=jnp.bfloat16)
    >>> held = check_codec(codec, sizes=(1, 33), spoils="itself", exchanges=[])
    >>> held[:3]
    ('is_a_value', 'facts_are_plain', 'is_pure')
  """
  if not is_codec(codec):
    raise TypeError(
      f"`codec` must be an instance of a codec, got {codec!r}; a codec has the members "
      "of gradcomp.codecs.LeafCodec."
    )
  if not (hasattr(codec, "encode") and hasattr(codec, "decode")):
    raise TypeError(
      f"`codec` must encode and decode a leaf, got {codec}; check each codec of a "
      "policy, and the policy by check_transformation(gradcomp.compress(policy))."
    )
  static_integer("workers", _COUNT_RULE, workers, least=1)
  static_integer("draws", _COUNT_RULE, draws, least=1)
  held = _Held()
  shape = ragged(codec)
  first = rounds_of(codec.bind(Leaf(shape)), shape)[0]
  for law in (
    laws.is_a_value,
    laws.facts_are_plain,
    laws.is_pure,
    laws.shapes_and_dtypes_return,
    laws.payload_is_rows_of_words,
    laws.zeros_decode_to_zeros,
    laws.tiny_numbers_stay_finite,
    laws.rows_stand_alone,
    laws.sent_and_unsent_are_the_leaf,
    laws.half_precision_is_computed_in_float32,
    laws.padding_never_leaks,
    laws.key_decides_the_bits,
    laws.elements_draw_apart,
    laws.workers_choose_alike,
  ):
    held(law, codec)
  if same_bits:
    held(laws.batches_are_independent, codec)
    held(laws.same_bits_without_jit, codec)
  for bad in (np.nan, np.inf, -np.inf):
    held(laws.non_finite_elements_are_seen, codec, bad=bad, spoils=spoils)
  if constants:
    held(laws.constants_are_exact, codec, tuple(constants))
  held(laws.odd_sizes_work, codec, tuple(sizes))
  if not own_statistics and tile_of(codec) is not None and first.of_leaf:
    held(laws.zeros_behind_change_nothing, codec)
  if codec.unbiased:
    held(laws.mean_is_the_leaf, codec, draws=draws)
    if codec.needs_key and not sums.of(first.codec).alike:
      held(laws.mean_is_the_leaf, codec, draws=draws, workers=workers)
      held(laws.errors_of_workers_cancel, codec, most_variance)
  held(laws.bytes_are_the_claim, codec, workers=workers)
  refused = sums.facts(codec).refusals
  if keeps_range:
    for partial in (Ring(), Hierarchical(group_size=2)):
      if partial.way not in refused:
        held(laws.half_precision_keeps_its_range, codec, partial)
    held(laws.large_numbers_keep_their_size, codec)
  for exchange in map(as_exchange, exchanges):
    if getattr(exchange, "way", None) not in refused:
      transformation = compress(
        codec,
        axis_name="data",
        exchange=exchange,
        feedback="error",
        min_leaf_size=0,
      )
      found = check_transformation(
        transformation, _params(shape), workers=workers, same_bits=same_bits
      )
      held.add(found)
  return tuple(held.names)


def check_transformation(
  transformation: optax.GradientTransformation,
  params: Any = None,
  *,
  workers: int = 4,
  axis_name: str = "data",
  places: Sequence[str] | None = None,
  steps: int = 2,
  same_bits: bool = True,
) -> tuple[str, ...]:
  """Tests a transformation with gradcomp's in it by every law of this library.

  All workers get the same bits, in every mode; the state keeps its structure; with
  residuals, updates and residuals add up to the gradients; a NaN reaches every worker;
  and a compiled step sends the bytes of :func:`gradcomp.explain`.

  Args:
    transformation: such as ``gradcomp.qsgd(bits=4, axis_name="data")``, also in an
      ``optax.chain``.
    params: the parameters, or their ``jax.ShapeDtypeStruct``; by default a matrix and
      some small leaves, one of them empty and one of half precision.
    workers: N, which should be a power of two for all modes to be compared.
    axis_name: the axis that the transformation was given.
    places: the modes to compare, of ``testing.modes``; by default all for
      which there are devices.
    steps: the number of steps.
    same_bits: whether all modes must have the same bits: see :func:`check_codec`.

  Returns:
    The names of the laws that were tried and hold.

  Raises:
    BrokenLaw: a law does not hold: see :func:`check_codec`.
    TypeError: ``transformation`` has no ``init`` and ``update``.
    ValueError: ``workers`` or ``steps`` is below 1, or ``places`` has an unknown mode.

  Example:
    >>> from gradcomp.testing import check_transformation
    >>> tx = gradcomp.terngrad(axis_name="data", exchange="psum")
    >>> "workers_agree" in check_transformation(tx, workers=2, places=["shard_map"])
    True
  """
  if not (hasattr(transformation, "init") and hasattr(transformation, "update")):
    raise TypeError(
      "`transformation` must have `init` and `update`, as optax's have, got "
      f"{transformation!r}; a codec becomes one by gradcomp.compress(codec)."
    )
  static_integer("workers", _COUNT_RULE, workers, least=1)
  static_integer("steps", _COUNT_RULE, steps, least=1)
  params = _params((45, 46)) if params is None else params
  gradients = [laws.gradients_like(params, workers, seed) for seed in range(steps)]
  held = _Held()
  options = {"axis_name": axis_name}
  held(laws.state_is_stable, transformation, gradients, **options)
  held(laws.workers_agree, transformation, gradients, **options)
  held(laws.nothing_is_lost, transformation, gradients, **options)
  for bad in (math.nan, math.inf):
    held(laws.non_finite_gradients_are_seen, transformation, gradients, bad, **options)
  if len(jax.devices()) >= workers:
    if same_bits:
      held(laws.same_bits_in_every_mode, transformation, gradients, places, **options)
    held(laws.bytes_are_explained, transformation, gradients, **options)
  return tuple(held.names)


class _Held:
  """Collects the names of laws that hold, and adds a law's name to its errors."""

  def __init__(self) -> None:
    self.names: dict[str, None] = {}

  def __call__(self, law: Callable[..., None], *args: Any, **options: Any) -> None:
    try:
      law(*args, **options)
    except Exception as error:
      error.add_note(f"While trying gradcomp._src.testing.laws.{law.__name__}.")
      raise
    self.add([law.__name__])

  def add(self, names: Sequence[str]) -> None:
    self.names |= dict.fromkeys(names)


def _params(shape: tuple[int, ...]) -> dict[str, jax.Array]:
  """Returns a leaf of a shape, an empty one, a scalar, and two of half precision."""
  return {
    "empty": jnp.zeros((0, 3)),
    "half": jnp.zeros((5, 7), jnp.bfloat16),
    "smaller": jnp.zeros((3, 5), jnp.float16),
    "leaf": jnp.zeros(shape),
    "scalar": jnp.zeros(()),
  }
