"""Makes hosts from network namespaces, each on its own rate-limited full-duplex link.

  python -m benchmarks.links.hosts '{"rank": 0, ...}'

measures on one of them what the links carry, with nothing but sockets.

A switch namespace holds a bridge. Each host is a namespace whose ``eth0`` is one end of
a veth pair, and the other end is a port of the bridge. A token bucket (tbf) on either
end limits one direction. For links that take time, a program stands in the place of the
bridge, which keeps each frame for half of the round trip: see links/delay.py.

Every trap here makes plain f32 slower, and so flatters compression:

- A bucket below 1 ms of the rate loses packets, and one above it carries small messages
  for nothing.
- Frames (GSO) that do not fit into the bucket are cut in software, on the hosts' cores.
- gloo binds the address that the host's own name resolves to, so each host needs its
  own name (a UTS namespace) and its own hosts file.
- BBR, if it is the system's congestion control, slows down for 0.2 s every 10 s.
- A bucket is one queue, so 4 MB of one connection would stand before all others. Queues
  of real hosts are fair or short, so a connection may queue a bucketful at most.
- On a link that takes time, a connection that was idle would begin slowly again.
"""

import contextlib
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

_BURST_SECONDS = 0.001
_MTU = 1500
_PASSES = 6  # of a byte around all hosts
_SUBNET = "10.77.0.0/24"
_LARGEST_FRAME = 65536
_NETNS = pathlib.Path("/etc/netns")
_DELAY = pathlib.Path(__file__).with_name("delay.py")


class Host(NamedTuple):
  """A host: its address, its interface, and the command that runs a program there."""

  address: str
  interface: str
  prefix: tuple[str, ...] = ()


def bits_per_second(rate: str) -> float | None:
  """Reads a rate in tc's spelling; None for ``"loopback"``, which nothing limits.

  >>> bits_per_second("2.5gbit")
  2500000000.0
  """
  if rate == "loopback":
    return None
  if match := re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate):
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]
  raise ValueError(f"`rate` must be like 100mbit or 2.5gbit, got {rate!r}.")


def missing() -> str:
  """Tries to limit a link, and returns what this machine lacks; "" for nothing."""
  if tools := [name for name in ("ip", "tc", "unshare") if not shutil.which(name)]:
    return f"the commands {', '.join(tools)}"
  if os.geteuid():
    return "root's rights, to make network namespaces"
  try:
    with network(1, "1gbit") as (host,):
      _run(shlex.join([*host.prefix, "true"]))
  except (RuntimeError, OSError) as error:
    return f"rate-limited network namespaces ({error})"
  return ""


@contextlib.contextmanager
def network(count: int, rate: str, round_trip: float = 0.0) -> Iterator[list[Host]]:
  """Yields hosts with links of a rate and a round trip in seconds, and removes them.

  At the rate ``"loopback"`` they are plain processes, whose links nothing limits.
  """
  if rate == "loopback":
    yield [Host("127.0.0.1", "lo")] * count
    return
  prefix = f"gc{os.getpid()}"
  switch, names = f"{prefix}sw", [f"{prefix}h{i}" for i in range(count)]
  enter = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')
  hosts = [
    Host(f"10.77.0.{i + 1}", "eth0", ("ip", "netns", "exec", name, *enter, f"host{i}"))
    for i, name in enumerate(names)
  ]
  own_folder = not _NETNS.exists()
  try:
    bridge = "link add br0 type bridge", "link set br0 up"
    _run(f"ip netns add {switch}", *(f"ip -n {switch} {line}" for line in bridge))
    ports = [f"p{i}" for i in range(count)]
    for i, (name, host) in enumerate(zip(names, hosts, strict=True)):
      _add_host(name, host.address, switch, ports[i], rate)
      files = _NETNS / name
      files.mkdir(parents=True)
      (files / "hosts").write_text(f"127.0.0.1 localhost\n{host.address} host{i}\n")
    with contextlib.ExitStack() as stack:
      if round_trip:  # a program forwards between the ports, and not the bridge
        _run(*(f"ip -n {switch} link set {port} nomaster" for port in ports))
        command = ["ip", "netns", "exec", switch, sys.executable, "-I", str(_DELAY)]
        command += [str(round_trip / 2), *ports]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        stack.enter_context(process)
        stack.callback(process.kill)
        if process.stdout and process.stdout.readline() != "ready\n":
          raise RuntimeError("Nobody forwards frames between the hosts.")
      yield hosts
  finally:
    for name in (*names, switch):  # with a namespace go its devices
      subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
      shutil.rmtree(_NETNS / name, ignore_errors=True)
    if own_folder:
      with contextlib.suppress(OSError):
        _NETNS.rmdir()


