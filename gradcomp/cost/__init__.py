"""Predicts what an exchange costs, in seconds and bytes. It needs no JAX."""

from gradcomp.cost._cluster import Cluster as Cluster
from gradcomp.cost._cluster import CodecSpeed as CodecSpeed
from gradcomp.cost._collectives import all_gather_seconds as all_gather_seconds
from gradcomp.cost._collectives import all_reduce_seconds as all_reduce_seconds
from gradcomp.cost._collectives import all_to_all_seconds as all_to_all_seconds
from gradcomp.cost._collectives import ppermute_seconds as ppermute_seconds
from gradcomp.cost._collectives import reduce_scatter_seconds as reduce_scatter_seconds
from gradcomp.cost._collectives import tree_seconds as tree_seconds
from gradcomp.cost._exchange import Breakdown as Breakdown
from gradcomp.cost._exchange import dense_seconds as dense_seconds
from gradcomp.cost._exchange import exchange_seconds as exchange_seconds
from gradcomp.cost._exchange import message_seconds as message_seconds
from gradcomp.cost._link import Link as Link
from gradcomp.cost._step import crossover_rate as crossover_rate
from gradcomp.cost._step import crossover_workers as crossover_workers
from gradcomp.cost._step import step_seconds as step_seconds
from gradcomp.cost._step import strong_scaling as strong_scaling
from gradcomp.cost._step import weak_scaling as weak_scaling
