"""Specs, shapes, records and resharding of optimizer states."""

from gradcomp._src.checkpoint.placement import place
from gradcomp._src.checkpoint.records import check_record, record
from gradcomp._src.checkpoint.reshard import reshard_state
from gradcomp._src.checkpoint.shapes import state_shapes
from gradcomp._src.core.specs import init_state, state_specs

__all__ = ["check_record", "init_state", "place", "record", "reshard_state"]
__all__ += ["state_shapes", "state_specs"]
