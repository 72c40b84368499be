"""The codecs that a plan compares, with their speeds."""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from gradcomp._src.codecs import dense, one_bit, policy, protocol, ternary
from gradcomp._src.codecs.floats.float_cast import FloatCast
from gradcomp._src.codecs.qsgd import QSGD
from gradcomp._src.codecs.sums.records import Leaf
from gradcomp._src.codecs.top_k import TopK
from gradcomp._src.cost.exchange import NO_WORK, Speeds
from gradcomp._src.cost.link import CodecSpeed
from gradcomp._src.mesh import study

Named = Literal["measure", "cpu", "H100", "TPU v5e"]
Given = Speeds | Mapping[str, CodecSpeed] | Named | None
_SPEEDS = "Codec speeds are"
# A sentence about the package's speeds, and the platform of their devices, by name.
SOURCES: dict[str, tuple[str, study.Platform]] = {
  "cpu": (f"{_SPEEDS} packaged ones of two cores (backend 'cpu').", "cpu"),
  "H100": (f"{_SPEEDS} packaged ones of an NVIDIA H100.", "gpu"),
  "TPU v5e": (f"{_SPEEDS} XLA's estimate for a TPU v5e: nothing was timed.", "tpu"),
}
# By what a device says of itself.
_KINDS = {"NVIDIA H100 80GB HBM3": "H100", "TPU v5 lite": "TPU v5e"}
GIVEN = f"{_SPEEDS} those that were given."

# Output layers by the names that people give them, as whole parts of a path.
_LAST = r"(^|/)(head|lm_head|classifier|logits|output|predictions|fc)(/|$)"


class Record(NamedTuple):
  """The points of accuracy of one setting of the study, seed by seed beside float32."""

  task: str  # the network, and its data
  optimizer: str
  workers: int
  seeds: int
  points: float  # above float32, the mean over seeds
  half: float  # of its interval of 95 %

  def far(self, workers: int, optimizer: str | None) -> tuple[bool, float]:
    """Returns whether it is by another optimizer, and the doublings of its workers."""
    other = optimizer not in (None, self.optimizer)
    return other, abs(math.log2(self.workers / workers))

  def __str__(self) -> str:
    where = f"{self.task}, {self.optimizer}, {self.workers} workers, {self.seeds} seeds"
    return f"{self.points:+.2f} ± {self.half:.2f} points from float32 ({where})"


class Candidate(NamedTuple):
  """A setting that a plan may choose."""

  name: str  # in tables, and of its speeds
  codec: protocol.LeafCodec  # of the leaves
  biased: bool = False  # whether the gradient is not the mean of decoded payloads
  feedback: bool = False  # whether workers keep a residual
  omega: float | None = None  # E|Q(g) - g|^2 / |g|^2 of normal numbers; None to measure
  density: float | None = None  # the share of elements that a sparse codec sends
  records: tuple[Record, ...] = ()  # in the study; none if no one saw all of its data
  last_dense: bool = False  # whether its paper leaves the last layer in float32
  verdict: str = "compress"  # the first words of a plan that chooses it

  def codec_for(self, paths: Sequence[str]) -> protocol.LeafCodec:
    """Returns the codec for leaves of these paths, with the last layer in float32."""
    if self.last_dense and any(re.search(_LAST, path) for path in paths):
      return policy.Policy([(_LAST, dense.Dense()), ("", self.codec)])
    return self.codec


@functools.cache
def _packaged(name: str) -> Mapping[str, Any]:
  """Returns a file of the package, which scripts of `benchmarks.models` make."""
  return json.loads(resources.files(__package__).joinpath(name).read_text())


def _known(name: str, given: Any, omega: float | None = None, **more: Any) -> Candidate:
  """Returns a candidate that keeps a residual if its codec is biased."""
  biased, records = not given.unbiased, _packaged("accuracy.json").get(name, ())
  more["records"] = tuple(Record(*x) for x in records)
  density = getattr(given, "density", None)
  return Candidate(name, given, biased, biased, omega, density, **more)


DENSE = _known("float32", dense.Dense(), 0.0)

