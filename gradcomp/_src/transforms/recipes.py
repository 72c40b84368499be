"""Builds methods by name: a codec, an exchange and feedback, for ``optax.chain``."""

from collections.abc import Sequence
from typing import Literal, Unpack

import optax
from jax.typing import DTypeLike

from gradcomp._src.checks import static_factor
from gradcomp._src.codecs import one_bit, protocol, ternary
from gradcomp._src.codecs.dense import Dense
from gradcomp._src.codecs.eight_bit import EightBit
from gradcomp._src.codecs.floats.float_cast import FloatCast
from gradcomp._src.codecs.floats.natural import Natural
from gradcomp._src.codecs.policy import Policy
from gradcomp._src.codecs.qsgd import QSGD
from gradcomp._src.kernels.gpu.dispatch import Implementation
from gradcomp._src.transforms.options import CompressOptions, of_codec, recipe


@recipe(QSGD)
def qsgd(  # noqa: PLR0913 - options of users, by keyword
  bits: int = QSGD.bits,
  *,
  bucket_size: int | None = QSGD.bucket_size,
  norm: Literal["max", "l2", "rms"] = QSGD.norm,
  levels: Literal["sign_magnitude", "uniform", "nonuniform"] = QSGD.levels,
  rounding: Literal["stochastic", "nearest"] = QSGD.rounding,
  share_scale: bool = QSGD.share_scale,
  rotate: int | None = QSGD.rotate,
  refit_every: int = QSGD.refit_every,
  implementation: Implementation | None = QSGD.implementation,
  **options: Unpack[CompressOptions],
) -> optax.GradientTransformationExtraArgs:
  """QSGD: averages gradients over ``axis_name`` in ``bits`` bits an element.

  The paper uses buckets of 128 at 2 bits, of 512 at 4 and 8 bits, and of 8192 at 16
  bits. Stochastic rounding is unbiased, and keeps no residual by default, as in the
  paper. Residuals of 2 random bits grow in large buckets; ``norm="rms"``,
  ``levels="uniform"`` and ``rounding="nearest"`` keep one by default. ``rotate=8`` or
  ``rotate=32`` is for gradients with heavy tails. A payload has about
  ``bits + 32 / bucket_size`` bits an element.

  Example:
    >>> optimizer = optax.chain(gradcomp.qsgd(bits=8), optax.sgd(1.0))
    >>> gradient = jnp.full(1024, 0.5)
    >>> optimizer.update(gradient, optimizer.init(gradient))[0]
    Array([-0.5, -0.5, -0.5, ..., -0.5, -0.5, -0.5], dtype=float32)
  """
  return of_codec(qsgd, QSGD, locals())


@recipe(one_bit.OneBit)
def onebit_sgd(
  bucket_size: int = one_bit.OneBit.bucket_size,
  *,
  per_column: bool = one_bit.OneBit.per_column,
  implementation: Implementation | None = one_bit.OneBit.implementation,
  **options: Unpack[CompressOptions],
) -> optax.GradientTransformationExtraArgs:
  """1-bit SGD: averages gradients over ``axis_name`` in a sign and two means a bucket.

  It is biased, and always has error feedback. A payload has about
  ``1 + 64 / bucket_size`` bits an element.

  Args:
    feedback: ``"error"``, ``"momentum"``, an object of these, or ``"auto"``, which is
      ``"error"``; see :class:`gradcomp.CompressOptions`. Default: ``"auto"``.

  Example:
    >>> tx = gradcomp.onebit_sgd(min_leaf_size=0)
    >>> grads = {"w": jnp.tile(jnp.array([-3.0, -1.0, 2.0, 4.0]), 512)}
    >>> updates, state = tx.update(grads, tx.init(grads))
    >>> updates["w"][:4].tolist(), state.residual["w"][:4].tolist()
    ([-2.0, -2.0, 3.0, 3.0], [-1.0, 1.0, -1.0, 1.0])
  """
  if options.get("feedback", "auto") is None:
    raise ValueError(
      '`feedback` must be "auto", "error" or "momentum" in 1-bit SGD, got None; '
      "gradcomp.compress(OneBit(), feedback=None) keeps no residual."
    )
  return of_codec(onebit_sgd, one_bit.OneBit, locals())


@recipe(ternary.Ternary)
def terngrad(
  clip_sigmas: float | None = ternary.Ternary.clip_sigmas,
  *,
  bucket_size: int | None = ternary.Ternary.bucket_size,
  share_scale: bool = ternary.Ternary.share_scale,
  packing: Literal["2bit", "base3"] = ternary.Ternary.packing,
  scaler: Literal["clipped", "sigma"] = ternary.Ternary.scaler,
  implementation: Implementation | None = ternary.Ternary.implementation,
  **options: Unpack[CompressOptions],
) -> optax.GradientTransformationExtraArgs:
  """TernGrad: averages gradients over ``axis_name`` in three values, scaled by leaf.

  It is unbiased for clipped gradients, and keeps no residual by default, as in the
  paper, which suggests a last layer in full precision: see :func:`policy`. A payload
  has 2 or 1.6 bits an element; with shared scales, sums in ``two_shot`` have
  ``ceil(log2(2N + 1))``.

  Example:
    >>> tx = gradcomp.terngrad(clip_sigmas=None)
    >>> grads = {"w": jnp.tile(jnp.array([-1.0, 0.0, 1.0, 1.0]), 2048)}
    >>> updates, _ = tx.update(grads, tx.init(grads))
    >>> updates["w"][:4]
    Array([-1.,  0.,  1.,  1.], dtype=float32)
  """
  return of_codec(terngrad, ternary.Ternary, locals())


