"""BlockFloat: the codec of floats of few bits with a scale for each block."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jax import Array
from jax.lax import bitcast_convert_type

from gradcomp._src import checks
from gradcomp._src.codecs import around, contractions, quantizing
from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.sums.records import ArrayLike, Leaf, Payload, Rounding
from gradcomp._src.kernels import block_float
from gradcomp._src.kernels.gpu import dispatch

BlockSize = Literal[16, 32]

# The types of numbers that matrix units take, by elements and scales.
_UNITS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2, "e2m1": jnp.float4_e2m1fn}
_SCALES = {"e8m0": jnp.float8_e8m0fnu, "e4m3": jnp.float8_e4m3fn}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockFloat(quantizing.Elementwise):
  r"""Casts each block to a float of few bits, under a scale of 8 bits: MX and NVFP4.

  With :math:`X` for the scale of a block of 16 or 32 consecutive elements,

  .. math:: Q(v_i) = X \, \mathrm{cast}(v_i / X)

  ===========  ===========  =========  ============  ============  ====================
  ``element``  largest (M)  smallest   format        bits          bits with ``e4m3``
                                                                   scales of 16
  ===========  ===========  =========  ============  ============  ====================
  ``"e4m3"``   448          2**-9      MXFP8         8.25          8.56
  ``"e5m2"``   57344        2**-16     MXFP8         8.25          8.56
  ``"e3m2"``   28           2**-4      MXFP6         6.65          6.95
  ``"e2m3"``   7.5          2**-3      MXFP6         6.65          6.95
  ``"e2m1"``   6            2**-1      MXFP4         4.25          4.53, NVFP4
  ===========  ===========  =========  ============  ============  ====================

  With ``scale="e8m0"``, the OCP's Microscaling formats, :math:`X` is a power of two:

  .. math:: X = 2^{\lfloor \log_2 a \rfloor - \lfloor \log_2 M \rfloor}, \qquad
     a = \max_i |v_i|

  Larger elements become the largest number, as the specification demands: up to a
  quarter of a block's largest element is lost, which error feedback sends later.

  With ``scale="e4m3"``, NVFP4's scales, :math:`X` is ``s`` times the number of E4M3
  nearest to :math:`a / (M s)`, and all blocks of a tensor share
  :math:`s = \max_j |v_j| / (448 M)` in ``float32``.

  ``payload.rows`` hold the numbers that matrix units take. :meth:`operand` hands them
  out for ``jax.nn.scaled_matmul``.

  A NaN or an infinity makes its block NaN; with ``e4m3`` scales its tensor, and with
  ``rotate`` all blocks that it is spread over. A block (with ``e4m3`` scales a tensor)
  of elements below 2**-126 decodes to zeros, as single elements below 2**-126 do. With
  ``e4m3`` scales :math:`s` is at least 2**-117 over the smallest number of the
  elements, and numbers near 2**-126 become multiples of it.

  Attributes:
    element: the format of elements, as in the table. Default: ``"e4m3"``.
    scale: the format of scales, ``"e8m0"`` or ``"e4m3"``. Default: ``"e8m0"``.
    block_size: consecutive elements that share a scale, 32 as in Microscaling, or 16 as
      in NVFP4. Default: 32.
    rounding: ``"nearest"``, ties to even, which is biased, or ``"stochastic"``, which
      is unbiased: :math:`X` is then the smallest scale that clips nothing. Default:
      ``"nearest"``.
    rotate: elements of a rotated group, 8 or 32, with ``element="e2m1"``, as in
      :class:`gradcomp.codecs.QSGD`; or None. Default: None.
    implementation: the encoder, see :class:`gradcomp.codecs.Codec`; kernels run on
      TPUs, and ``"pallas"`` takes no elements of 6 bits. Default: None.

  Example:
    >>> x = jnp.array([7., -3., 0.4, 2.6])
    >>> mxfp4 = BlockFloat(element="e2m1")
    >>> mxfp4.decode(mxfp4.encode(x), like=x)
    Array([ 6. , -3. ,  0.5,  3. ], dtype=float32)
    >>> nvfp4 = BlockFloat(element="e2m1", scale="e4m3", block_size=16)
    >>> np.array(nvfp4.decode(nvfp4.encode(x), like=x)).round(3)
    array([ 7.   , -3.5  ,  0.583,  2.333], dtype=float32)

  References:
    Rouhani et al., `Microscaling Data Formats <https://arxiv.org/abs/2310.10537>`_,
    2023, sections 2 and 3; Mishra et al., `Recipes for Pre-training LLMs with MXFP8
    <https://arxiv.org/abs/2506.08027>`_, 2025, section 3; NVIDIA, `Pretraining Large
    Language Models with NVFP4 <https://arxiv.org/abs/2509.25149>`_, 2025, section 2 and
    appendix B
  """

  element: block_float.Element = checks.field(
    "e4m3", checks.choice(block_float.Element)
  )
  scale: block_float.Scale = checks.field("e8m0", checks.choice(block_float.Scale))
  block_size: BlockSize = checks.field(
    32, checks.integer("16 or 32", such=lambda size: size in (16, 32))
  )
  rounding: Rounding = checks.field("nearest", checks.choice(Rounding))
  rotate: int | None = checks.field(None, quantizing.ROTATE)
  implementation: dispatch.Implementation | None = checks.field(None, dispatch.RULE)

  operation = block_float

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.rotate and self.element != "e2m1":
      raise ValueError(
        f'`element` must be "e2m1" with rotate={self.rotate}, got {self.element!r}; '
        "only its words hold a multiple of 8 codes, across which groups lie."
      )

  def bind(self, leaf: Leaf) -> Codec:
    """Returns the codec of a leaf, of rotated elements if ``rotate`` is a number."""
    return around.Rotated(codec=self) if self.rotate else self

  @property
  def papers(self) -> tuple[str, ...]:
    up = ("mishra2025mxfp8",) if self.rounding == "stochastic" else ()
    microscaling = ("rouhani2023microscaling", *up)
    return ("nvidia2025nvfp4",) if self.scale == "e4m3" else microscaling

  @property
  def contraction(self) -> float:
    # Largest elements are clipped to nearest, and few bits are far apart near zero.
    return contractions.of_energy(0.12 if self.element == "e2m1" else 0.03)

  row_words = quantizing.ByKernel.row_words  # of scales with 8 bits

  def operand(self, payload: Payload, *, like: ArrayLike) -> tuple[Array, Array, Array]:
    """Returns the operand of a matrix unit, without decoding a payload.

    The payload stands for ``elements`` times ``scales``, each of a block, times
    ``factor``. Blocks lie along the last axis, K, which a product sums over. So for
    arrays of three axes the product :math:`a b^T` of two payloads is::

      scaled_matmul(a, b, a_scales, b_scales) * (a_factor * b_factor)

    Args:
      payload: the result of ``encode``.
      like: an array with the shape of what was encoded, ``[..., K]``.

    Returns:
      The elements, ``[..., K]`` of ``float8_e4m3fn``, ``float8_e5m2`` or
      ``float4_e2m1fn``; the scales, ``[..., K / block_size]`` of ``float8_e8m0fnu`` or
      ``float8_e4m3fn``; and the factor, ``float32[]``: the scale of the tensor, or 1
      with ``e8m0`` scales.

    Raises:
      ValueError: K is no multiple of ``block_size``; elements have 6 bits, for which
        JAX has no product; or they are rotated.

    Example:
      >>> codec, w = BlockFloat(), jnp.ones((2, 64))
      >>> elements, scales, factor = codec.operand(codec.encode(w), like=w)
      >>> elements.dtype, scales.dtype, scales.shape
      (dtype(float8_e4m3fn), dtype(float8_e8m0fnu), (2, 2))
    """
    if self.element not in _UNITS:
      raise ValueError(
        f"`element` must be one of {tuple(_UNITS)} for matrix units, got "
        f"{self.element!r}; decode the payload instead."
      )
    if self.rotate:
      raise ValueError(
        f"`rotate` must be None for matrix units, got {self.rotate}; groups lie across "
        "rows of the matrix, so decode the payload instead."
      )
    if not like.size or like.shape[-1:] == () or like.shape[-1] % self.block_size:
      raise ValueError(
        f"`like` must have a last axis that is a multiple of {self.block_size}, along "
        f"which its blocks lie, got the shape {like.shape}; decode the payload instead."
      )
    codes, scales, shared = block_float.unpack(payload.rows, self.form)
    codes = codes.reshape(-1)[: like.size].reshape(like.shape)
    blocks = *like.shape[:-1], like.shape[-1] // self.block_size
    scales = scales.reshape(-1)[: like.size // self.block_size].reshape(blocks)
    factor = jnp.float32(1) if shared is None else shared.reshape(-1)[0]
    unsigned = jnp.uint4 if self.element == "e2m1" else jnp.uint8
    numbers = bitcast_convert_type(codes.astype(unsigned), _UNITS[self.element])
    scales = bitcast_convert_type(scales.astype(jnp.uint8), _SCALES[self.scale])
    return numbers, scales, factor

  @property
  def form(self) -> block_float.Form:
    return block_float.Form(self.element, self.scale, self.block_size, self.unbiased)

  def scales_for(self, x: Array) -> Array | None:
    """Returns the scale that the blocks of rows share, if they share one."""
    if self.scale == "e8m0":
      return None
    return block_float.tensor_scales(quantizing.scales_of(x, 1, None), self.form)
