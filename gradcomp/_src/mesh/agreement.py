"""Comparison of the traces of the processes of a run, before the first step runs.

Processes with different codecs or leaves would decode each other's words to wrong
numbers, and different counts of steps would block for ever. They compare by the
key-value store of the run, because collectives need equal programs already.
"""

import base64
import contextlib
import hashlib
import json
import os
import re
import sys
import time
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

from gradcomp._src.checks import see
from gradcomp._src.mesh import study, types
from gradcomp._src.mesh.axes import AxisName, axis_names
from gradcomp._src.version import WIRE, __version__

Part = dict[str, str]  # one transformation: its options and leaves, by their names
Record = list[Part]
Processes = tuple[int, ...]

# The digests that this process and those of a mesh have agreed on, in their order, and
# "" where they have not.
_agreed: dict[tuple[int, Processes], list[str]] = {}

# The parts of the record of the step that is being traced.
_open: ContextVar[list[Part] | None] = ContextVar("_open", default=None)


def run_store() -> Any:
  """Returns the client of the run's store; None in a run of one process."""
  if not jax.distributed.is_initialized():
    return None
  try:
    from jax._src import distributed  # JAX has no public name for it

    return distributed.global_state.client
  except (ImportError, AttributeError):
    warnings.warn(
      f"JAX {jax.__version__} has moved its key-value store: gradcomp does not compare "
      "the transformations of the processes.",
      RuntimeWarning,
      stacklevel=2,
    )
    return None


def is_alone() -> bool:
  """Returns True in a run of one process, and in a trace that nothing runs."""
  return run_store() is None or jax.process_count() == 1 or study.is_study()


def processes_of(mesh: Mesh | AbstractMesh) -> Processes:
  """Returns the processes of a mesh; empty if they are unknown, or only one."""
  if isinstance(mesh, Mesh):
    found = sorted({device.process_index for device in mesh.devices.flat})
  else:
    found = list(range(jax.process_count() if mesh.size == jax.device_count() else 0))
  return tuple(found) if len(found) > 1 and jax.process_index() in found else ()


def require_agreement(
  what: str, options: Any, leaves: Any, axes: AxisName | None = None, **trees: Any
) -> None:
  """Raises ValueError if another process traces another transformation here."""
  # `options` are locals() at the first line of a public function, or vars() of a
  # dataclass: a list of names would lack the next option.
  if is_alone():
    return
  mesh = types.mesh_of(leaves)
  names = () if axes is None else axis_names(axes)
  sizes = {"axes": {name: mesh.shape.get(name) for name in names}}
  part = _part(what, {**sizes, **options}, leaves, **trees)
  if (parts := _open.get()) is not None:
    parts.append(part)
  elif set(names).issubset(mesh.axis_names):  # else not all processes are known
    _compare([part], processes_of(mesh))


@contextlib.contextmanager
def one_record(mesh: Any, what: str, options: Any, trees: Any) -> Iterator[list[Part]]:
  """Compares all transformations that are traced in the body as one record.

  It yields the parts so far, which a body that traces again clears. The body may add to
  ``trees``. If it fails, the other processes read the error.
  """
  processes = () if is_alone() else processes_of(mesh)
  parts: list[Part] = []
  token = _open.set(parts)
  try:
    yield parts
  except Exception as error:
    text = f"{type(error).__name__}: {error}"[:500]
    _compare([{"transformation": what, "failed": text}], processes)
    raise
  finally:
    _open.reset(token)
  if processes:
    _compare([*parts, _part(what, options, **trees)], processes)


def _part(what: str, options: Any, leaves: Any = None, **trees: Any) -> Part:
  """Describes a transformation in words: leaves and options first, then its states."""
  # States come last, because other leaves or options are the cause of other states.
  part = {"transformation": what, "gradcomp": __version__}
  part |= {"WIRE": str(WIRE)} | _listed("leaves", leaves)
  with np.printoptions(threshold=sys.maxsize, floatmode="unique"):  # all of an array
    part |= {x: repr(y) for x, y in options.items() if not _is_told_elsewhere(y)}
  for name, tree in trees.items():
    part |= _listed(name, tree)
  # Addresses differ between processes.
  return {x: re.sub(r" at 0x[0-9a-f]+", "", text) for x, text in part.items()}


def _is_told_elsewhere(value: Any) -> bool:
  """Returns True for numbers of the state, and for optimizers, which show theirs."""
  if isinstance(value, list | tuple):
    return bool(value) and all(map(_is_told_elsewhere, value))
  return isinstance(value, jax.core.Tracer | optax.GradientTransformation)


