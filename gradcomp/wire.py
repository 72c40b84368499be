"""Reports of the bytes that a step sends."""

from gradcomp._src import public as _public
from gradcomp._src.report.collectives import Collective
from gradcomp._src.report.explain import Explanation, LeafPlan, explain
from gradcomp._src.report.trace_wire import Directions, trace_wire
from gradcomp._src.report.wire_report import WireReport, wire_report

__all__ = [
  "Collective",
  "Directions",
  "Explanation",
  "LeafPlan",
  "WireReport",
  "explain",
  "trace_wire",
  "wire_report",
]

_public.publish(globals())
