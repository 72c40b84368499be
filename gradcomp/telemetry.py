"""Measurements of compression errors, and comparisons of replicas."""

from gradcomp._src.core.fingerprint import fingerprint
from gradcomp._src.telemetry.inspect import inspect_update
from gradcomp._src.telemetry.replicas import compare_replicas
from gradcomp._src.telemetry.scalars import scalars

__all__ = ["compare_replicas", "fingerprint", "inspect_update", "scalars"]
