"""Axes and types of workers: bound axes, sharding specs, and maps over devices.

The folder lies below all others but the kernels, and imports none of them.
"""

from gradcomp.workers._axes import Axes as Axes
from gradcomp.workers._axes import AxisName as AxisName
from gradcomp.workers._axes import UnboundAxisError as UnboundAxisError
from gradcomp.workers._axes import abstract_mesh as abstract_mesh
from gradcomp.workers._axes import automatic_axes as automatic_axes
from gradcomp.workers._axes import axis_names as axis_names
from gradcomp.workers._axes import bound_size as bound_size
from gradcomp.workers._axes import manual_axes as manual_axes
from gradcomp.workers._axes import mesh_size as mesh_size
from gradcomp.workers._axes import require_size as require_size
from gradcomp.workers._closures import OF_OPTIMIZER as OF_OPTIMIZER
from gradcomp.workers._closures import with_arrays as with_arrays
from gradcomp.workers._maps import map_addends as map_addends
from gradcomp.workers._maps import per_device as per_device
from gradcomp.workers._maps import unreduce as unreduce
from gradcomp.workers._own_state import check_own as check_own
from gradcomp.workers._own_state import check_residual_types as check_residual_types
from gradcomp.workers._own_state import first_state as first_state
from gradcomp.workers._own_state import stacked_for as stacked_for
from gradcomp.workers._reduction import reduction as reduction
from gradcomp.workers._specs import entries as entries
from gradcomp.workers._specs import is_spec as is_spec
from gradcomp.workers._specs import names_by_axis as names_by_axis
from gradcomp.workers._specs import reduced_spec as reduced_spec
from gradcomp.workers._specs import restrict_spec as restrict_spec
from gradcomp.workers._specs import sharded_axes as sharded_axes
from gradcomp.workers._specs import spec_of as spec_of
from gradcomp.workers._specs import stack_spec as stack_spec
from gradcomp.workers._specs import stacked_over as stacked_over
from gradcomp.workers._traces import EXPLAINED as EXPLAINED
from gradcomp.workers._traces import FOLLOWED as FOLLOWED
from gradcomp.workers._traces import is_explained as is_explained
from gradcomp.workers._traces import is_followed as is_followed
from gradcomp.workers._traces import or_explained as or_explained
from gradcomp.workers._types import is_explicit as is_explicit
from gradcomp.workers._types import is_typed as is_typed
from gradcomp.workers._types import mark_reduced as mark_reduced
from gradcomp.workers._types import mark_varying as mark_varying
from gradcomp.workers._types import mesh_of as mesh_of
from gradcomp.workers._types import other_axes as other_axes
from gradcomp.workers._types import placed_spec as placed_spec
from gradcomp.workers._types import typed_spec as typed_spec
from gradcomp.workers._types import unreduced_axes as unreduced_axes
from gradcomp.workers._types import varying_axes as varying_axes
from gradcomp.workers._whole import GATHER_FIRST as GATHER_FIRST
from gradcomp.workers._whole import check_whole_arrays as check_whole_arrays
from gradcomp.workers._whole import check_whole_params as check_whole_params
from gradcomp.workers._whole import check_whole_specs as check_whole_specs
