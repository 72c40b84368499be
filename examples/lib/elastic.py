"""Trains on Ray with workers that come and go, and keeps a diary of them.

Ray has an environment of its own, so functions that need it import it.
"""

import contextlib
import functools
import json
import logging
import os
import socket
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from examples.lib.parsing import Help, at_least_0, natural, positive

# In seconds. A process that ends is noticed at once; this is for one that hangs.
JAX_LIMITS = {"heartbeat_timeout_seconds": 20, "shutdown_timeout_seconds": 10}
# Ray's own, set where the head node starts and here. By default a node may be silent
# for half a minute, and a new group waits a whole one for nodes that are not there.
RAY_LIMITS = {
  "RAY_health_check_initial_delay_ms": "1000",
  "RAY_health_check_period_ms": "1000",
  "RAY_health_check_timeout_ms": "2000",
  "RAY_health_check_failure_threshold": "3",
  "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
  "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",
}
WAIT = "--xla_cpu_collective_timeout_seconds=30"
WORKER = {"env_vars": {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": WAIT}}
# What happens between a change of the nodes and the next step, in this order.
STAGES = {
  "failed": "the first worker fails in an exchange",
  "step": "the last step of the old group",
  "started": "the last worker of a new group has started",
  "connected": "JAX has connected them",
  "restored": "all have their state",
  "next": "step {step}, by {workers} workers",
}
Train = Callable[[dict[str, Any]], None]  # of a worker


@contextlib.contextmanager
def joined(config: dict[str, Any]) -> Iterator[Callable[..., None]]:
  """Connects a worker to the others, on CPUs; yields what writes its diary."""
  import ray.train
  from ray.train.collective import broadcast_from_rank_zero

  context = ray.train.get_context()
  size, rank = context.get_world_size(), context.get_world_rank()
  write = functools.partial(note, Path(config["folder"]))
  logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax says much of each save
  write("started", workers=size)
  try:
    with socket.socket() as reserved:
      reserved.bind(("", 0))
      own = f"{ray.util.get_node_ip_address()}:{reserved.getsockname()[1]}"
    jax.distributed.initialize(broadcast_from_rank_zero(own), size, rank, **JAX_LIMITS)
    write("connected")
    yield write
    ray.train.report({"step": config["steps"], "workers": size})
  except Exception:
    write("failed")  # so do all that a dead worker has left in an exchange
    raise


def run(train: Train, options: Namespace) -> None:
  """Trains on a cluster that runs, or on one that is emulated here."""
  os.environ |= RAY_LIMITS | os.environ
  (fit if options.address else emulate)(train, options)


def fit(train: Train, options: Namespace) -> None:
  """Trains on the cluster that is named, or to which this process is connected."""
  import ray.train
  from ray.train.v2.jax import JaxTrainer

  if options.address:
    ray.init(options.address, runtime_env=WORKER)
  workers = (options.least, options.nodes)
  scaling = {"num_workers": workers, "elastic_resize_monitor_interval_s": 5}
  failures = ray.train.FailureConfig(max_failures=options.failures)
  kept = {"storage_path": str(options.folder / "ray"), "failure_config": failures}
  JaxTrainer(
    train,
    train_loop_config=vars(options) | {"folder": str(options.folder)},
    scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": 1}, **scaling),
    run_config=ray.train.RunConfig(**kept),
  ).fit()


def emulate(train: Train, options: Namespace) -> None:
  """Trains on nodes that are processes here; one is killed, and one added later."""
  import ray
  from ray.cluster_utils import Cluster

  cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
  try:
    nodes = [cluster.add_node(num_cpus=1) for _ in range(options.nodes)]
    ray.init(cluster.address, runtime_env=WORKER)
    # Ray adds nodes in the main thread alone.
    training = ThreadPoolExecutor(1).submit(fit, train, options)
    if options.kill_after is not None:
      wait(options.folder, training, options.nodes, options.kill_after)
      note(options.folder, "a node is killed")
      cluster.remove_node(nodes[-1], allow_graceful=False)
    if options.add_after is not None:
      wait(options.folder, training, options.nodes - 1, options.add_after)
      note(options.folder, "a node is added")
      cluster.add_node(num_cpus=1)
    training.result()
  finally:
    ray.shutdown()
    cluster.shutdown()


def wait(folder: Path, training: Future[None], workers: int, seconds: float) -> None:
  """Waits until so many workers have trained for so long, or the training has ended."""
  while not training.done():
    first = began(folder, workers)
    if first is not None and time.time() >= first + seconds:
      return
    time.sleep(0.1)


def note(folder: Path, what: str, **more: Any) -> None:
  """Writes down what this process does now, in a file of its own."""
  path = folder / f"diary-{socket.gethostname()}-{os.getpid()}.jsonl"
  with open(path, "a") as file:
    print(json.dumps({"time": time.time(), "what": what, **more}), file=file)


def read(folder: Path) -> list[dict[str, Any]]:
  """Returns the entries of all processes in the order of time, by their own clocks."""
  lines = (x for path in folder.glob("diary-*") for x in path.read_text().splitlines())
  return sorted(map(json.loads, lines), key=lambda entry: entry["time"])


def began(folder: Path, workers: int) -> float | None:
  """Returns when so many workers took their first step; None if they have not."""
  steps = (entry for entry in read(folder) if entry["what"] == "step")
  return next((entry["time"] for entry in steps if entry["workers"] == workers), None)


def told(entries: list[dict[str, Any]]) -> Iterator[str]:
  """Yields lines on each change of the nodes, with the seconds until its stages."""
  for i, change in enumerate(entries):
    if "node" not in change["what"]:
      continue
    before = [entry for entry in entries[:i] if entry["what"] == "step"][-1]
    found = {}
    for entry in entries[i + 1 :]:
      if entry["what"] == "step" and entry["workers"] != before["workers"]:
        found["next"] = entry
        break
      # The last entry of each kind, but the first failure.
      if entry["what"] != "failed" or "failed" not in found:
        found[entry["what"]] = entry
    yield f"{change['what']} after step {before['step']}"
    for stage, words in STAGES.items():
      if entry := found.get(stage):
        yield f"{entry['time'] - change['time']:7.1f} s  {words.format(**entry)}"


def parse(title: str, arguments: Sequence[str] | None) -> Namespace:
  """Reads the options, and makes the folder."""
  parser = ArgumentParser(description=title, formatter_class=Help)
  add = parser.add_argument
  add("--address", help="of a cluster that runs; by default nodes are emulated here")
  add("--folder", type=Path, help="that all nodes share; needed by --address")
  add("--nodes", type=positive, default=4, help="at most, a worker each")
  add("--least", type=positive, default=2, help="workers to train with")
  add("--kill-after", type=at_least_0, help="seconds of training; then a node dies")
  add("--add-after", type=at_least_0, help="seconds of training without it")
  add("--failures", type=natural, default=5, help="after which Ray gives up")
  add("--steps", type=positive, default=400, help="of the whole training")
  add("--save-every", type=positive, default=10, help="steps between two checkpoints")
  add("--local-steps", type=natural, default=0, help="of a round; 0: 4 bits each step")
  add("--pause", type=at_least_0, default=0.1, help="seconds after each step")
  options = parser.parse_args(arguments)
  kills = options.kill_after is not None
  if options.add_after is not None and not kills:
    parser.error("--add-after needs --kill-after, for all nodes are there before")
  if options.address and (kills or not options.folder):
    parser.error("--address needs --folder, and kills and adds no nodes")
  if options.least > options.nodes - kills:
    parser.error("--least must be at most the --nodes that live, or all wait for more")
  if options.local_steps and options.save_every % options.local_steps:
    parser.error("--save-every must be a multiple of --local-steps, whole rounds")
  options.folder = (options.folder or Path(tempfile.mkdtemp())).absolute()
  options.folder.mkdir(parents=True, exist_ok=True)
  return options
