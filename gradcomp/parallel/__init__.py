"""Compressed collectives, forward and backward, for models sharded over workers."""

from gradcomp.parallel._all_gather import all_gather as all_gather
from gradcomp.parallel._all_to_all import all_to_all as all_to_all
from gradcomp.parallel._explain import Directions as Directions
from gradcomp.parallel._explain import explain as explain
from gradcomp.parallel._gather import gather as gather
from gradcomp.parallel._gather import gather_residual as gather_residual
from gradcomp.parallel._permute import ppermute as ppermute
from gradcomp.parallel._psum import psum as psum
from gradcomp.parallel._psum import sum_gradients as sum_gradients
from gradcomp.parallel._psum_scatter import psum_scatter as psum_scatter
from gradcomp.parallel._reshard import reshard as reshard
from gradcomp.parallel._sub_batches import sub_batches as sub_batches
from gradcomp.parallel._zero import ZeroState as ZeroState
from gradcomp.parallel._zero import zero as zero
