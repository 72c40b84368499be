"""Exchanges: which collectives carry the messages of a step."""

from gradcomp._src.exchange.auto import Auto, choose
from gradcomp._src.exchange.hierarchical import Hierarchical
from gradcomp._src.exchange.one_stage import AllGather, AllReduce, Local
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.exchange.ring import Ring
from gradcomp._src.exchange.two_shot import TwoShot

__all__ = ["AllGather", "AllReduce", "Auto", "Exchange", "Hierarchical", "Local"]
__all__ += ["Ring", "TwoShot", "choose"]
