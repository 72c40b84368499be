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
import pathlib
import socket
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import ray.train
from ray.cluster_utils import Cluster
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.jax import JaxTrainer

from examples.lib import diary
from examples.lib.parsing import at_least_0, natural, positive
from examples.lib.small_training import Training
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
WORKER = {
  "JAX_PLATFORMS": "cpu",
  "XLA_FLAGS": "--xla_cpu_collective_timeout_seconds=30",
}


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
  context, folder = ray.train.get_context(), pathlib.Path(config["folder"])
  note = functools.partial(diary.note, folder)
  logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax says much of each save
  note("started", workers=context.get_world_size())
  try:
    connect()
    note("connected")
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    training = Training(
      mesh, folder / "checkpoints", config["save_every"], config["local_steps"]
    )
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
  trainer = JaxTrainer(
    train,
    train_loop_config=config | {"folder": str(options.folder)},
    scaling_config=ray.train.ScalingConfig(
      num_workers=(options.least, options.nodes),
      resources_per_worker={"CPU": 1},
      elastic_resize_monitor_interval_s=5,
    ),
    run_config=ray.train.RunConfig(
      storage_path=str(options.folder / "ray"),
      failure_config=ray.train.FailureConfig(max_failures=options.failures),
    ),
  )
  trainer.fit()


def emulate(options: argparse.Namespace) -> None:
  """Trains on nodes that are processes here; one is killed, and one added later."""
  cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
  try:
    nodes = [cluster.add_node(num_cpus=1) for _ in range(options.nodes)]
    ray.init(cluster.address, runtime_env={"env_vars": WORKER})
    # Ray adds nodes in the main thread alone.
    training = ThreadPoolExecutor(1).submit(fit, options)
    if options.kill_after is not None:
      wait(options.folder, training, options.nodes, options.kill_after)
      diary.note(options.folder, "a node is killed")
      cluster.remove_node(nodes[-1], allow_graceful=False)
    if options.add_after is not None:
      wait(options.folder, training, options.nodes - 1, options.add_after)
      diary.note(options.folder, "a node is added")
      cluster.add_node(num_cpus=1)
    training.result()
  finally:
    ray.shutdown()
    cluster.shutdown()


def wait(
  folder: pathlib.Path, training: Future[None], workers: int, seconds: float
) -> None:
  """Waits until so many workers have trained for so long, or the training has ended."""
  while not training.done():
    began = diary.began(folder, workers)
    if began is not None and time.time() >= began + seconds:
      return
    time.sleep(0.1)


def make_parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    description=__doc__.splitlines()[0],
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
  )
  add = parser.add_argument
  add("--address", help="of a cluster that runs; by default nodes are emulated here")
  add("--folder", type=pathlib.Path, help="that all nodes share; needed by --address")
  add("--nodes", type=positive, default=4, help="at most, a worker each")
  add("--least", type=positive, default=2, help="workers to train with")
  add("--kill-after", type=at_least_0, help="seconds of training; then a node dies")
  add("--add-after", type=at_least_0, help="seconds of training without it")
  add("--failures", type=natural, default=5, help="after which Ray gives up")
  add("--steps", type=positive, default=400, help="of the whole training")
  add("--save-every", type=positive, default=10, help="steps between two checkpoints")
  add("--local-steps", type=natural, default=0, help="of a round; 0: 4 bits each step")
  add("--pause", type=at_least_0, default=0.1, help="seconds after each step")
  return parser


def main(arguments: Sequence[str] | None = None) -> None:
  parser = make_parser()
  options = parser.parse_args(arguments)
  changes = options.kill_after is not None or options.add_after is not None
  if options.address and (changes or not options.folder):
    parser.error("--address needs --folder, and kills and adds no nodes")
  if options.add_after is not None and options.kill_after is None:
    parser.error("--add-after needs --kill-after, for all nodes are there before")
  if options.least > options.nodes - (options.kill_after is not None):
    parser.error("--least must be at most the --nodes that live, or all wait for more")
  if options.local_steps and options.save_every % options.local_steps:
    parser.error("--save-every must be a multiple of --local-steps, whole rounds")
  options.folder = (options.folder or pathlib.Path(tempfile.mkdtemp())).absolute()
  options.folder.mkdir(parents=True, exist_ok=True)
  os.environ |= RAY_LIMITS | os.environ
  if options.address:
    ray.init(options.address, runtime_env={"env_vars": WORKER})
    fit(options)
  else:
    emulate(options)
  print("\n".join(diary.told(diary.read(options.folder))))


if __name__ == "__main__":
  main()
