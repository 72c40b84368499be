"""Measures on one host what the links carry, with nothing but sockets.

python -m benchmarks.links.probe '{"rank": 0, ...}'    links/speed.py starts it
"""

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.links import hosts

_PASSES = 6


def probe(rank: int, ends: Sequence[tuple[str, int]], nbytes: int) -> dict[str, Any]:
  """Measures what a host receives while all send to the next, and the round trip."""
  deadline = time.monotonic() + 60
  with contextlib.ExitStack() as stack:
    listener = stack.enter_context(socket.create_server(ends[rank]))
    listener.settimeout(60)
    to_next = stack.enter_context(_connect(ends[(rank + 1) % len(ends)], deadline))
    from_previous = stack.enter_context(listener.accept()[0])
    for stream in (to_next, from_previous):
      stream.settimeout(600)
    circles = []
    for _ in range(_PASSES):  # after the second all are there
      start = time.perf_counter()
      if rank == 0:
        to_next.sendall(b"!")
      from_previous.recv(1)
      if rank > 0:
        to_next.sendall(b"!")
      circles.append(time.perf_counter() - start)
    sender = threading.Thread(target=to_next.sendall, args=(bytes(nbytes),))
    buffer = bytearray(1 << 20)
    left = nbytes
    start = time.perf_counter()
    sender.start()
    while left:
      count = from_previous.recv_into(buffer, min(left, len(buffer)))
      if not count:
        raise ConnectionError("The previous host has closed the connection.")
      left -= count
    seconds = time.perf_counter() - start
    sender.join()
  report = {"bytes_a_second": nbytes / seconds}
  if rank == 0:
    report["round_trip"] = 2 * min(circles[1:]) / len(ends)
  return report


def _connect(end: tuple[str, int], deadline: float) -> socket.socket:
  while True:
    try:
      return socket.create_connection(end, timeout=5)
    except OSError:
      if time.monotonic() > deadline:
        raise
      time.sleep(0.05)


if __name__ == "__main__":
  hosts.report(
    lambda job: probe(job["rank"], [*map(tuple, job["ends"])], job["nbytes"])
  )
