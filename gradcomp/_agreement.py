"""Compares between the processes of a run what decides how messages are read.

A collective moves words and does not know what they mean. Two processes whose codecs
differ would take each other's codes for their own, and go on with wrong numbers.
"""

import hashlib
import json

import jax
from jax._src import distributed  # the key-value store has no public name

from gradcomp._version import __version__
from gradcomp.workers import is_explained

# What this process has traced: for each list of leaves, the options one after another.
_traced: dict[str, list[str]] = {}


def require_agreement(leaves: str, options: dict[str, str]) -> None:
  """Raises ValueError if another process has other options for the same leaves.

  It is called while a step is traced, so it costs compiled programs nothing. Each
  process writes its options to the key-value store of ``jax.distributed``, and reads
  what others have written by then. It waits for nobody: the last one sees all others,
  and it raises before an exchange can complete, because that needs every process.

  Args:
    leaves: names, shapes and dtypes of the leaves, and the axes: processes that have
      the same compare the first options that they trace with each other, the second
      ones, and so on.
    options: what decides the bits of messages, by the names of arguments.
  """
  client = distributed.global_state.client
  if client is None or jax.process_count() == 1 or is_explained():
    return
  place = hashlib.sha256(leaves.encode()).hexdigest()[:16]
  text = json.dumps(options | {"gradcomp": __version__}, sort_keys=True)
  seen = _traced.setdefault(place, [])
  if text in seen:  # traced before
    return
  folder = f"gradcomp/{place}/{len(seen)}/"
  seen.append(text)
  client.key_value_set(f"{folder}{jax.process_index()}", text)
  for name, theirs in client.key_value_dir_get(folder):
    _compare(name.rpartition("/")[2], json.loads(text), json.loads(theirs))


def _compare(process: str, own: dict[str, str], theirs: dict[str, str]) -> None:
  for name in sorted(own.keys() | theirs.keys()):
    if own.get(name) != theirs.get(name):
      raise ValueError(
        f"`{name}` must be the same in all processes, which read each other's codes, "
        f"got {own.get(name)} in process {jax.process_index()} and {theirs.get(name)} "
        f"in process {process}; start all processes with the same program, options and "
        "version of gradcomp."
      )
