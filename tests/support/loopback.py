"""What tests that start processes as hosts of one machine need."""

import os
import socket

from tests.support.pages import ROOT

# What one of them has compiled serves all.
_INHERITED = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")


def hostname_resolves():
  """Without it, gloo has no address to listen on."""
  try:
    return bool(socket.getaddrinfo(socket.gethostname(), None))
  except OSError:
    return False


def environment(collective_timeout):
  """Of a process that has one CPU device, and waits so many seconds for others."""
  kept = lambda x: not x.startswith(("JAX_", "XLA_", "PYTEST_")) or x in _INHERITED
  result = {name: value for name, value in os.environ.items() if kept(name)}
  # As optimized as the bits that theirs are compared with: see selected.py.
  limit = f"--xla_cpu_collective_timeout_seconds={collective_timeout}"
  flags = f"{os.environ.get('XLA_FLAGS', '')} {limit}"
  return result | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
