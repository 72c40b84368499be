"""Finds how fast codecs are: packaged, measured, or given."""

import functools
import json
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Literal

import jax

from gradcomp._src.codecs import sums
from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.cost.cluster import CodecSpeed
from gradcomp._src.cost.planner.candidates import Candidate

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


@functools.cache
def packaged_speeds(backend: str) -> Mapping[str, CodecSpeed]:
  """Returns the speeds that come with gradcomp, by the names of candidates.

  They are those of ``benchmarks/results/codec_speed*.json``, scaled to one speed of the
  memory: see ``benchmarks/plan_speeds.py``. Two cores worked for one process.

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
  """Returns the speeds of each candidate, None where they are unknown; and a sentence.

  Leaves that travel in float32 take no time, beside their part of the wire.

  Raises:
    ValueError: ``given`` is none of these.
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
  return lambda codec: _COPIED if sums.of(codec).plain else speed(codec)
