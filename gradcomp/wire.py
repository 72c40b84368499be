"""Reports of the bytes that a step sends, and of the work beside its collectives."""

from gradcomp._src.report.collectives import Collective
from gradcomp._src.report.explain import Explanation, LeafPlan, explain
from gradcomp._src.report.overlap_report import (
  Overlap,
  OverlapReport,
  overlap_report,
)
from gradcomp._src.report.trace_wire import Directions, trace_wire
from gradcomp._src.report.wire_report import WireReport, wire_report
from gradcomp._src.report.work import Work

__all__ = ["Collective", "Directions", "Explanation", "LeafPlan", "Overlap"]
__all__ += ["OverlapReport", "WireReport", "Work", "explain", "overlap_report"]
__all__ += ["trace_wire", "wire_report"]
