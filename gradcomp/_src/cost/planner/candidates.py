"""The codecs that a plan compares, with their speeds."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.dense import Dense
from gradcomp._src.codecs.float_cast import FloatCast
from gradcomp._src.codecs.one_bit import OneBit
from gradcomp._src.codecs.policy import Policy
from gradcomp._src.codecs.protocol import LeafCodec, is_codec
from gradcomp._src.codecs.qsgd import QSGD
from gradcomp._src.codecs.ternary import Ternary
from gradcomp._src.codecs.top_k import TopK
from gradcomp._src.cost.cluster import CodecSpeed

Given = (
  None
  | Literal["measure"]
  | CodecSpeed
  | Mapping[str, CodecSpeed]
  | Callable[[LeafCodec], CodecSpeed]
)
SpeedOf = Callable[[LeafCodec], CodecSpeed]  # of a leaf's codec

GIVEN = "Codec speeds are those that were given."
_COPIED = CodecSpeed(encode=0.0, decode=0.0, add=0.0)

# Output layers by the names that people give them, as whole parts of a path.
_LAST = r"(^|/)(head|lm_head|classifier|logits|output|predictions|fc)(/|$)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
  """A setting that a plan may choose.

  Attributes:
    name: its name in tables, and of its speeds.
    codec: the codec of the leaves.
    biased: whether the gradient is not the mean of decoded payloads.
    feedback: whether workers keep a residual.
    omega: ``E|Q(g) - g|^2 / |g|^2`` for Gaussian numbers; None to measure it.
    density: the share of the elements that a sparse codec sends; None for all.
    points: the points of accuracy by which it ended above float32 in the worst of the
      study's trainings; None if none of them went to its end.
    last_dense: whether its paper leaves the last layer in float32. Names like ``head``
      in a path show that layer.
    by_size: whether bytes follow from the sizes of leaves, not from their shapes.
    verdict: the first words of a plan that chooses it.
  """

  name: str
  codec: LeafCodec
  biased: bool = False
  feedback: bool = False
  omega: float | None = None
  density: float | None = None
  points: float | None = None
  last_dense: bool = False
  by_size: bool = False
  verdict: str = "compress"

  def codec_for(self, paths: Sequence[str]) -> LeafCodec:
    """Returns the codec for leaves of these paths, with the last layer in float32."""
    if self.last_dense and any(map(is_last, paths)):
      return Policy([(_LAST, Dense()), ("", self.codec)])
    return self.codec

  def without_kernels(self) -> "Candidate":
    """Returns the candidate with a codec that runs XLA's code, if it has the choice."""
    if not hasattr(self.codec, "implementation"):
      return self
    codec = dataclasses.replace(cast(Any, self.codec), implementation="xla")
    return dataclasses.replace(self, codec=codec)


def _with_points(candidate: Candidate) -> Candidate:
  """Returns a candidate with the points of accuracy that the study found for it."""
  # `python -m benchmarks.models.package_accuracy` makes the file from the records.
  text = resources.files(__package__).joinpath("accuracy.json").read_text()
  return dataclasses.replace(candidate, points=json.loads(text).get(candidate.name))


DENSE = Candidate(name="float32", codec=Dense(), omega=0.0, points=0.0, by_size=True)

# Omegas are of a million normal numbers; a test measures some of them again.
_UNJUDGED: tuple[Candidate, ...] = (
  Candidate(
    name="bfloat16",
    codec=Dense(dtype=jnp.bfloat16),
    biased=True,
    feedback=True,
    omega=2.8e-6,
    by_size=True,
    verdict="send bfloat16",
  ),
  Candidate(name="QSGD-8", codec=QSGD(bits=8), omega=1.1e-4, by_size=True),
  Candidate(name="QSGD-4", codec=QSGD(bits=4), omega=0.036, by_size=True),
  Candidate(
    name="QSGD-2",
    codec=QSGD(bits=2, bucket_size=128),
    omega=1.26,
    by_size=True,
  ),
  Candidate(
    name="QSGD-2 fitted",
    codec=QSGD(bits=2, bucket_size=128, levels="nonuniform"),
    omega=0.504,
    by_size=True,
  ),
  Candidate(
    name="1-bit",
    codec=OneBit(bucket_size=64),
    biased=True,
    feedback=True,
    omega=0.353,
    by_size=True,
  ),
  Candidate(
    name="TernGrad",
    codec=Ternary(),
    omega=1.006,
    last_dense=True,
    by_size=True,
  ),
  *(
    Candidate(
      name=f"APS ({exponent}, {mantissa})",
      codec=FloatCast(exponent_bits=exponent, mantissa_bits=mantissa),
      biased=True,
      feedback=True,
      omega=omega,
      by_size=True,
    )
    for exponent, mantissa, omega in ((5, 2, 2.8e-3), (4, 3, 7e-4))
  ),
  Candidate(
    name="top 1 %",
    codec=TopK(density=0.01),
    biased=True,
    feedback=True,
    omega=0.916,
    density=0.01,
    by_size=True,
  ),
  Candidate(
    name="top 0.1 %",
    codec=TopK(density=0.001),
    biased=True,
    feedback=True,
    omega=0.987,
    density=0.001,
    by_size=True,
  ),
  Candidate(
    name="top 0.1 % ASQ",
    codec=TopK(density=0.001, quantize="asq"),
    biased=True,
    feedback=True,
    omega=0.989,
    density=0.001,
    by_size=True,
  ),
)
CANDIDATES = tuple(map(_with_points, _UNJUDGED))


