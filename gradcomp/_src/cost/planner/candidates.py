"""The codecs that a plan compares, with their speeds."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any, Literal

import jax.numpy as jnp

from gradcomp._src.codecs.dense import Dense
from gradcomp._src.codecs.floats.float_cast import FloatCast
from gradcomp._src.codecs.one_bit import OneBit
from gradcomp._src.codecs.policy import Policy
from gradcomp._src.codecs.protocol import LeafCodec, is_codec
from gradcomp._src.codecs.qsgd import QSGD
from gradcomp._src.codecs.sums.records import Leaf
from gradcomp._src.codecs.ternary import Ternary
from gradcomp._src.codecs.top_k import TopK
from gradcomp._src.cost.exchange import NO_WORK, Speeds
from gradcomp._src.cost.link import CodecSpeed
from gradcomp._src.mesh.platforms import Platform, device_kind

SpeedOf = Callable[[LeafCodec], CodecSpeed]  # of a leaf's codec
Named = Literal["measure", "cpu", "H100", "TPU v5e"]

# A sentence about the package's speeds, and the platform of their devices, by name.
SOURCES: dict[str, tuple[str, Platform]] = {
  "cpu": ("Codec speeds are packaged ones of two cores (backend 'cpu').", "cpu"),
  "H100": ("Codec speeds are packaged ones of an NVIDIA H100.", "gpu"),
  "TPU v5e": (
    "Codec speeds are XLA's estimate for a TPU v5e: nothing was timed.",
    "tpu",
  ),
}
# By what a device says of itself.
_KINDS = {"NVIDIA H100 80GB HBM3": "H100", "TPU v5 lite": "TPU v5e"}
GIVEN = "Codec speeds are those that were given."

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
  verdict: str = "compress"

  def codec_for(self, paths: Sequence[str]) -> LeafCodec:
    """Returns the codec for leaves of these paths, with the last layer in float32."""
    if self.last_dense and any(map(is_last, paths)):
      return Policy([(_LAST, Dense()), ("", self.codec)])
    return self.codec


def _candidate(name: str, codec: LeafCodec, **options: Any) -> Candidate:
  """Returns a candidate that keeps a residual if its codec is biased."""
  biased = not codec.unbiased
  return Candidate(name=name, codec=codec, biased=biased, feedback=biased, **options)


def _known(name: str, codec: LeafCodec, omega: float, **options: Any) -> Candidate:
  """Returns a candidate with the points of accuracy that the study found for it."""
  # `python -m benchmarks.models.package_accuracy` makes the file from the records.
  text = resources.files(__package__).joinpath("accuracy.json").read_text()
  given = {"points": json.loads(text).get(name)} | options
  return _candidate(name, codec, omega=omega, **given)


DENSE = _known("float32", Dense(), 0.0, points=0.0)

# Omegas are of a million normal numbers; a test measures some of them again.
CANDIDATES = (
  _known("bfloat16", Dense(dtype=jnp.bfloat16), 2.8e-6, verdict="send bfloat16"),
  _known("QSGD-8", QSGD(bits=8), 1.1e-4),
  _known("QSGD-4", QSGD(bits=4), 0.036),
  _known("QSGD-2", QSGD(bits=2, bucket_size=128), 1.26),
  _known("QSGD-2 fitted", QSGD(bits=2, bucket_size=128, levels="nonuniform"), 0.504),
  _known("1-bit", OneBit(bucket_size=64), 0.353),
  _known("TernGrad", Ternary(), 1.006, last_dense=True),
  _known("APS (5, 2)", FloatCast(exponent_bits=5, mantissa_bits=2), 2.8e-3),
  _known("APS (4, 3)", FloatCast(exponent_bits=4, mantissa_bits=3), 7e-4),
  _known("top 1 %", TopK(density=0.01), 0.916, density=0.01),
  _known("top 0.1 %", TopK(density=0.001), 0.987, density=0.001),
  _known("top 0.1 % ASQ", TopK(density=0.001, quantize="asq"), 0.989, density=0.001),
)


def as_candidate(given: Any) -> Candidate:
  """Returns a candidate, made of a codec if need be; else raises ValueError."""
  if isinstance(given, Candidate):
    return given
  if not is_codec(given):
    raise ValueError(
      "`candidates` must hold codecs, or instances of gradcomp.cost.Candidate, got "
      f"{given!r}."
    )
  return _candidate(name_of(given), given, density=getattr(given, "density", None))


def is_last(path: str) -> bool:
  """Returns True if a path is an output layer's, by its name."""
  return re.search(_LAST, path) is not None


