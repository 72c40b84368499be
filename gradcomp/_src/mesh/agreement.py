"""Comparison of the traces of the processes of a run, before the first step runs.

Two processes with different codecs or leaves would decode each other's words to wrong
numbers. Two that count the steps of a round differently would wait for ever. They write
to the key-value store of the run, because collectives need equal programs already.
"""

import base64
import contextlib
import hashlib
import itertools
import json
import os
import re
import sys
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

from gradcomp._src.checks import see
from gradcomp._src.mesh.axes import AxisName, axis_names
from gradcomp._src.mesh.study import is_study
from gradcomp._src.mesh.types import mesh_of
from gradcomp._src.version import WIRE, __version__

Part = dict[str, str]  # one transformation: its options and leaves, by their names
Record = Sequence[Part]

# The digests that this process and those of a mesh have agreed on, in their order, and
# "" where they have not.
_agreed: dict[tuple[int, tuple[int, ...]], list[str]] = {}

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
      f"JAX {jax.__version__} has moved its key-value store, so that gradcomp does not "
      "compare the transformations of the processes.",
      RuntimeWarning,
      stacklevel=2,
    )
    return None


def is_alone() -> bool:
  """Returns True in a run of one process, and in a trace that nothing runs."""
  return run_store() is None or jax.process_count() == 1 or is_study()


def processes_of(mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
  """Returns the processes of a mesh; empty if they are unknown, or only one."""
  if isinstance(mesh, Mesh):
    found = sorted({device.process_index for device in mesh.devices.flat})
  else:
    found = list(range(jax.process_count() if mesh.size == jax.device_count() else 0))
  return tuple(found) if len(found) > 1 and jax.process_index() in found else ()


def require_agreement(
  what: str,
  options: Mapping[str, Any],
  leaves: Any,
  axes: AxisName | None = None,
  **trees: Any,
) -> None:
  """Raises ValueError if another process traces another transformation in this place.

  ``options`` come from ``locals()`` at the first line of a public function, or from
  ``vars`` of a dataclass: a list of names would lack the next option.

  In :func:`one_record` it adds to the record. Elsewhere it compares a record of its
  own, if the mesh has all devices of the run: only then are all processes known.
  """
  if is_alone():
    return
  mesh = mesh_of(leaves)
  names = () if axes is None else axis_names(axes)
  sizes = {"axes": {name: mesh.shape.get(name) for name in names}}
  part = _part(what, {**sizes, **options}, leaves, **trees)
  if (parts := _open.get()) is not None:
    parts.append(part)
  elif set(names).issubset(mesh.axis_names):
    _compare([part], processes_of(mesh))


@contextlib.contextmanager
def one_record(
  mesh: Any, what: str, options: Mapping[str, Any], trees: Mapping[str, Any]
) -> Iterator[list[Part]]:
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
    if processes:
      failed = {"failed": f"{type(error).__name__}: {error}"[:500]}
      _write(f"{_written([failed], processes)}digest/", "failed")
      _agreed[jax.process_index(), processes].append("")
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
  part |= {x: _words(y) for x, y in options.items() if not _is_told_elsewhere(y)}
  for name, tree in trees.items():
    part |= _listed(name, tree)
  return part


def _words(value: Any) -> str:
  """Describes an option in words, with all elements of arrays."""
  with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
    # Addresses differ between processes.
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _is_told_elsewhere(value: Any) -> bool:
  """Returns True for numbers of the state, and for optimizers, which show theirs."""
  if isinstance(value, list | tuple):
    return bool(value) and all(map(_is_told_elsewhere, value))
  return isinstance(value, jax.core.Tracer | optax.GradientTransformation)


def _listed(name: str, tree: Any) -> Part:
  """Describes the leaves of a tree in words, with their paths."""
  # Empty nodes are listed too: they distinguish chains of stateless transformations.
  is_empty = lambda x: isinstance(x, tuple) and not x
  result = {}
  nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_empty)
  for i, (path, x) in enumerate(nodes):
    kind = getattr(x, "dtype", type(x).__name__)
    size = "" if is_empty(x) else list(np.shape(x))
    result[f"{name}[{i}]"] = f"{jax.tree_util.keystr(path)} {kind}{size}"
  return result


