"""Forwards frames between the ports of a switch, each after a fixed time.

  python benchmarks/links/delay.py SECONDS PORT PORT...    links/hosts.py starts it

It is for kernels without netem, and stands in the place of a bridge. It learns which
port each address is behind. A frame is read with its offload header and handed on with
it, so that large frames stay whole and no checksum is computed here. Frames leave in
the order in which they came, so the time is the same for all.
"""

import collections
import contextlib
import os
import select
import socket
import struct
import sys
import time

_ALL = 0x0003  # ETH_P_ALL
_PACKET, _OFFLOAD_HEADER, _IGNORE_OUTGOING = 263, 15, 23  # of linux/if_packet.h
_RECEIVE_BUFFER = 33  # SO_RCVBUFFORCE
_HEADER = 10  # bytes of a struct virtio_net_hdr
_LARGEST = 1 << 17
_QUEUED = 1 << 24  # bytes that may wait for this program at a port


def _port(name: str) -> socket.socket:
  port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
  port.setsockopt(_PACKET, _OFFLOAD_HEADER, 1)
  port.setsockopt(_PACKET, _IGNORE_OUTGOING, 1)
  port.setsockopt(socket.SOL_SOCKET, _RECEIVE_BUFFER, _QUEUED)
  # An interface has this mode while the socket lives.
  index = socket.if_nametoindex(name)
  port.setsockopt(_PACKET, 1, struct.pack("IHH8s", index, 1, 0, b""))
  port.bind((name, 0))
  port.setblocking(False)
  return port


def forward(seconds: float, names: list[str]) -> None:
  """Forwards until the process is killed."""
  ports = [_port(name) for name in names]
  sources = {port.fileno(): port for port in ports}
  poll = select.epoll()
  for number in sources:
    poll.register(number, select.EPOLLIN)
  behind: dict[bytes, socket.socket] = {}
  waiting: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
  print("ready", flush=True)
  while True:
    left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else -1
    for number, _ in poll.poll(left):
      source = sources[number]
      with contextlib.suppress(BlockingIOError):
        while True:
          frame = source.recv(_LARGEST)
          due = time.monotonic() + seconds
          to, origin = frame[_HEADER : _HEADER + 6], frame[_HEADER + 6 : _HEADER + 12]
          behind[origin] = source
          targets = [behind[to]] if to in behind else ports
          waiting += [(due, x, frame) for x in targets if x is not source]
    now = time.monotonic()
    while waiting and waiting[0][0] <= now:
      _, port, frame = waiting.popleft()
      with contextlib.suppress(OSError):  # the queue of the port is full: it is lost
        port.send(frame)


if __name__ == "__main__":
  os.setpriority(os.PRIO_PROCESS, 0, -20)  # or busy hosts would make links slower
  forward(float(sys.argv[1]), sys.argv[2:])
