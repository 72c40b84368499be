"""Performance models of links, exchanges and steps, and a planner."""

from gradcomp._src.cost.allocate import allocate
from gradcomp._src.cost.exchange import (
  crossover_rate,
  crossover_workers,
  dense_seconds,
  exchange_seconds,
  message_seconds,
  step_seconds,
)
from gradcomp._src.cost.link import Cluster, CodecSpeed, Link, collective_seconds
from gradcomp._src.cost.planner.choice import PlanOptions, plan

__all__ = ["Cluster", "CodecSpeed", "Link", "PlanOptions", "allocate"]
__all__ += ["collective_seconds", "crossover_rate", "crossover_workers"]
__all__ += ["dense_seconds", "exchange_seconds", "message_seconds", "plan"]
__all__ += ["step_seconds"]