def _compare(record: Record, processes: tuple[int, ...]) -> None:
  """Blocks until all processes have this n-th record; ValueError if one does not."""
  digest, own = _hash(record), (jax.process_index(), processes)
  if not processes or digest in _agreed.get(own, ()):
    return
  folder, what = _written(record, processes), record[0]["transformation"]
  found = _meet(f"{folder}digest/", digest, processes, what)
  other = next((x for x in processes if found.get(x, digest) != digest), None)
  # Where nobody has agreed, all go on to the next record.
  _agreed[own].append(digest if other is None else "")
  if other is not None:
    text = run_store().blocking_key_value_get(f"{folder}text/{other}", 10_000)
    theirs = json.loads(zlib.decompress(base64.b64decode(text)))
    raise ValueError(_difference(record, theirs, found, other))


def _written(record: Record, processes: tuple[int, ...]) -> str:
  """Writes the next record of some processes, and returns its folder."""
  # Others read it if their digests differ.
  number = len(_agreed.setdefault((jax.process_index(), processes), []))
  folder = f"gradcomp/{_hash(processes)}/{number}/"
  text = base64.b64encode(zlib.compress(json.dumps(record).encode())).decode()
  _write(f"{folder}text/", text)
  return folder


def _meet(
  folder: str, own: str, processes: Sequence[int], what: str
) -> Mapping[int, str]:
  """Writes a digest; returns all digests, or the first ones once one differs."""
  _write(folder, own)
  # By default it is longer than compiling a step that others have in a cache.
  text = os.environ.get("GRADCOMP_PATIENCE_SECONDS", "600")
  if not re.fullmatch(r"\d*\.?\d+(e\d+)?", text):
    raise ValueError(
      f"`GRADCOMP_PATIENCE_SECONDS` must be seconds, 0 or more, got {text!r}; "
      "unset it to wait for ten minutes."
    )
  deadline, pause = time.monotonic() + float(text), 0.001
  while True:
    pairs = run_store().key_value_dir_get(folder)
    found = {int(name.rpartition("/")[2]): value for name, value in pairs}
    missing = [process for process in processes if process not in found]
    if not missing or set(found.values()) != {own}:
      return found
    if time.monotonic() > deadline:
      raise ValueError(
        f"`{what}` must be traced by all processes, got nothing from {_named(missing)} "
        f"in {float(text):g} s; look what is wrong there, start all with the same "
        "program, or set GRADCOMP_PATIENCE_SECONDS to more."
      )
    time.sleep(pause)
    pause = min(2 * pause, 1.0)


def _difference(
  own: Record, theirs: Record, found: Mapping[int, str], other: int
) -> str:
  """Returns the sentence that names the first difference of two records."""
  if failed := theirs[0].get("failed"):
    what = own[0]["transformation"]
    return (
      f"`{what}` must be traced by all processes, but process {other} failed: {failed}"
    )
  none: Part = {}
  pairs = enumerate(itertools.zip_longest(own, theirs, fillvalue=none), 1)
  number, what, name, *values = next(
    (number, (a or b)["transformation"], name, a.get(name), b.get(name))
    for number, (a, b) in pairs
    for name in {**a, **b}
    if a.get(name) != b.get(name)
  )
  mine, those = (
    f"{value or 'nothing'} in {_named([x for x in found if found[x] == found[at]])}"
    for value, at in zip(values, (jax.process_index(), other), strict=True)
  )
  place = f"number {number} of the step, {what}" if len(own) > 1 else what
  return (
    f"`{name}` must be the same in all processes, which read each other's codes, got "
    f"{mine} and {those}, in {place}; start all processes with the same program, "
    "options and version of gradcomp."
    f"{see('must-be-the-same-in-all-processes')}"
  )


def _write(folder: str, text: str) -> None:
  """Writes a text of this process, also again after an error or a new start."""
  key = f"{folder}{jax.process_index()}"
  run_store().key_value_set(key, text, allow_overwrite=True)


def _hash(value: Any) -> str:
  return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]


def _named(processes: Sequence[int]) -> str:
  """Lists processes in words, the first five by number."""
  shown = ", ".join(map(str, sorted(processes)[:5]))
  more = f" and {len(processes) - 5} more" if processes[5:] else ""
  return f"process{'es' if processes[1:] else ''} {shown}{more}"
