"""Times PyTorch's DistributedDataParallel over gloo on one host, for comparison.

  python -m benchmarks.links.torch_worker '{"rank": 0, ...}'    links/speed.py starts it

A step is a backward pass that hands ready gradients to DDP, whose hooks average them
while it runs. So a time has what a time of links/speed.py has: from the gradient to
its mean. Leaves have the shapes that PyTorch's layers have: the axes turned round.

PowerSGD's hook must have all leaves in one bucket. It waits inside of callbacks for its
second and third sum. gloo runs callbacks on its two threads, and so two buckets whose
callbacks wait leave no thread for what they wait for: the step hangs. And hosts whose
callbacks run in other orders pair the sums of different buckets, which gloo ends with
an error where their sizes differ. The hook in float8, which is ours, has the same wait.
"""

import os
import zlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.links import hosts

_Future = torch.futures.Future[torch.Tensor]
_WARM_UP = 3  # DDP makes its buckets anew after the first step
_BLOCK = 256  # elements of a scale in float32
_LARGEST = 448.0  # of float8_e4m3fn
# By their codes: torch's own cast takes a CPU 3.4 times as long.
_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


class _Give(torch.autograd.Function):
  """A loss of zero, whose gradients are given."""

  @staticmethod
  def forward(ctx: Any, grads: list[torch.Tensor], *params: Any) -> torch.Tensor:
    ctx.grads = grads
    return torch.zeros(())

  @staticmethod
  def backward(ctx: Any, *outputs: Any) -> Any:
    return None, *ctx.grads


class _Model(torch.nn.Module):
  def __init__(self, grads: list[torch.Tensor]) -> None:
    super().__init__()
    leaves = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    self.leaves = torch.nn.ParameterList(leaves)

  def forward(self, grads: list[torch.Tensor]) -> torch.Tensor:
    return _Give.apply(grads, *self.leaves)


def model_of(name: str, grads: list[torch.Tensor]) -> DistributedDataParallel:
  """Builds a model whose gradients DDP averages with the hook of this name."""
  _, hook = name.split(" ")
  method, _, rank = hook.partition("-")
  whole = 2 * sum(grad.nbytes for grad in grads) // 2**20 + 1
  model = DistributedDataParallel(
    _Model(grads),
    gradient_as_bucket_view=True,
    bucket_cap_mb=whole if method in ("fp8", "powersgd") else None,
  )
  if method == "fp16":
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
  if method == "fp8":
    model.register_comm_hook(None, _float8)
  if method == "powersgd":
    way = {"matrix_approximation_rank": int(rank)}
    way["start_powerSGD_iter"] = 2  # the least that the hook allows
    model.register_comm_hook(powerSGD_hook.PowerSGDState(None, **way), _powersgd)
  return model


def _powersgd(state: powerSGD_hook.PowerSGDState, bucket: dist.GradBucket) -> _Future:
  """Runs the hook, but sends nothing in the steps before buckets are final."""
  if state.iter < state.start_powerSGD_iter:
    state.maybe_increase_iter(bucket)
    return _done(bucket.buffer())
  return powerSGD_hook.powerSGD_hook(state, bucket)


def _float8(_: None, bucket: dist.GradBucket) -> _Future:
  """Averages in float8, as the public text of LoongForge's pull request 223 says.

  Each worker sends shares to their owners, who add in float32 and send means to all.
  """
  workers, grads = dist.get_world_size(), bucket.buffer()
  filled = torch.nn.functional.pad(grads, (0, -len(grads) % (workers * _BLOCK)))
  sent = _packed(filled)
  received, every = torch.empty_like(sent), torch.empty_like(sent)
  dist.all_to_all_single(received, sent)
  mean = _unpacked(received).view(workers, -1).mean(0)
  dist.all_gather_into_tensor(every, _packed(mean))
  return _done(_unpacked(every)[: len(grads)])


def _packed(x: torch.Tensor) -> torch.Tensor:
  """Returns ``uint8[blocks, 4 + 256]``: the scale of each block, and its codes."""
  blocks = x.view(-1, _BLOCK)
  scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-30) / _LARGEST
  codes = (blocks / scale).to(torch.float8_e4m3fn)
  return torch.cat([scale.view(torch.uint8), codes.view(torch.uint8)], 1)


def _unpacked(rows: torch.Tensor) -> torch.Tensor:
  scale, codes = (x.contiguous() for x in rows.split([4, _BLOCK], 1))
  values = _VALUES.index_select(0, codes.view(-1).int()).view(-1, _BLOCK)
  return values.mul_(scale.view(torch.float32)).view(-1)


def _done(result: torch.Tensor) -> _Future:
  found: _Future = torch.futures.Future()
  found.set_result(result)
  return found


def measure(grads: list[torch.Tensor], options: dict[str, Any]) -> dict[str, Any]:
  """Times each program by itself, after calls that are not timed."""
  results: dict[str, dict[str, Any]] = {}
  mean = None
  for name in options["steps"]:
    model = model_of(name, grads)
    for repeat in range(-_WARM_UP, options["repeats"]):
      model.zero_grad(set_to_none=True)
      given = dist.barrier, model(grads).backward
      _, took = hosts.timed(options["interface"], *given)
      if repeat == -1:  # a hook's first real call: no residual is in it yet
        result = np.concatenate([x.grad.numpy().ravel() for x in model.module.leaves])
        mean = result if mean is None else mean
        error = float(np.linalg.norm(result - mean) / np.linalg.norm(mean))
        results[name] = {"error": error, "crc32": zlib.crc32(result)}
        results[name]["wire_report"] = None
      for kind, amount in took.items() if repeat >= 0 else ():
        results[name].setdefault(kind, []).append(amount)
  return results


def main(options: dict[str, Any]) -> Any:
  rank, count = options["rank"], len(options["ends"])
  meeting = f"tcp://{options['coordinator']}"
  dist.init_process_group("gloo", meeting, rank=rank, world_size=count)
  rng = np.random.default_rng(rank)
  draw = lambda shape: torch.from_numpy(rng.standard_normal(shape[::-1], np.float32))
  grads = [draw(shape) for shape in options["shapes"]]
  steps = measure(grads, options)
  dist.barrier()
  return {"steps": steps}


if __name__ == "__main__":
  hosts.report(main)
  os._exit(0)  # the reducers' threads are not waited for