@recipe(EightBit)
def eight_bit(
  dtype: Literal[
    "dynamic_tree", "dynamic_map", "static_tree", "linear", "mantissa"
  ] = EightBit.dtype,
  *,
  bucket_size: int | None = EightBit.bucket_size,
  rounding: Literal["nearest", "stochastic"] = EightBit.rounding,
  exponent_offset: int | None = EightBit.exponent_offset,
  implementation: Implementation | None = EightBit.implementation,
  **options: Unpack[CompressOptions],
) -> optax.GradientTransformationExtraArgs:
  """8-bit types: averages gradients over ``axis_name`` in 8 bits an element.

  Nearest rounding is biased, and keeps a residual by default. The paper keeps none:
  pass ``feedback=None``. Stochastic rounding is unbiased. A payload has 8 bits an
  element and one scale a leaf, or a bucket.

  Example:
    >>> tx = gradcomp.eight_bit("linear", feedback=None)
    >>> grads = {"w": jnp.tile(jnp.array([-127.0, 0.4, 0.6, 5.0]), 512)}
    >>> updates, _ = tx.update(grads, tx.init(grads))
    >>> updates["w"][:4]
    Array([-127.,    0.,    1.,    5.], dtype=float32)
  """
  return of_codec(eight_bit, EightBit, locals())


@recipe(Natural)
def natural(
  *,
  implementation: Implementation | None = Natural.implementation,
  **options: Unpack[CompressOptions],
) -> optax.GradientTransformationExtraArgs:
  """Natural compression: averages gradients over ``axis_name`` as powers of two.

  Each element is rounded up or down at random. It is unbiased, and keeps no residual by
  default, as in the paper. A payload has 8 bits an element, for magnitudes from 2**-62
  to 2**63.

  Example:
    >>> tx = gradcomp.natural()
    >>> grads = {"w": jnp.tile(jnp.array([1.0, -0.25, 0.0, 2.0**-60]), 512)}
    >>> updates, _ = tx.update(grads, tx.init(grads))
    >>> updates["w"][:4] == grads["w"][:4]  # powers of two are exact
    Array([ True,  True,  True,  True], dtype=bool)
  """
  return of_codec(natural, Natural, locals())


@recipe(Dense)
def dense(
  dtype: DTypeLike = Dense.dtype,
  *,
  rounding: Literal["nearest", "stochastic"] = Dense.rounding,
  **options: Unpack[CompressOptions],
) -> optax.GradientTransformationExtraArgs:
  """Averages gradients over ``axis_name`` in 32 or 16 bits an element: the baseline.

  ``float32`` is the plain mean, one ``psum``, and unbiased. ``bfloat16`` and
  ``float16`` travel as 16-bit integers, and are added in float32. Rounded to nearest
  they are biased, and keep a residual by default; ``rounding="stochastic"`` is
  unbiased, and keeps none.

  With ``float32``, float64 gradients (``jax_enable_x64``) are added as float64, by a
  ``psum`` of their own, whatever ``exchange`` is. Every other codec computes them in
  float32.

  Example:
    >>> tx = gradcomp.dense(jnp.bfloat16, feedback=None)
    >>> grads = {"w": jnp.array([1.001, 2.0])}
    >>> tx.update(grads, tx.init(grads))[0]
    {'w': Array([1.001, 2.   ], dtype=float32)}
  """
  return of_codec(dense, Dense, locals())


