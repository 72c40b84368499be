"""Compresses the gradient exchange of data-parallel training in JAX."""

import importlib
from typing import TYPE_CHECKING, Any

from gradcomp import (
  checkpoint,
  codecs,
  contrib,
  cost,
  exchange,
  floats,
  kernels,
  local,
  optimizers,
  parallel,
  state,
  telemetry,
  wrappers,
)
from gradcomp._src import public as _public
from gradcomp._src.checkpoint.reshard import reshard_state
from gradcomp._src.core.feedback import ErrorFeedback, MomentumFeedback
from gradcomp._src.core.specs import init_state, state_specs
from gradcomp._src.core.transform import compress
from gradcomp._src.local_steps.mean_over import mean_over
from gradcomp._src.mesh.trees import PerWorker
from gradcomp._src.report.citation import citation
from gradcomp._src.report.explain import explain
from gradcomp._src.report.overlap_report import overlap_report
from gradcomp._src.report.wire_report import wire_report
from gradcomp._src.training.gradients import defer_reduction, value_and_grad
from gradcomp._src.training.train_step import TrainOptions, TrainStep, make_train_step
from gradcomp._src.transforms.each_worker import global_norm
from gradcomp._src.transforms.low_rank import powersgd
from gradcomp._src.transforms.options import CompressOptions
from gradcomp._src.transforms.recipes import (
  aps,
  dense,
  eight_bit,
  loss_scaling_cast,
  natural,
  onebit_sgd,
  policy,
  qsgd,
  terngrad,
)
from gradcomp._src.transforms.skip import skip_nonfinite
from gradcomp._src.transforms.sparse import blocktop, randomk, redsync, topk
from gradcomp._src.version import __version__

if TYPE_CHECKING:
  from gradcomp import testing

__all__ = ["CompressOptions", "ErrorFeedback", "MomentumFeedback", "PerWorker"]
__all__ += ["TrainOptions", "TrainStep", "__version__", "aps", "blocktop", "checkpoint"]
__all__ += ["citation", "codecs", "compress", "contrib", "cost", "defer_reduction"]
__all__ += ["dense", "eight_bit", "exchange", "explain", "floats", "global_norm"]
__all__ += ["init_state", "kernels", "local", "loss_scaling_cast", "make_train_step"]
__all__ += ["mean_over", "natural", "onebit_sgd", "optimizers", "overlap_report"]
__all__ += ["parallel", "policy", "powersgd", "qsgd", "randomk", "redsync"]
__all__ += ["reshard_state", "skip_nonfinite", "state", "state_specs", "telemetry"]
__all__ += ["terngrad", "testing", "topk", "value_and_grad", "wire_report", "wrappers"]


if not TYPE_CHECKING:  # a checker would take it for a promise of every name

  def __getattr__(name: str) -> Any:
    if name == "testing":  # which a program that trains does not need
      return importlib.import_module("gradcomp.testing")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
  return sorted(__all__)


for _space in (checkpoint, codecs, cost, exchange, floats, kernels, local, optimizers):
  _public.publish(vars(_space))
for _space in (parallel, state, telemetry, wrappers):
  _public.publish(vars(_space))
_public.publish(globals())
