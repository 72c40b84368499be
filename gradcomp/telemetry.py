"""Measurements of compression errors, and comparisons of replicas."""

from gradcomp._src.core.fingerprint import fingerprint
from gradcomp._src.telemetry.inspect import (
  Inspection,
  Metrics,
  inspect,
  inspected_update,
)
from gradcomp._src.telemetry.replicas import Replicas, compare_replicas
from gradcomp._src.telemetry.scalars import scalars

__all__ = ["Inspection", "Metrics", "Replicas", "compare_replicas", "fingerprint"]
__all__ += ["inspect", "inspected_update", "scalars"]
