"""Runs a row of the table: one compiled update, five calls, one record for all laws."""

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import gradcomp
from gradcomp._src.testing import modes
from gradcomp.codecs import Codec, FloatCast
from tests.support import laws

ROWS = Path(__file__).with_name("rows.txt")
SEED = 7
EXCHANGES = ("all_gather", "two_shot", "ring", "hierarchical", "psum", "local")
FEEDBACK = {
  "none": None,
  "error": "error",
  "momentum": "momentum",
  "nesterov": gradcomp.MomentumFeedback(nesterov=True),
  "ef21": "ef21",
  "int8": gradcomp.ErrorFeedback(residual_dtype="int8"),
  "bfloat16": gradcomp.ErrorFeedback(residual_dtype=jnp.bfloat16),
}
WORKERS = (1, 2, 3, 4, 8)
ZEROS = 512  # elements that are zero in all gradients of ``a``
GROUPS = {1: 1, 2: 2, 3: 3, 4: 2, 8: 2}


class Row(NamedTuple):
  """A line of ``rows.txt``.

  Attributes:
    setting: the name of a codec in ``laws.SETTINGS``.
    exchange: one of ``EXCHANGES``; groups are of ``GROUPS`` workers.
    feedback: a key of ``FEEDBACK``.
    place: a key of ``PLACES``.
    workers: N.
  """

  setting: str
  exchange: str
  feedback: str
  place: str
  workers: int

  @property
  def name(self) -> str:
    return " ".join(map(str, self))

  @property
  def anywhere(self) -> str:
    """The name without the place, which must change no bits."""
    return " ".join(map(str, (*self[:3], self.workers)))

  @property
  def codec(self) -> Codec:
    return laws.SETTINGS[self.setting].codec

  def transformation(self) -> Any:
    codec = laws.here(self.codec)
    codec = laws.kept(codec) if self.feedback != "none" else codec
    return gradcomp.compress(
      codec,
      axis_name=AXES.get(self.place, "data"),
      exchange=self._exchange(),
      feedback=FEEDBACK[self.feedback],
      min_leaf_size=64,
      key=SEED,
    )

  def _exchange(self) -> Any:
    if self.exchange != "hierarchical":
      return self.exchange
    size = None if self.place == "two_axes" else GROUPS[self.workers]
    return gradcomp.exchange.Hierarchical(group_size=size)

  @property
  def sizes(self) -> int | tuple[int, int]:
    """N, or the sizes of both axes."""
    return (self.workers // 2, 2) if self.place == "two_axes" else self.workers

  @property
  def allowed(self) -> bool:
    """Whether the library takes it, and the place has so many workers."""
    if self.place in ("checked", "explicit") and self.exchange == "local":
      return False  # updates are not equal, and stay addends
    fits = self.workers in PLACES[self.place][1]
    return fits and _taken(self.setting, self.exchange, self.feedback)


@functools.cache
def _taken(setting: str, exchange: str, feedback: str) -> bool:
  try:
    Row(setting, exchange, feedback, "vmap", 4).transformation()
  except ValueError:
    return False
  return True


class Line(NamedTuple):
  """A row of the file, the hash of its bits or "-", and "slow" or nothing."""

  row: Row
  hash: str
  slow: str = ""


def read() -> tuple[int, list[Line]]:
  """The wire of the hashes, and the lines."""
  first, *rest = (line.split() for line in ROWS.read_text().splitlines())
  return int(first[2]), [Line(Row(*x[:4], int(x[4])), *x[5:]) for x in rest]


def write(wire: int, lines: Iterable[Line]) -> None:
  texts = [" ".join((x.row.name, x.hash, x.slow)).rstrip() for x in sorted(lines)]
  ROWS.write_text("\n".join([f"# wire {wire}", *texts]) + "\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(modes.Run):
  """Holds what a row did; in the last step one worker has a NaN."""

  row: Row


def sizes(codec: Codec) -> tuple[int, int]:
  """The elements of the leaves that are encoded: some tiles, and one and a part."""
  columns = getattr(codec, "per_column", False)  # are as long as the leaf
  tile = codec.bucket_size if columns else codec.tile_size or 1000
  return max((4 if tile <= 2048 else 2) * tile, 2 * ZEROS) + 77, tile + 45


def leaves(codec: Codec) -> dict[str, jax.ShapeDtypeStruct]:
  """A leaf of no whole rows, a half, small leaves that stay dense, and an empty one."""
  long, short = sizes(codec)
  shape = lambda *s, d=np.float32: jax.ShapeDtypeStruct(s, d)
  matrix = (-(-long // 7), 7)
  return {
    "a": shape(*matrix),
    "b": shape(3),
    "e": shape(0, 3),
    "h": shape(short, d=np.float16),
    "s": shape(),
  }


def gradients(row: Row, step: int) -> dict[str, np.ndarray]:
  """Gaussian numbers; ``a`` begins with zeros and constants, and halves are large.

  All workers' halves have one sign in an element, so that sums of four overflow.
  """
  codec, workers = row.codec, row.workers
  rng = np.random.default_rng(step)
  tree = {
    name: rng.standard_normal((workers, *leaf.shape)).astype(leaf.dtype)
    for name, leaf in leaves(codec).items()
  }
  flat = tree["a"].reshape(workers, -1)
  flat[:, :ZEROS] = 0.0
  flat[:, ZEROS : ZEROS + 64] = 0.25
  if of_any_range(codec):
    near = np.sign(tree["h"][:1]) * rng.uniform(0.3, 0.39, tree["h"].shape)
    # With momentum three of them add up.
    top = 65504 / (3 if row.feedback in ("momentum", "nesterov") else 1)
    tree["h"] = (top * near).astype(np.float16)
  if step == 2:
    flat[workers // 2, flat.shape[1] // 2] = np.nan
  return tree


def of_any_range(codec: Codec) -> bool:
  """Whether it sends float16 of any size: a constant scale has a range of its own."""
  if isinstance(codec, FloatCast) and codec.scale != "auto":
    return codec.format.max_finite / codec.scale > 4 * 65504
  return getattr(codec, "exponent_offset", None) is None and not codec.facts.own_units


def _beside(tx: Any, workers: int) -> modes.Place:
  """Beside an axis of the compiler, over which nothing is split."""
  devices = jax.devices()[: 2 * workers]
  mesh = jax.make_mesh((workers, 2), ("data", "model"), _AUTO, devices=devices)
  return modes.sharded_map(tx, workers, "data", mesh=mesh, axis_names={"data"})


def _two_axes(tx: Any, workers: int) -> modes.Place:
  devices, axes = jax.devices()[:workers], AXES["two_axes"]
  mesh = jax.make_mesh((workers // 2, 2), axes, _AUTO, devices=devices)
  return modes.sharded_map(tx, workers, *axes, mesh=mesh)


_AUTO = (AxisType.Auto, AxisType.Auto)
_modes = lambda name: functools.partial(modes.started, name)
# Where a transformation runs, and the N that it takes there.
PLACES = {
  "vmap": (_modes("vmap"), WORKERS),
  "pmap": (_modes("pmap"), WORKERS),
  "shard_map": (_modes("shard_map_unchecked"), WORKERS),
  "checked": (_modes("shard_map"), WORKERS),
  "auto": (_modes(modes.AUTO), WORKERS),
  # Gradients over N are exact for a power of two alone.
  "explicit": (_modes(modes.EXPLICIT), (1, 2, 4, 8)),
  "two_axes": (_two_axes, (2, 4, 8)),
  "beside": (_beside, (1, 2, 3, 4)),
}
AXES = {"two_axes": ("host", "chip")}


def run(row: Row) -> Run:
  """Compiles a row's update once, and calls it four times."""
  tx = row.transformation()
  params = {k: np.zeros(x.shape, x.dtype) for k, x in leaves(row.codec).items()}
  place = PLACES[row.place][0](tx, row.workers)
  given = [gradients(row, step) for step in range(3)]
  first = jax.device_put(given[0], place.where)
  lowered = place.step.lower(first, place.init(params), params)
  compiled = lowered.compile()
  program = None
  if place.where is not None:
    # Where XLA splits a program over an axis, it is the compiled one that is split.
    program = compiled if row.place == "beside" else lowered
  place = place._replace(step=lambda *given: jax.device_get(compiled(*given)))
  told = {"mode": row.place, "sizes": row.sizes, "program": program, "row": row}
  return Run(transformation=tx, params=params, gradients=given, place=place, **told)
