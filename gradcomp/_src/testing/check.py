"""Tests of a codec or a transformation by all laws."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src import checks
from gradcomp._src.codecs.protocol import LeafCodec, is_codec
from gradcomp._src.codecs.sums.records import Leaf
from gradcomp._src.core.transform import compress
from gradcomp._src.exchange import auto, hierarchical, protocol, schedules
from gradcomp._src.testing import kit, laws, modes

_COUNT = checks.integer("a number of 1 or more", 1)

Law = functools.partial[None]
Exchanges = Sequence[auto.ExchangeName | protocol.Exchange]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckOptions(checks.Checked):
  """The promises of a codec that :func:`check_codec` tests.

  Attributes:
    sizes: further sizes of leaves, to the default of two rows and a part of a third.
    draws: the encodings, 1 or more, whose mean is compared with a leaf, if the codec is
      unbiased.
    constants: values that a leaf of one value decodes to exactly.
    spoils: the elements that a non-finite one may spoil: see
      :func:`gradcomp.testing.laws.non_finite_elements_are_seen`.
    own_statistics: whether a codec has statistics, like means, in which zeros after the
      leaf would count.
    most_variance: the largest variance of the mean of workers that share a dither,
      relative to independent ones.
    same_bits: whether all modes must have the same bits: not for a codec that
      multiplies matrices, because a compiler chooses the order of their sums.
    keeps_range: whether rows can hold all float16 numbers, and sums of four of them:
      not for a codec that casts to a smaller type without a scale.
    most_error: the largest share of its energy that a leaf loses, if the codec is
      biased; None for ``1 - contraction``. Above 1 for a codec that sends units.
    most_growth: the share by which a decoded leaf may grow when it is sent again, if
      the codec is biased: larger for a scale that rounding changes, like an l2 norm.

  Raises:
    ValueError: ``draws`` is below 1.
  """

  sizes: Sequence[int] = kit.SIZES
  draws: int = checks.field(1000, _COUNT)
  constants: Sequence[float] = ()
  spoils: int | str | None = "any"
  own_statistics: bool = False
  most_variance: float = 1.0
  same_bits: bool = True
  keeps_range: bool = True
  most_error: float | None = None
  most_growth: float = 0.005


_DEFAULTS = CheckOptions()


def check_codec(
  codec: LeafCodec,
  *,
  workers: int = 4,
  exchanges: Exchanges = ("all_gather", "two_shot"),
  options: CheckOptions = _DEFAULTS,
) -> None:
  """Holds a codec to every law of this library, by itself and in exchanges.

  It tries the laws of ``gradcomp.testing.laws`` with the codec, and then
  :func:`check_transformation` with it and error feedback. Exchanges that the codec's
  sum refuses are left out, and modes with too few devices: set ``jax_num_cpu_devices``.
  It takes some seconds, mostly to compile.

  Args:
    codec: the codec, as users make it.
    workers: N, a power of two for all modes to be compared.
    exchanges: the exchanges to try.
    options: the promises of the codec.

  Raises:
    BrokenLaw: a law does not hold: the message names it, with the expected and the
      found, and where to look.
    TypeError: ``codec`` is no codec of a leaf, or ``options`` no :class:`CheckOptions`.
    ValueError: ``workers`` or ``exchanges`` is not as above.

  Example:
    >>> codec = gradcomp.codecs.Dense(dtype=jnp.bfloat16)
    >>> options = gradcomp.testing.CheckOptions(sizes=(1, 33), spoils="itself")
    >>> gradcomp.testing.check_codec(codec, exchanges=[], options=options)
  """
  if not is_codec(codec):
    raise TypeError(
      f"`codec` must be an instance of a codec, got {codec!r}; derive it from "
      "gradcomp.codecs.Codec."
    )
  if codec.facts.parts:
    raise TypeError(
      f"`codec` must encode and decode a leaf, got {codec}; check each codec of a "
      "policy, and the policy by check_transformation(gradcomp.compress(policy))."
    )
  _COUNT.check("workers", workers)
  checks.instance_of("options", CheckOptions, options)
  for law in codec_laws(codec, workers=workers, exchanges=exchanges, options=options):
    law()


def check_transformation(  # noqa: PLR0913 - options of users, by keyword
  transformation: kit.Transformation,
  params: Any = None,
  *,
  axis_name: str = "data",
  workers: int = 4,
  places: Sequence[str] | None = None,
  steps: int = 2,
  same_bits: bool = True,
) -> None:
  """Holds a transformation with gradcomp's in it to every law of this library.

  All workers get the same bits, in every mode; the state keeps its structure; nothing
  is lost where residuals are kept; a NaN reaches every worker; and a compiled step
  sends the bytes that :func:`gradcomp.explain` counts.

  Args:
    transformation: such as ``gradcomp.qsgd(bits=4, axis_name="data")``, also in an
      ``optax.chain``.
    params: the parameters, or their shapes; by default a matrix and some small leaves.
    axis_name: the axis that the transformation was given.
    workers: N, a power of two for all modes to be compared.
    places: the modes to compare, of :mod:`gradcomp.testing.modes`; by default all for
      which there are devices.
    steps: the number of steps.
    same_bits: whether all modes must have the same bits: see :class:`CheckOptions`.

  Raises:
    BrokenLaw: a law does not hold: see :func:`check_codec`.
    TypeError: ``transformation`` has no ``init`` and ``update``.
    ValueError: ``workers``, ``steps`` or ``places`` is not as above.

  Example:
    >>> tx = gradcomp.terngrad(axis_name="data", exchange="psum")
    >>> gradcomp.testing.check_transformation(tx, workers=2, places=["shard_map"])
  """
  if not (hasattr(transformation, "init") and hasattr(transformation, "update")):
    raise TypeError(
      "`transformation` must have `init` and `update`, as optax's have, got "
      f"{transformation!r}; a codec becomes one by gradcomp.compress(codec)."
    )
  _COUNT.check("workers", workers)
  _COUNT.check("steps", steps)
  params = _params((45, 46)) if params is None else params
  gradients = [laws.gradients_like(params, workers, seed) for seed in range(steps)]
  given: Any = {"axis_name": axis_name, "places": places, "same_bits": same_bits}
  for law in transformation_laws(transformation, gradients, **given):
    law()


def codec_laws(
  codec: LeafCodec, *, workers: int, exchanges: Exchanges, options: CheckOptions
) -> Iterator[Law]:
  """Yields the laws of a codec, each bound to its arguments."""
  shape = kit.leaf_of(codec).shape
  for law in (
    *(laws.is_a_value, laws.facts_are_plain, laws.is_pure),
    *(laws.shapes_and_dtypes_return, laws.payload_is_rows_of_words),
    *(laws.zeros_decode_to_zeros, laws.tiny_numbers_stay_finite, laws.rows_stand_alone),
    *(laws.sent_and_unsent_are_the_leaf, laws.half_precision_is_computed_in_float32),
    *(laws.padding_never_leaks, laws.key_decides_the_bits, laws.elements_draw_apart),
    *(laws.workers_choose_alike, laws.residuals_are_bounded),
    *((laws.batches_are_independent,) if options.same_bits else ()),
    *((laws.same_bits_without_jit,) if options.same_bits else ()),
  ):
    yield Law(law, codec)
  for bad in (np.nan, np.inf, -np.inf):
    yield Law(laws.non_finite_elements_are_seen, codec, bad=bad, spoils=options.spoils)
  yield Law(laws.constants_are_exact, codec, tuple(options.constants))
  yield Law(laws.errors_are_contractions, codec, most_error=options.most_error)
  yield Law(laws.decoded_leaves_do_not_grow, codec, most=options.most_growth)
  yield Law(laws.odd_sizes_work, codec, tuple(options.sizes))
  if not options.own_statistics and kit.tile_of(codec) is not None:
    yield Law(laws.zeros_behind_change_nothing, codec)
  if codec.unbiased:
    yield Law(laws.mean_is_the_leaf, codec, draws=options.draws)
    if codec.needs_key and not codec.bind(Leaf(shape)).facts.same_draws:
      yield Law(laws.mean_is_the_leaf, codec, draws=options.draws, workers=workers)
  yield Law(laws.errors_of_workers_cancel, codec, options.most_variance)
  yield Law(laws.bytes_are_the_claim, codec, workers=workers)
  refused = codec.facts.refusals
  if options.keeps_range:
    for partial in (schedules.Ring(), hierarchical.Hierarchical(group_size=2)):
      if partial.way not in refused:
        yield Law(laws.half_precision_keeps_its_range, codec, partial)
    yield Law(laws.large_numbers_keep_their_size, codec)
  gradients = [laws.gradients_like(_params(shape), workers, seed) for seed in (0, 1)]
  feedback = "error" if codec.contraction > 0 else None  # which refuses the others
  given: Any = {"axis_name": "data", "feedback": feedback, "min_leaf_size": 0}
  promised = {x: getattr(options, x) for x in ("same_bits", "keeps_range")}
  for exchange in map(auto.as_exchange, exchanges):
    if getattr(exchange, "way", None) not in refused:
      tx = compress(codec, exchange=exchange, **given)
      yield from transformation_laws(tx, gradients, **promised)


def transformation_laws(
  transformation: kit.Transformation,
  gradients: kit.Gradients,
  *,
  axis_name: str = "data",
  places: Sequence[str] | None = None,
  same_bits: bool,
  keeps_range: bool = True,
) -> Iterator[Law]:
  """Yields the laws of a transformation, each bound to a run of its steps."""
  run = lambda mode, steps: modes.run(mode, transformation, steps, axis_name=axis_name)
  yield Law(laws.state_is_stable, run("vmap", gradients[:1]))
  emulated = run("vmap", gradients)
  for law in (
    *(laws.steps_are_scanned, laws.workers_agree, laws.nothing_is_lost),
    *(laws.checkpoint_goes_on, laws.record_is_its_own, laws.bytes_are_explained),
    *((laws.finite_gradients_stay_finite,) if keeps_range else ()),
  ):
    yield Law(law, emulated)
  for bad in (math.nan, math.inf):
    spoiled = run("vmap", laws.spoiled(gradients, bad))
    yield Law(laws.non_finite_gradients_are_seen, spoiled)
  if same_bits and len(jax.devices()) >= emulated.workers:
    each = modes.modes_for(emulated.workers) if places is None else places
    others = [run(mode, gradients) for mode in each if mode != "vmap"]
    yield Law(laws.same_bits_in_every_mode, emulated, *others)
    for one in [x for x in others if x.place.where][:1]:
      yield Law(laws.resharding_keeps_sums, one)


def _params(shape: tuple[int, ...]) -> dict[str, jax.Array]:
  """Returns a leaf of a shape, an empty one, a scalar, and two of half precision."""
  return {
    "empty": jnp.zeros((0, 3)),
    "half": jnp.zeros((5, 7), jnp.bfloat16),
    "smaller": jnp.zeros((3, 5), jnp.float16),
    "leaf": jnp.zeros(shape),
    "scalar": jnp.zeros(()),
  }
