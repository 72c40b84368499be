"""Exchanges: which collectives carry the messages of a step."""

from gradcomp._src.exchange.auto import Auto
from gradcomp._src.exchange.hierarchical import Hierarchical
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.exchange.schedules import AllGather, TwoShot

__all__ = ["AllGather", "Auto", "Exchange", "Hierarchical", "TwoShot"]
