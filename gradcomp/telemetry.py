"""Measurements of compression errors, and comparisons of replicas."""

from gradcomp._src import public as _public
from gradcomp._src.telemetry import plots
from gradcomp._src.telemetry.fingerprint import fingerprint
from gradcomp._src.telemetry.inspect import (
  Inspection,
  Metrics,
  inspect,
  inspected_update,
)
from gradcomp._src.telemetry.replicas import Replicas, compare_replicas
from gradcomp._src.telemetry.scalars import scalars

__all__ = [
  "Inspection",
  "Metrics",
  "Replicas",
  "compare_replicas",
  "fingerprint",
  "inspect",
  "inspected_update",
  "plots",
  "scalars",
]

_public.publish(globals())
