"""Performance models of links, exchanges and steps, and a planner; needs no JAX."""

import importlib
from typing import TYPE_CHECKING, Any

from gradcomp._src.cost.cluster import Cluster, CodecSpeed
from gradcomp._src.cost.collectives import (
  all_gather_seconds,
  all_reduce_seconds,
  all_to_all_seconds,
  ppermute_seconds,
  reduce_scatter_seconds,
  tree_seconds,
)
from gradcomp._src.cost.exchange import (
  Breakdown,
  dense_seconds,
  exchange_seconds,
  message_seconds,
)
from gradcomp._src.cost.link import Link
from gradcomp._src.cost.step import (
  crossover_rate,
  crossover_workers,
  step_seconds,
  strong_scaling,
  weak_scaling,
)

if TYPE_CHECKING:
  from gradcomp._src.cost.allocate import AllocatedLeaf, Allocation, allocate
  from gradcomp._src.cost.planner.candidates import CANDIDATES, Candidate
  from gradcomp._src.cost.planner.choice import Plan, PlanOptions, plan

__all__ = ["AllocatedLeaf", "Allocation", "Breakdown", "CANDIDATES", "Candidate"]
__all__ += ["Cluster", "CodecSpeed", "Link", "Plan", "PlanOptions"]
__all__ += ["all_gather_seconds", "all_reduce_seconds", "all_to_all_seconds"]
__all__ += ["allocate", "crossover_rate", "crossover_workers"]
__all__ += ["dense_seconds", "exchange_seconds", "message_seconds", "plan"]
__all__ += ["ppermute_seconds", "reduce_scatter_seconds", "step_seconds"]
__all__ += ["strong_scaling", "tree_seconds", "weak_scaling"]

# The planner needs JAX.
_LATER = {
  **dict.fromkeys(
    ("AllocatedLeaf", "Allocation", "allocate"), "gradcomp._src.cost.allocate"
  ),
  **dict.fromkeys(("CANDIDATES", "Candidate"), "gradcomp._src.cost.planner.candidates"),
  **dict.fromkeys(("Plan", "PlanOptions", "plan"), "gradcomp._src.cost.planner.choice"),
}


if not TYPE_CHECKING:  # a checker would take it for a promise of every name

  def __getattr__(name: str) -> Any:
    if name in _LATER:
      return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
  return sorted(__all__)