def _add_host(name: str, address: str, switch: str, port: str, rate: str) -> None:
  burst = max(2 * _MTU, int(bits_per_second(rate) / 8 * _BURST_SECONDS))
  frame = min(_LARGEST_FRAME, int(0.9 * burst))  # tbf counts 5 % of headers too
  bucket, tcp = f"tbf rate {rate} burst {burst} latency 50ms", "/proc/sys/net/ipv4/tcp"
  _run(
    f"ip netns add {name}",
    f"ip -n {name} link add eth0 type veth peer name {port} netns {switch}",
    f"ip -n {switch} link set {port} master br0",
    f"tc -n {name} qdisc replace dev eth0 root {bucket}",
    f"tc -n {switch} qdisc replace dev {port} root {bucket}",
    f"ip -n {name} link set dev eth0 gso_max_size {frame} up",
    f"ip -n {switch} link set dev {port} gso_max_size {frame} up",
    f"ip -n {name} address add {address}/24 dev eth0",
    f"ip -n {name} link set lo up",
    f"ip -n {name} route replace {_SUBNET} dev eth0 src {address} congctl cubic",
    f"ip netns exec {name} sh -c 'echo {burst} > {tcp}_limit_output_bytes'",
    f"ip netns exec {name} sh -c 'echo 0 > {tcp}_slow_start_after_idle'",
  )


def _run(*lines: str) -> None:
  for line in lines:
    done = subprocess.run(shlex.split(line), capture_output=True, text=True)
    if done.returncode:
      raise RuntimeError(f"{line}: {done.stderr.strip()}")


def run(
  hosts: Sequence[Host],
  commands: Sequence[Sequence[str]],
  environment: dict[str, str],
  limit: float,
  *,
  shown: bool = False,
) -> None:
  """Runs a command on each host, ``limit`` seconds at most, and leaves none running."""
  deadline = time.monotonic() + limit
  with contextlib.ExitStack() as stack:
    logs, processes = [], []
    way: Any = {"env": os.environ | environment, "stdin": subprocess.DEVNULL}
    way |= {"stderr": subprocess.STDOUT, "start_new_session": True}  # Ctrl-C is for us
    for host, command in zip(hosts, commands, strict=True):
      logs.append(stack.enter_context(tempfile.TemporaryFile("w+")))
      line = [*host.prefix, *command]
      processes.append(subprocess.Popen(line, stdout=logs[-1], **way))
      stack.callback(_kill, processes[-1])
    codes: list[int | None] = [None]
    told = 0
    while None in codes and not any(codes) and time.monotonic() < deadline:
      time.sleep(0.1)
      codes = [process.poll() for process in processes]
      if shown:
        written = os.pread(logs[0].fileno(), 1 << 20, told)
        told += len(written)
        print(written.decode(errors="replace"), end="", flush=True)
    if any(codes) or None in codes:
      time.sleep(1)  # for the others to say why they fail
      parts = [f"The hosts' programs have ended with {codes}; None: still running."]
      for i, log in enumerate(logs):
        log.seek(0)
        parts.append(f"--- host {i}\n{log.read()[-3000:]}")
      raise RuntimeError("\n".join(parts))


def _kill(process: subprocess.Popen[bytes]) -> None:
  if process.poll() is None:
    os.killpg(process.pid, signal.SIGKILL)  # JAX swallows SIGTERM
  process.wait()


def bytes_sent(interface: str) -> int:
  """Reads the kernel's counter of an interface, which counts one header a frame."""
  counter = pathlib.Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
  return int(counter.read_text())


def timed(
  interface: str, meet: Callable[[], Any], call: Callable[..., Any], *args: Any
) -> tuple[Any, dict[str, float]]:
  """Makes a call between two meetings, and says what it takes on this host."""
  meet()
  sent, cpu, start = bytes_sent(interface), time.process_time(), time.perf_counter()
  result = call(*args)
  seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
  meet()
  sent = bytes_sent(interface) - sent
  return result, {"seconds": seconds, "cpu_seconds": cpu, "sent": sent}


def report(make: Callable[[dict[str, Any]], Any]) -> None:
  """Makes the report of this process from its job, and writes it where that says."""
  try:
    job = json.loads(sys.argv[1])
    pathlib.Path(job["output"]).write_text(json.dumps(make(job)))
  except BaseException:
    traceback.print_exc()
    os._exit(1)  # leaving normally would wait for the others, and they for us


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


def free_ports(count: int) -> list[int]:
  """Finds ports that nothing listens on."""
  with contextlib.ExitStack() as stack:
    listen = lambda: stack.enter_context(socket.create_server(("", 0)))
    return [listen().getsockname()[1] for _ in range(count)]


if __name__ == "__main__":
  report(lambda job: probe(job["rank"], [*map(tuple, job["ends"])], job["nbytes"]))