def as_candidate(given: Any) -> Candidate:
  """Returns a candidate, made of a codec if need be; else raises ValueError."""
  if isinstance(given, Candidate):
    return given
  if not is_codec(given):
    raise ValueError(
      "`candidates` must hold codecs, or instances of gradcomp.cost.Candidate, got "
      f"{given!r}."
    )
  biased = not given.unbiased
  return Candidate(
    name=_name(given),
    codec=given,
    biased=biased,
    feedback=biased,
    density=getattr(given, "density", None),
  )


def is_last(path: str) -> bool:
  """Returns True if a path is an output layer's, by its name."""
  return re.search(_LAST, path) is not None


def _name(codec: LeafCodec) -> str:
  """Returns the codec's type with the options that differ from their defaults."""
  if not dataclasses.is_dataclass(codec):
    return repr(codec)
  options = [
    f"{field.name}={value!r}"
    for field in dataclasses.fields(codec)
    if (value := getattr(codec, field.name)) != field.default
  ]
  return f"{type(codec).__name__}({', '.join(options)})"


@functools.cache
def packaged_speeds(backend: str) -> Mapping[str, CodecSpeed]:
  """Returns the speeds in the package, by the names of candidates.

  They are those of ``codec_speed*.json`` in ``benchmarks/results/codecs``, scaled to
  one speed of the memory: see ``benchmarks/models/package_speeds.py``. Two cores worked
  for one process.

  Args:
    backend: JAX's name of it, like ``"cpu"``.

  Returns:
    The speeds.

  Raises:
    ValueError: there are none for the backend.

  Example:
    >>> f"{1e9 * packaged_speeds('cpu')['QSGD-4'].encode:.2f} ns an element"
    '0.49 ns an element'
  """
  text = resources.files(__package__).joinpath("speeds.json").read_text()
  backends = json.loads(text)
  if backend not in backends:
    raise ValueError(
      f"`speeds` must be given on {backend!r}: the package has those of "
      f'{tuple(backends)}; speeds="measure" measures each codec in a few seconds.'
    )
  return {name: CodecSpeed(**speed) for name, speed in backends[backend].items()}


def speeds_of(given: Given) -> tuple[Callable[[Candidate], SpeedOf | None], str]:
  """Returns a function from candidates to speeds, None if unknown; and a note on them.

  Leaves that travel in float32 take no time, but for their part of the wire. Raises
  ValueError for anything that is no :data:`Given`.
  """
  if given is None:
    backend = jax.default_backend()
    packaged = packaged_speeds(backend)
    says = f"Codec speeds are packaged ones of two cores (backend {backend!r})."
    return lambda x: _for(packaged.get(x.name)), says
  if given == "measure":
    says = "Codec speeds were measured on this device."
    return lambda x: _for(CodecSpeed.measure(x.codec)), says
  says = GIVEN
  if isinstance(given, CodecSpeed):
    return lambda _: _for(given), says
  if isinstance(given, Mapping):
    for name, speed in given.items():
      if not isinstance(speed, CodecSpeed):
        raise ValueError(
          f"`speeds` must be CodecSpeeds by name, got {name}: {speed!r}."
        )
    return lambda x: _for(given.get(x.name)), says
  if callable(given):
    return lambda _: _or_copied(given), says
  raise ValueError(
    '`speeds` must be None, "measure", a CodecSpeed, CodecSpeeds by the names of '
    f"candidates, or a function of codecs, got {given!r}."
  )


def _for(speed: CodecSpeed | None) -> SpeedOf | None:
  return None if speed is None else _or_copied(lambda codec: speed)


def _or_copied(speed: SpeedOf) -> SpeedOf:
  return lambda codec: (
    _COPIED if all(x.plain for x in codec.facts.each) else speed(codec)
  )
