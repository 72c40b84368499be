"""Comparison of transformations between processes, before the first step runs.

A collective moves words and does not know their format. Two processes with different
codecs or leaves would decode each other's words to wrong numbers. Two that count the
steps of a round differently would wait for each other for ever. So each process
publishes a record of the traced transformations, and waits for those of all others.
"""

import base64
import contextlib
import hashlib
import itertools
import json
import os
import re
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from gradcomp._src.checks import see
from gradcomp._src.mesh.axes import AxisName, axis_names
from gradcomp._src.mesh.run_store import run_store
from gradcomp._src.mesh.study import is_study
from gradcomp._src.mesh.types import mesh_of
from gradcomp._src.version import WIRE, __version__

# One transformation: its options and leaves, by their names.
Part = dict[str, str]

# In seconds. A process with another record is found at once. This is the time for one
# that never comes; it is longer than compiling a step that others have in a cache.
_PATIENCE = "600"

# The digests that this process and those of a mesh have agreed on, in their order.
_agreed: dict[tuple[int, tuple[int, ...]], list[str]] = {}

# The parts of the record of the step that is being traced.
_open: ContextVar[list[Part] | None] = ContextVar("_open", default=None)


def require_agreement(
  what: str,
  options: Mapping[str, Any],
  leaves: Any,
  axes: AxisName | None = None,
  **trees: Any,
) -> None:
  """Raises ValueError if another process traces another transformation in this place.

  It is called while a step is traced, so it costs compiled programs nothing. In
  :func:`one_record` it adds to the record. Elsewhere its transformation is a record of
  its own, if the mesh has all devices of the run: only then are all processes known.

  ``what`` is the public name of the transformation, and ``options`` decide when and how
  it sends. It exchanges ``leaves`` over ``axes``, if it exchanges something itself.
  """
  if _is_alone():
    return
  parts = _open.get()
  mesh = mesh_of(leaves)
  names = () if axes is None else axis_names(axes)
  sizes = {"axes": {name: mesh.shape.get(name) for name in names}}
  part = _part(what, sizes | dict(options), leaves=leaves, **trees)
  if parts is not None:
    parts.append(part)
  elif set(names).issubset(mesh.axis_names):
    _compare([part], _processes(mesh))


@contextlib.contextmanager
def one_record(
  mesh: Any, what: str, options: Mapping[str, Any], **trees: Any
) -> Iterator[list[Part]]:
  """Compares all transformations that are traced in the body as one record.

  It yields the parts so far, which a body that traces again clears. The last part is
  made of the arguments. If the body fails, the other processes read the error.
  ValueError if another process has another record, or none.
  """
  processes = () if _is_alone() else _processes(mesh)
  parts: list[Part] = []
  token = _open.set(parts)
  try:
    yield parts
  except Exception as error:
    _tell_failure(error, processes)
    raise
  finally:
    _open.reset(token)
  if processes:
    _compare([*parts, _part(what, options, **trees)], processes)


def _is_alone() -> bool:
  """Returns True in a run of one process, and in a trace that nothing runs."""
  alone = run_store() is None or jax.process_count() == 1
  return alone or is_study()