@recipe(FloatCast)
def aps(
  exponent_bits: int = FloatCast.exponent_bits,
  mantissa_bits: int = FloatCast.mantissa_bits,
  *,
  rounding: Literal["nearest_even", "stochastic", "toward_zero"] = FloatCast.rounding,
  accumulate: Literal["format", "kahan", "float32"] = FloatCast.accumulate,
  implementation: Implementation | None = FloatCast.implementation,
  **options: Unpack[CompressOptions],
) -> optax.GradientTransformationExtraArgs:
  r"""Auto Precision Scaling: averages gradients as floats of ``1 + e + m`` bits.

  It is :func:`gradcomp.compress` with the codec :class:`gradcomp.codecs.FloatCast`. The
  workers agree on the largest power of two :math:`2^f` with which the sum of a leaf
  cannot overflow. Without residuals it returns

  .. math:: \frac{2^{-f}}{N} \bigoplus_i \mathrm{cast}(2^f g_i)

  where :math:`\oplus` rounds every partial sum to the format, in the order of
  ``exchange``.

  It is biased, and keeps a residual by default; the paper keeps none
  (``feedback=None``). The paper uses rings of 8, groups of 16 among 256 workers
  (``exchange=Hierarchical(group_size=16)``), and float32 for the last layer. A payload
  has 8 bits an element with the default format, 4 with (3, 0), and a byte a leaf.
  ``optax.inject_hyperparams`` needs ``static_args=("exponent_bits", "mantissa_bits")``.

  Raises:
    ValueError: an argument that the codec or ``compress`` does not allow; in ``init``
      or ``update``, more workers than the format has room for.

  Example:
    >>> tx = gradcomp.aps(4, 3, feedback=None)
    >>> grads = {"w": jnp.tile(jnp.array([1.0, -1.1, 3e-9, 0.0]), 512) * 2.0**-40}
    >>> updates, _ = tx.update(grads, tx.init(grads))
    >>> updates["w"][:4] * 2.0**40
    Array([ 1.   , -1.125,  0.   ,  0.   ], dtype=float32)
  """
  return of_codec(aps, FloatCast, locals())


@recipe(FloatCast)
def loss_scaling_cast(
  factor: float,
  exponent_bits: int = FloatCast.exponent_bits,
  mantissa_bits: int = FloatCast.mantissa_bits,
  *,
  rounding: Literal["nearest_even", "stochastic", "toward_zero"] = FloatCast.rounding,
  accumulate: Literal["format", "kahan", "float32"] = FloatCast.accumulate,
  implementation: Implementation | None = FloatCast.implementation,
  **options: Unpack[CompressOptions],
) -> optax.GradientTransformationExtraArgs:
  r"""Averages gradients as floats of few bits, scaled by one constant: loss scaling.

  This is the baseline of :func:`aps`. Without residuals it returns

  .. math:: \frac{1}{c N} \bigoplus_i \mathrm{cast}(c \, g_i)

  Numbers that are too large become infinite, as in hardware, and numbers that are too
  small become zero. A factor that is no power of two rounds twice more. It must be
  known when a program is traced: ``optax.inject_hyperparams`` needs it in
  ``static_args``. Like :func:`aps` it is biased, keeps a residual by default, and sends
  4, 8, 16 or 32 bits an element; it sends no byte a leaf.

  Args:
    factor: c, a number from 2**-126 to 2**126. Required.

  Example:
    >>> tx = gradcomp.loss_scaling_cast(1024.0, feedback=None)
    >>> grads = {"w": jnp.tile(jnp.array([1.0, 1e3, 1e-3, 1e-9]), 512)}
    >>> updates, _ = tx.update(grads, tx.init(grads))
    >>> updates["w"][:4]
    Array([1.000000e+00,          inf, 9.765625e-04, 0.000000e+00], dtype=float32)

  References:
    Han et al., 2021, section 3.1; Micikevicius et al., `Mixed Precision Training
    <https://arxiv.org/abs/1710.03740>`_, 2017
  """
  scale = static_factor("factor", "a number from 2**-126 to 2**126", factor)
  return of_codec(loss_scaling_cast, FloatCast, locals())


@recipe(Policy)
def policy(
  rules: Sequence[tuple[str, protocol.LeafCodec]], **options: Unpack[CompressOptions]
) -> optax.GradientTransformationExtraArgs:
  r"""Averages gradients over workers, each leaf encoded by the codec of its path.

  It is :func:`gradcomp.compress` with the codec :class:`gradcomp.codecs.Policy`. All
  leaves share messages:

  .. math:: \frac{1}{N} \sum_i Q_l(g_{i,l}), \qquad Q_l \text{ of the first rule that
     matches the path of leaf } l

  With the last layer and all that is small in full precision, as Wen et al. (section
  5), Han et al. (section 4) and Fang et al. (section 2.1) train::

    exchange = gradcomp.policy(
      [("norm|bias|^head/", Dense()), ("^embed/", TopK()), (".", QSGD(bits=4))],
      axis_name="data",
    )

  ``exchange`` must suit all codecs. ``"auto"`` takes ``two_shot`` if all allow it, else
  ``all_gather``; with a sparse codec ``all_gather``, as long as that sends less than a
  plain mean. The result is unbiased if all codecs are, and keeps a residual by default
  if one is biased.

  Raises:
    ValueError: rules are no such pairs; in ``init`` and ``update``, a rule matches no
      leaf.

  Example:
    >>> from gradcomp.codecs import QSGD, Dense
    >>> tx = policy([("b", Dense()), (".", QSGD(bits=4))], axis_name="data")
    >>> params = {"b": jnp.zeros(8192), "w": jnp.zeros((256, 256))}
    >>> leaves = gradcomp.explain(tx, params, workers=4).leaves
    >>> [(leaf.path, leaf.rule, type(leaf.codec).__name__) for leaf in leaves]
    [("['b']", 'b', 'Dense'), ("['w']", '.', 'QSGD')]
  """
  return of_codec(policy, Policy, locals())
