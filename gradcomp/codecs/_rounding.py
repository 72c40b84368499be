"""How codecs choose between two neighbouring codes."""

from typing import Literal

Rounding = Literal["stochastic", "nearest"]