def _processes(mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
  """Returns the processes of a mesh; empty if they are unknown, or only one."""
  if isinstance(mesh, Mesh):
    found = sorted({device.process_index for device in mesh.devices.flat})
  else:
    found = list(range(jax.process_count() if mesh.size == jax.device_count() else 0))
  return tuple(found) if len(found) > 1 and jax.process_index() in found else ()


def _part(what: str, options: Mapping[str, Any], **trees: Any) -> Part:
  """Describes a transformation in words: options and leaves first, then its states."""
  leaves = _listed("leaves", trees.pop("leaves", None))
  # Addresses differ between processes.
  told = {x: re.sub(r" at 0x[0-9a-f]+", "", repr(y)) for x, y in options.items()}
  part = {"transformation": what, "gradcomp": __version__, "WIRE": str(WIRE)}
  part |= leaves | told
  # States come last, because other leaves or options are the cause of other states.
  for name, tree in trees.items():
    part |= _listed(name, tree)
  return part


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


def _compare(record: Sequence[Part], processes: tuple[int, ...]) -> None:
  """Blocks until all processes have this n-th record; ValueError if one does not."""
  if not processes:
    return
  own = jax.process_index()
  agreed = _agreed.setdefault((own, processes), [])
  digest = hashlib.sha256(json.dumps(record).encode()).hexdigest()[:32]
  if digest in agreed:  # traced before
    return
  client = run_store()
  folder = _folder(processes)
  _write(folder, digest, record)
  limit = _patience()
  deadline, pause, missing = time.monotonic() + limit, 0.001, list(processes)
  while missing:
    told = dict(client.key_value_dir_get(f"{folder}digest/"))
    found = {int(name.rpartition("/")[2]): value for name, value in told.items()}
    other = [process for process in processes if found.get(process, digest) != digest]
    if other:
      agreed.append("no agreement")  # nobody has agreed: all go on to the next one
      text = client.blocking_key_value_get(f"{folder}text/{other[0]}", 10_000)
      theirs = json.loads(zlib.decompress(base64.b64decode(text)))
      raise _difference(record, theirs, found, own, other[0])
    missing = [process for process in processes if process not in found]
    if missing and time.monotonic() > deadline:
      raise ValueError(
        f"`{record[0]['transformation']}` must be traced by all processes, got nothing "
        f"from {_named(missing)} in {limit:g} s; look what is wrong there, start all "
        "with the same program, or set GRADCOMP_PATIENCE_SECONDS to more."
      )
    if missing:
      time.sleep(pause)
      pause = min(2 * pause, 1.0)
  agreed.append(digest)


def _patience() -> float:
  """Returns the seconds to wait for a process; ValueError for an invalid setting."""
  text = os.environ.get("GRADCOMP_PATIENCE_SECONDS", _PATIENCE)
  try:
    limit = float(text)
  except ValueError:
    limit = -1.0
  if not limit >= 0:
    raise ValueError(
      f"`GRADCOMP_PATIENCE_SECONDS` must be seconds, 0 or more, got {text!r}; "
      "unset it to wait for ten minutes."
    )
  return limit


def _folder(processes: tuple[int, ...]) -> str:
  """Returns the key-value folder of the next record of some processes."""
  group = hashlib.sha256(repr(processes).encode()).hexdigest()[:16]
  return f"gradcomp/{group}/{len(_agreed[jax.process_index(), processes])}/"


def _write(folder: str, digest: str, record: Sequence[Part]) -> None:
  """Publishes a record and its digest; others read the record if digests differ."""
  client = run_store()
  text = base64.b64encode(zlib.compress(json.dumps(record).encode())).decode()
  # Again after an error, or after a process has been started again.
  for name, value in (("text", text), ("digest", digest)):
    key = f"{folder}{name}/{jax.process_index()}"
    client.key_value_set(key, value, allow_overwrite=True)


def _tell_failure(error: Exception, processes: tuple[int, ...]) -> None:
  """Publishes the error in place of the n-th record, so that all go on to the next."""
  if processes:
    agreed = _agreed.setdefault((jax.process_index(), processes), [])
    said = f"{type(error).__name__}: {error}"[:500]
    _write(_folder(processes), "failed", [{"failed": said}])
    agreed.append("no agreement")


def _difference(
  own: Sequence[Part],
  theirs: Sequence[Part],
  found: Mapping[int, str],
  process: int,
  other: int,
) -> ValueError:
  """Returns the error that names the first difference of two records."""
  if "failed" in theirs[0]:
    return ValueError(
      f"`{own[0]['transformation']}` must be traced by all processes, but process "
      f"{other} failed: {theirs[0]['failed']}"
    )
  none: Part = {}
  pairs = enumerate(itertools.zip_longest(own, theirs, fillvalue=none), 1)
  number, name, mine, those = next(
    (number, name, a.get(name, "nothing"), b.get(name, "nothing"))
    for number, (a, b) in pairs
    for name in {**a, **b}
    if a.get(name) != b.get(name)
  )
  same = [[x for x in found if found[x] == found[y]] for y in (process, other)]
  what = (list(own) + list(theirs[len(own) :]))[number - 1]["transformation"]
  place = f"number {number} of the step, {what}" if len(own) > 1 else what
  return ValueError(
    f"`{name}` must be the same in all processes, which read each other's codes, got "
    f"{mine} in {_named(same[0])} and {those} in {_named(same[1])}, in {place}; start "
    "all processes with the same program, options and version of gradcomp."
    f"{see('must-be-the-same-in-all-processes')}"
  )


def _named(processes: Sequence[int]) -> str:
  """Lists processes in words, the first five by number."""
  shown = ", ".join(map(str, sorted(processes)[:5]))
  more = f" and {len(processes) - 5} more" if processes[5:] else ""
  return f"process{'es' if processes[1:] else ''} {shown}{more}"
