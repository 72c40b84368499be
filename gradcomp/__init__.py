"""Compresses the gradient exchange of data-parallel training in JAX."""

from gradcomp import codecs as codecs
from gradcomp import floats as floats
from gradcomp import kernels as kernels
from gradcomp._explain import Explanation as Explanation
from gradcomp._explain import explain as explain
from gradcomp._version import __version__ as __version__
from gradcomp.aliases import dense as dense
from gradcomp.aliases import eight_bit as eight_bit
from gradcomp.aliases import onebit_sgd as onebit_sgd
from gradcomp.aliases import qsgd as qsgd
from gradcomp.aliases import terngrad as terngrad
from gradcomp.clipping import clip_by_local_norm as clip_by_local_norm
from gradcomp.low_precision import aps as aps
from gradcomp.low_precision import loss_scaling_cast as loss_scaling_cast
from gradcomp.sharding import init_state as init_state
from gradcomp.sharding import state_specs as state_specs
from gradcomp.sparse import redsync as redsync
from gradcomp.state import CompressState as CompressState
from gradcomp.switching import SwitchState as SwitchState
from gradcomp.switching import switch as switch
from gradcomp.train import defer_reduction as defer_reduction
from gradcomp.train import make_train_step as make_train_step
from gradcomp.train import value_and_grad as value_and_grad
from gradcomp.transform import compress as compress
from gradcomp.wire import WireReport as WireReport
from gradcomp.wire import wire_report as wire_report