def name_of(codec: LeafCodec) -> str:
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
def packaged_speeds(device: str) -> Mapping[str, CodecSpeed]:
  """Returns a device's packaged speeds, by the names of candidates, or ValueError."""
  # `benchmarks/models/package_speeds.py` makes them: on a CPU with two cores a process,
  # on a GPU, and for a TPU from the programs that its compiler makes of the codecs.
  text = resources.files(__package__).joinpath("speeds.json").read_text()
  devices = json.loads(text)
  if device not in devices:
    raise ValueError(
      f"`speeds` must be given on {device!r}: the package has those of "
      f'{tuple(devices)}; speeds="measure" measures each codec in a few seconds.'
    )
  return {name: CodecSpeed(**speed) for name, speed in devices[device].items()}


def speeds_of(
  given: Any, platform: str
) -> tuple[Callable[[Candidate], Speeds | None], str]:
  """Returns a function from candidates to speeds, None if unknown; and a note.

  Without given ones, they are the package's for the device that is in use.
  """
  if given is None or (isinstance(given, str) and given in SOURCES):
    device = given or _KINDS.get(device_kind(platform), platform)
    speeds = packaged_speeds(device)
    return functools.partial(_named, speeds), SOURCES[device][0]
  if given == "measure":
    says = "Codec speeds were measured on this device."
    return lambda x: CodecSpeed.measure(x.codec), says
  if isinstance(given, Mapping):
    for name, speed in given.items():
      if not isinstance(speed, CodecSpeed):
        raise ValueError(
          f"`speeds` must be CodecSpeeds by name, got {name}: {speed!r}."
        )
    return functools.partial(_named, given), GIVEN
  if isinstance(given, CodecSpeed) or callable(given):
    return lambda _: given, GIVEN
  raise ValueError(
    f'`speeds` must be None, "measure", one of {tuple(SOURCES)}, a CodecSpeed, '
    f"CodecSpeeds by the names of candidates, or a function of codecs, got {given!r}."
  )


def _named(speeds: Mapping[str, CodecSpeed], candidate: Candidate) -> Speeds | None:
  """Returns the speeds of a candidate by its name, or of a policy's leaves."""
  if candidate.name in speeds or not candidate.codec.facts.parts:
    return speeds.get(candidate.name)
  return functools.partial(_nearest, speeds)


def _nearest(speeds: Mapping[str, CodecSpeed], codec: LeafCodec) -> CodecSpeed:
  """Returns the speed of the candidate of this type of codec, with the nearest bits."""
  alike = [x for x in CANDIDATES if type(x.codec) is type(codec) and x.name in speeds]
  if not alike:
    raise ValueError(f"`speeds` has none of a codec like {name_of(codec)}")
  far = lambda candidate: abs(_bits(candidate.codec) - _bits(codec))
  return speeds[min(alike, key=far).name]


def _bits(codec: LeafCodec) -> float:
  """Returns the bits of an element in the rows of a large leaf."""
  bound = codec.bind(Leaf((1024, 1024)))
  return 32 * bound.row_words / bound.tile_size


def by_leaf(speeds: Speeds) -> SpeedOf:
  """Returns the speeds of leaves' codecs: a leaf in float32 takes only its wire."""
  plain = lambda codec: all(x.plain for x in codec.facts.each)
  known = lambda codec: speeds if isinstance(speeds, CodecSpeed) else speeds(codec)
  return lambda codec: NO_WORK if plain(codec) else known(codec)
