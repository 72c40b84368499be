"""Trains on the nodes of a Ray cluster that are there: some may die, others may come.

    pip install . --group ray
    python -m examples.ray_train --nodes 4 --kill-after 10 --add-after 10
    python -m examples.ray_train --address HOST:6379 --folder /shared/run --nodes 16

Without an address the nodes are processes of this machine, and one of them dies and
comes again. Ray starts a worker on each node, and a new group of workers when nodes
have gone or come. A group goes on from the last checkpoint, with the residuals of all
workers that wrote it. Orbax writes checkpoints, each worker its own shards, in a folder
that all nodes share.
"""

import argparse
import functools
import logging
import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import ray.train
from ray.cluster_utils import Cluster
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.jax import JaxTrainer

from examples.lib import elastic
from gradcomp.telemetry import compare_replicas

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


def connect() -> None:
  """Connects the workers' processes; JaxTrainer itself does so for GPUs and TPUs."""
  context = ray.train.get_context()
  with socket.socket() as reserved:
    reserved.bind(("", 0))
    own = f"{ray.util.get_node_ip_address()}:{reserved.getsockname()[1]}"
  first = broadcast_from_rank_zero(own)
  size, rank = context.get_world_size(), context.get_world_rank()
  jax.distributed.initialize(first, size, rank, **JAX_LIMITS)


def train(config: dict[str, Any]) -> None:
  """Trains as one worker of a group; Ray calls it in each of them."""
  context, folder = ray.train.get_context(), Path(config["folder"])
  note = functools.partial(elastic.note, folder)
  logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax says much of each save
  note("started", workers=context.get_world_size())
  try:
    connect()
    note("connected")
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    saved = folder / "checkpoints", config["save_every"]
    training = elastic.Training(mesh, *saved, config["local_steps"])
    note("restored", step=training.step)
    for loss in training.losses(config["steps"]):
      if context.get_world_rank() == 0:
        note("step", step=training.step, loss=loss, workers=mesh.size)
        print(f"step {training.step}: loss {loss:.4f}, {mesh.size} workers")
      time.sleep(config["pause"])
    found = compare_replicas(training.state[0], axis_name="data")
    found.require_equal()
    ray.train.report({"step": training.step, "workers": mesh.size})
  except Exception:
    note("failed")  # so do all that a dead worker has left in an exchange
    raise


def fit(options: argparse.Namespace) -> None:
  """Trains on the cluster to which this process is connected."""
  names = "steps", "save_every", "local_steps", "pause"
  config = {name: getattr(options, name) for name in names}
  config["folder"] = str(options.folder)
  workers = (options.least, options.nodes)
  scaling = {"num_workers": workers, "elastic_resize_monitor_interval_s": 5}
  failures = ray.train.FailureConfig(max_failures=options.failures)
  kept = {"storage_path": str(options.folder / "ray"), "failure_config": failures}
  JaxTrainer(
    train,
    train_loop_config=config,
    scaling_config=ray.train.ScalingConfig(resources_per_worker={"CPU": 1}, **scaling),
    run_config=ray.train.RunConfig(**kept),
  ).fit()


def emulate(options: argparse.Namespace) -> None:
  """Trains on nodes that are processes here; one is killed, and one added later."""
  cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
  try:
    nodes = [cluster.add_node(num_cpus=1) for _ in range(options.nodes)]
    ray.init(cluster.address, runtime_env=WORKER)
    # Ray adds nodes in the main thread alone.
    training = ThreadPoolExecutor(1).submit(fit, options)
    if options.kill_after is not None:
      wait(options.folder, training, options.nodes, options.kill_after)
      elastic.note(options.folder, "a node is killed")
      cluster.remove_node(nodes[-1], allow_graceful=False)
    if options.add_after is not None:
      wait(options.folder, training, options.nodes - 1, options.add_after)
      elastic.note(options.folder, "a node is added")
      cluster.add_node(num_cpus=1)
    training.result()
  finally:
    ray.shutdown()
    cluster.shutdown()


def wait(folder: Path, training: Future[None], workers: int, seconds: float) -> None:
  """Waits until so many workers have trained for so long, or the training has ended."""
  while not training.done():
    began = elastic.began(folder, workers)
    if began is not None and time.time() >= began + seconds:
      return
    time.sleep(0.1)


def main(arguments: Sequence[str] | None = None) -> None:
  options = elastic.parse(__doc__.splitlines()[0], arguments)
  os.environ |= RAY_LIMITS | os.environ
  if options.address:
    ray.init(options.address, runtime_env=WORKER)
    fit(options)
  else:
    emulate(options)
  print("\n".join(elastic.told(elastic.read(options.folder))))


if __name__ == "__main__":
  main()
