"""Kills a host in the midst of a training with local steps, and lets it come again.

  .venv-ray/bin/python -m benchmarks.links.leaving [--rate 100mbit] [--round-trip 50]
    [--hosts 3] [--every 30] [--steps 1800] [--leave ROUNDS ...] [--output FOLDER]
    [--quick]

Hosts are network namespaces on links of a known rate and round trip, as links/hosts.py
makes them, and nodes of a Ray cluster. On each, examples/ray_train.py trains a small
net by SparseLoCo: rounds of steps alone, and then an exchange by BlockTop. A first
training is left in peace. In each of the others, all processes of the last host are
killed by SIGKILL in the middle of a round. The others train on, and after some rounds
the host is started again.

A pause after each step stands for the time that a larger net would take. Checkpoints
and diaries lie in one folder of this machine, so the links carry what JAX, the
exchanges and Ray send, and no checkpoints. The first host is Ray's head, and runs the
driver.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks.common import cli
from benchmarks.common.tables import table
from benchmarks.links import hosts as links_hosts
from benchmarks.links import launch
from benchmarks.links import results as links_results
from examples.lib import diary, small_training

RAY = Path(sys.executable).with_name("ray")
PORT = 6379  # of Ray's head
BATCHES = 10  # that nobody trained on, for the loss in the end
EVENTS = {"a node is killed": "it left", "a node is added": "it came again"}
MOMENTS = {
  "failed": "others fail",
  "step": "their last step",
  "started": "new workers",
  "connected": "connected",
  "restored": "restored",
  "next": "a step",
}


class Cluster:
  """A Ray cluster of hosts, on which one training runs.

  Args:
    hosts: where the nodes are.
    folder: that all of them share.
    args: ``every``, ``steps`` and ``pause`` are those of ray_train.py, and after
      ``limit`` seconds nothing is waited for any longer.
  """

  def __init__(
    self, hosts: list[links_hosts.Host], folder: Path, args: argparse.Namespace
  ):
    from examples.ray_train import RAY_LIMITS  # imports Ray

    self.hosts, self.folder, self._args = hosts, folder, args
    self._environment = os.environ | cli.path() | RAY_LIMITS
    self._head = f"{hosts[0].address}:{PORT}"

  def start(self, number: int) -> None:
    """Starts the node of a host, and returns when it is there."""
    where = [f"--address={self._head}"] if number else ["--head", f"--port={PORT}"]
    address = f"--node-ip-address={self.hosts[number].address}"
    self._begin(number, RAY, "start", "--num-cpus=1", address, *where).wait()

  def train(self) -> subprocess.Popen[bytes]:
    """Starts the driver of the training."""
    args = self._args
    options = f"--address {self._head} --folder {self.folder} --steps {args.steps} "
    options += f"--nodes {args.hosts} --least {args.hosts - 1} --pause {args.pause} "
    options += f"--local-steps {args.every} --save-every {args.every}"
    program = [sys.executable, "-W", "ignore", "-m", "examples.ray_train"]
    return self._begin(0, *program, *options.split())

  def _begin(self, number: int, *command: Any) -> subprocess.Popen[bytes]:
    with open(self.folder / f"log-{number}", "a") as log:
      return subprocess.Popen(
        [*self.hosts[number].prefix, *map(str, command)],
        env=self._environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for us
      )

  def wait_for(self, workers: int, step: int = 0) -> int:
    """Waits until so many workers have taken a step, or a later one; returns it."""

    def last() -> int | None:
      steps = (x for x in diary.read(self.folder) if x["what"] == "step")
      own = [x["step"] for x in steps if x["workers"] == workers]
      return own[-1] if own and own[-1] >= step else None

    return self._wait(f"step {step} by {workers} workers", last)

  def _wait(self, what: str, found: Callable[[], int | None]) -> int:
    """Waits until something is no longer None; RuntimeError if that takes too long."""
    deadline = time.monotonic() + self._args.limit
    while (result := found()) is None:
      if time.monotonic() > deadline:
        logs = [path.read_text()[-3000:] for path in self.folder.glob("log-*")]
        raise RuntimeError("\n---\n".join([f"There was no {what}.", *logs]))
      time.sleep(0.2)
    return result

  def ended(self, driver: subprocess.Popen[bytes]) -> None:
    """Waits for the end of a training; RuntimeError if it is no good one."""
    if self._wait("end", driver.poll):
      raise RuntimeError((self.folder / "log-0").read_text()[-3000:])


@contextlib.contextmanager
def started(args: argparse.Namespace) -> Iterator[Cluster]:
  """Starts a node on each host, with links of their own, and leaves none running."""
  with (
    launch.network(args.hosts, args.rate, args.round_trip / 1e3) as network,
    tempfile.TemporaryDirectory() as folder,
    contextlib.ExitStack() as stack,
  ):
    cluster = Cluster(network, Path(folder), args)
    for number, host in enumerate(network):
      stack.callback(host.kill)
      cluster.start(number)
    yield cluster


def measure(args: argparse.Namespace, rounds: int) -> dict[str, Any]:
  """Trains once, and returns the seconds, the loss and what happened.

  The last host leaves after some rounds, or none at 0.
  """
  with started(args) as cluster:
    driver = cluster.train()
    if rounds:
      cluster.wait_for(args.hosts, args.every * rounds + args.every // 2)
      diary.note(cluster.folder, "a node is killed")
      cluster.hosts[-1].kill()
      step = cluster.wait_for(args.hosts - 1)
      cluster.wait_for(args.hosts - 1, step + args.every * args.away)
      diary.note(cluster.folder, "a node is added")
      cluster.start(args.hosts - 1)
    cluster.ended(driver)
    first = cluster.hosts[0]
    counter = links_hosts.COUNTER.format(first.interface)
    sent = int(subprocess.check_output([*first.prefix, "cat", counter]))
    entries = diary.read(cluster.folder)
    mesh = jax.make_mesh((1,), ("data",))
    folder = cluster.folder / "checkpoints"
    end = small_training.Training(mesh, folder, args.every, args.every)
    params = jax.device_get(end.state[0])
  fresh = [small_training.read_batch(args.steps + i) for i in range(BATCHES)]
  losses = [float(small_training.loss_fn(params, batch)) for batch in fresh]
  steps = [entry for entry in entries if entry["what"] == "step"]
  begin = next(entry for entry in steps if entry["step"] == args.every)
  events = {}
  for change, found in diary.changes(entries):
    events[change["what"]] = {x: found[x]["time"] - change["time"] for x in found}
  return {
    "seconds": steps[-1]["time"] - begin["time"],
    "loss": statistics.fmean(losses),
    "bytes_sent": sent,
    "load_and_cores": links_results.load_note(),
    "events": events,
  }


def markdown(results: dict[str, Any]) -> str:
  """Writes the tables, and what they were measured with."""
  settings, runs, probes = (results[x] for x in ("settings", "runs", "probes"))
  rounds = settings["steps"] // settings["every"]
  names = ["in peace", *(f"killed after {x} rounds" for x in settings["leave"])]
  ends, times = [], []
  for name, run in zip(names, runs, strict=False):
    ends.append([name, f"{run['seconds']:.1f}", f"{run['loss']:.6f}"])
    ends[-1].append(f"{run['bytes_sent'] / 1e3:,.0f}")
    for event, found in run["events"].items():
      row = [f"{found[x]:.1f}" if x in found else "" for x in MOMENTS]
      times.append([name, EVENTS[event], *row])
  rate = min(8e-6 * x["bytes_a_second"] for x in probes)
  return "\n\n".join(
    [
      "# A host that leaves local steps on slow links, and comes again",
      "`python -m benchmarks.links.leaving` writes this file. "
      f"{settings['hosts']} hosts, {settings['rate']} and {settings['round_trip']:g} "
      f"ms there and back; raw TCP finds {rate:.0f} Mbit/s or more and "
      f"{1e3 * probes[0]['round_trip']:.1f} ms. SparseLoCo with BlockTop on Ray, "
      f"{settings['steps']} steps in {rounds} rounds of {settings['every']}, "
      f"{1e3 * settings['pause']:g} ms of pause after each step, and a checkpoint "
      f"after each round. In peace a round takes "
      f"{runs[0]['seconds'] / (rounds - 1):.2f} s. The last host is killed in the "
      "middle of a round, and started again when the others have trained "
      f"{settings['away']} rounds more. All end with the same parameters, by their "
      "fingerprints.",
      table(["run", "s", "loss in the end", "kB sent"], ends),
      "*s*: from the end of the first round to that of the last. *Loss*: the mean over "
      f"{BATCHES} batches that nobody trained on. *kB sent* by the first host, counted "
      "by its interface, with what Ray says to its head. Seconds from the kill, or "
      "from the start of the host that comes again:",
      table(["run", "", *MOMENTS.values()], times),
      f"The load of the machine's {os.cpu_count()} cores was at most "
      f"{max(x['load_and_cores'][0] for x in runs):.1f}.\n",
    ]
  )


def main() -> None:
  sys.stdout.reconfigure(line_buffering=True)
  args = cli.options(
    __doc__,
    "2 hosts, short rounds, and one that leaves",
    "folder of ray_leaving.json and .md",
    rate=cli.Option("100mbit", help="of each link, in tc's words"),
    round_trip=cli.Option(50.0, 10.0, "milliseconds"),
    hosts=cli.Option(3, 2),
    every=cli.Option(30, 20, "steps in a round"),
    steps=cli.Option(1800, 1000, "in all"),
    pause=cli.Option(0.02, help="seconds after a step"),
    leave=cli.Option([20], [3], "rounds before a host leaves"),
    away=cli.Option(20, 2, "rounds without the host"),
    limit=cli.Option(300.0, help="seconds to wait for anything"),
  )
  launch.begin(True, quick=args.quick)
  if not RAY.exists():
    cli.skip("Ray, which make test-ray installs in .venv-ray")
  names = "rate round_trip hosts every steps pause leave away".split()
  with launch.network(args.hosts, args.rate, args.round_trip / 1e3) as hosts:
    probes = launch.probes(hosts, 1_000_000 if args.quick else 25_000_000)
  results: dict[str, Any] = {
    "machine": launch.machine(),
    "settings": {name: getattr(args, name) for name in names},
    "probes": probes,
    "runs": [],
  }
  for rounds in (0, *args.leave):
    results["runs"].append(measure(args, rounds))
    print(results["runs"][-1])
    cli.write(args.output, "ray_leaving", results, markdown(results))
  print(markdown(results))


if __name__ == "__main__":
  main()
