"""Says how much each test file may compile and compute in a plain run.

Programs are counted: the number is the same on every machine, and a few more are room
for versions of JAX. Seconds are those of all processors together on two quiet cores
with an empty cache; a file fails at ``ROOM`` times as many, which a busy machine does
not reach.
"""

from typing import NamedTuple

ROOM = 4


class Budget(NamedTuple):
  programs: int
  seconds: float


# Files that are not here, most of them doctests.
OTHERS = Budget(programs=150, seconds=10)

FILES: dict[str, Budget] = {
  "tests/test_exchange.py": Budget(programs=60, seconds=45),
  "tests/test_exchange_oracle.py": Budget(programs=50, seconds=25),
}


def of(path: str) -> Budget:
  return FILES.get(path, OTHERS)