def _listed(name: str, tree: Any) -> Part:
  """Describes the leaves of a tree in words, with their paths."""
  # Empty nodes are listed too: they distinguish chains of stateless transformations.
  is_empty = lambda x: isinstance(x, tuple) and not x
  size = lambda x: "" if is_empty(x) else list(np.shape(x))
  kind = lambda x: f"{getattr(x, 'dtype', type(x).__name__)}{size(x)}"
  nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_empty)
  told = (f"{jax.tree_util.keystr(path)} {kind(x)}" for path, x in nodes)
  return {f"{name}[{i}]": text for i, text in enumerate(told)}


def _compare(record: Record, processes: Processes) -> None:
  """Blocks until all processes have this n-th record; ValueError if one does not."""
  own, what = jax.process_index(), record[0]["transformation"]
  agreed, digest = _agreed.setdefault((own, processes), []), _hash(record)
  if not processes or digest in agreed:
    return
  folder, store = f"gradcomp/{_hash(processes)}/{len(agreed)}/", run_store()
  packed = base64.b64encode(zlib.compress(json.dumps(record).encode())).decode()
  # Others read the text if their digests differ.
  for name, text in (("text", packed), ("digest", digest)):
    # Also again, after an error or a new start.
    store.key_value_set(f"{folder}{name}/{own}", text, allow_overwrite=True)
  # By default it is longer than compiling a step that others have in a cache.
  limit = os.environ.get("GRADCOMP_PATIENCE_SECONDS", "600")
  waits = "failed" not in record[0]
  if waits and not re.fullmatch(r"\d*\.?\d+(e\d+)?", limit):
    raise ValueError(
      f"`GRADCOMP_PATIENCE_SECONDS` must be seconds, 0 or more, got {limit!r}; "
      "unset it to wait for ten minutes."
    )
  begin, pause, found = time.monotonic(), 0.001, dict[int, str]()
  while waits:
    pairs = store.key_value_dir_get(f"{folder}digest/")
    found = {int(name.rpartition("/")[2]): value for name, value in pairs}
    missing = [process for process in processes if process not in found]
    if not missing or set(found.values()) != {digest}:
      break
    if time.monotonic() > begin + float(limit):
      raise ValueError(
        f"`{what}` must be traced by all processes, got nothing from {_named(missing)} "
        f"in {float(limit):g} s; read their errors, start all with the same program, "
        "or raise GRADCOMP_PATIENCE_SECONDS."
      )
    time.sleep(pause)
    pause = min(2 * pause, 1.0)
  other = next((x for x in processes if found.get(x, digest) != digest), None)
  # Where nobody has agreed, all go on to the next record.
  agreed.append(digest if waits and other is None else "")
  if other is not None:
    text = store.blocking_key_value_get(f"{folder}text/{other}", 10_000)
    theirs = json.loads(zlib.decompress(base64.b64decode(text)))
    raise ValueError(_difference(record, theirs, found, other))


def _difference(own: Record, theirs: Record, found: dict[int, str], other: int) -> str:
  """Returns the sentence that names the first difference of two records."""
  what, rule = own[0]["transformation"], "must be traced by all processes"
  if failed := theirs[0].get("failed"):
    return f"`{what}` {rule}, but process {other} failed: {failed}"
  mine, others = (
    {(i, name): text for i, part in enumerate(x, 1) for name, text in part.items()}
    for x in (own, theirs)
  )
  names = (x for x in mine | others if mine.get(x) != others.get(x))
  at = min(names, key=lambda x: x[0])
  got, those = (
    f"{x.get(at, 'nothing')} in {_named([y for y in found if found[y] == found[i]])}"
    for x, i in ((mine, jax.process_index()), (others, other))
  )
  what = (others | mine)[at[0], "transformation"]
  place = f"number {at[0]} of the step, {what}" if len(own) > 1 else what
  return (
    f"`{at[1]}` must be the same in all processes, which read each other's codes, got "
    f"{got} and {those}, in {place}; start all processes with the same program, "
    "options and version of gradcomp."
    f"{see('must-be-the-same-in-all-processes')}"
  )


def _hash(value: Any) -> str:
  return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]


def _named(processes: Sequence[int]) -> str:
  """Lists processes in words, the first five by number."""
  shown = ", ".join(map(str, sorted(processes)[:5]))
  more = f" and {len(processes) - 5} more" if processes[5:] else ""
  return f"process{'es' if processes[1:] else ''} {shown}{more}"