# Omegas are of a million normal numbers; a test measures some of them again.
CANDIDATES = (
  _known("bfloat16", dense.Dense(dtype=jnp.bfloat16), 2.8e-6, verdict="send bfloat16"),
  _known("QSGD-8", QSGD(bits=8), 1.1e-4),
  _known("QSGD-4", QSGD(bits=4), 0.036),
  _known("QSGD-2", QSGD(bits=2, bucket_size=128), 1.26),
  _known("QSGD-2 fitted", QSGD(bits=2, bucket_size=128, levels="nonuniform"), 0.504),
  _known("1-bit", one_bit.OneBit(bucket_size=64), 0.353),
  _known("TernGrad", ternary.Ternary(), 1.006, last_dense=True),
  _known("APS (5, 2)", FloatCast(exponent_bits=5, mantissa_bits=2), 2.8e-3),
  _known("APS (4, 3)", FloatCast(exponent_bits=4, mantissa_bits=3), 7e-4),
  _known("top 1 %", TopK(density=0.01), 0.916),
  _known("top 0.1 %", TopK(density=0.001), 0.987),
  _known("top 0.1 % ASQ", TopK(density=0.001, quantize="asq"), 0.989),
)


def as_candidate(given: Any) -> Candidate:
  """Returns a candidate, made of a codec if need be; else raises ValueError."""
  if isinstance(given, Candidate):
    return given
  if not protocol.is_codec(given):
    raise ValueError(
      "`candidates` must hold codecs, or those of gradcomp.cost.PlanOptions, got "
      f"{given!r}."
    )
  return _known(name_of(given), given)


def name_of(codec: protocol.LeafCodec) -> str:
  """Returns the codec's type with the options that differ from their defaults."""
  if not dataclasses.is_dataclass(codec):
    return repr(codec)
  pairs = [(x, getattr(codec, x.name)) for x in dataclasses.fields(codec)]
  options = [f"{x.name}={value!r}" for x, value in pairs if value != x.default]
  return f"{type(codec).__name__}({', '.join(options)})"


def packaged_speeds(device: str) -> Mapping[str, CodecSpeed]:
  """Returns a device's packaged speeds, by the names of candidates, or ValueError."""
  # On a CPU with two cores a process, on a GPU, and for a TPU from compiled programs.
  devices = _packaged("speeds.json")
  if device not in devices:
    raise ValueError(
      f"`speeds` must be given on {device!r}: the package has those of "
      f'{tuple(devices)}; speeds="measure" measures each codec in a few seconds.'
    )
  return {name: CodecSpeed(**speed) for name, speed in devices[device].items()}


def speeds_of(given: Any, platform: str) -> tuple[Any, str]:
  """Returns the given speeds, or the package's; and a note on them."""
  note = GIVEN
  if given is None or (isinstance(given, str) and given in SOURCES):
    device = given or _KINDS.get(study.device_kind(platform), platform)
    given, note = packaged_speeds(device), SOURCES[device][0]
  if isinstance(given, Mapping):
    for name, speed in given.items():
      if not isinstance(speed, CodecSpeed):
        got = f"{name}: {speed!r}"
        raise ValueError(f"`speeds` must be CodecSpeeds by name, got {got}.")
  elif isinstance(given, str) and given == "measure":
    note = "Codec speeds were measured on this device."
  elif not (isinstance(given, CodecSpeed) or callable(given)):
    raise ValueError(
      f'`speeds` must be None, "measure", one of {tuple(SOURCES)}, a CodecSpeed, '
      f"CodecSpeeds by the names of candidates, or a function of codecs, got {given!r}."
    )
  return given, note


def speeds_for(candidate: Candidate, given: Any) -> Speeds | None:
  """Returns the speeds of a candidate's leaves; None if none are known by its name."""
  if isinstance(given, Mapping):
    if candidate.name not in given and not candidate.codec.facts.parts:
      return None
    given = given.get(candidate.name, functools.partial(_nearest, given))
  if given == "measure":
    given = CodecSpeed.measure(candidate.codec)
  known = lambda codec: given if isinstance(given, CodecSpeed) else given(codec)
  plain = lambda codec: all(x.plain for x in codec.facts.each)
  # A leaf in float32 takes only its wire.
  return lambda codec: NO_WORK if plain(codec) else known(codec)


def _nearest(speeds: Mapping[str, CodecSpeed], codec: protocol.LeafCodec) -> CodecSpeed:
  """Returns the speed of the candidate of this type of codec, with the nearest bits."""
  alike = [x for x in CANDIDATES if type(x.codec) is type(codec) and x.name in speeds]
  if not alike:
    raise ValueError(f"`speeds` has none of a codec like {name_of(codec)}")
  bound = lambda x: x.bind(Leaf((1024, 1024)))
  words = lambda x: bound(x).row_words / bound(x).tile_size  # of an element
  far = lambda candidate: abs(words(candidate.codec) - words(codec))
  return speeds[min(alike, key=far).name]
