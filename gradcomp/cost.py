"""Performance models of links, exchanges and steps, and a planner."""

from gradcomp._src.cost.allocate import AllocatedLeaf, Allocation, allocate
from gradcomp._src.cost.exchange import (
  Breakdown,
  crossover_rate,
  crossover_workers,
  dense_seconds,
  exchange_seconds,
  message_seconds,
  step_seconds,
  strong_scaling,
  weak_scaling,
)
from gradcomp._src.cost.link import Cluster, CodecSpeed, Link, collective_seconds
from gradcomp._src.cost.planner.candidates import CANDIDATES, Candidate
from gradcomp._src.cost.planner.choice import Plan, PlanOptions, plan

__all__ = ["AllocatedLeaf", "Allocation", "Breakdown", "CANDIDATES", "Candidate"]
__all__ += ["Cluster", "CodecSpeed", "Link", "Plan", "PlanOptions"]
__all__ += ["allocate", "collective_seconds", "crossover_rate", "crossover_workers"]
__all__ += ["dense_seconds", "exchange_seconds", "message_seconds", "plan"]
__all__ += ["step_seconds", "strong_scaling", "weak_scaling"]
