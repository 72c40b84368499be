"""Says how much each test file may compile and compute in a plain run.

Programs are counted because their number hardly depends on the machine. It depends a
little on the version of JAX, so there is room: a third, and 60 for operations outside
of programs. Seconds are those of all processors together on two cores with an empty
cache; a file fails at ``ROOM`` times as many, which a busy machine does not reach.
"""

from typing import NamedTuple

ROOM = 4


class Budget(NamedTuple):
  programs: int
  seconds: float


# Files that are not here, most of them doctests.
OTHERS = Budget(programs=150, seconds=10)

FILES: dict[str, Budget] = {
  "gradcomp/_src/transforms/recipes.py": Budget(programs=200, seconds=10),
  "gradcomp/_src/transforms/sparse.py": Budget(programs=260, seconds=10),
  "gradcomp/codecs.py": Budget(programs=650, seconds=20),
  "tests/codecs/test_codecs.py": Budget(programs=780, seconds=90),
  "tests/exchange/test_exchange.py": Budget(programs=520, seconds=65),
  "tests/core/test_extra_args.py": Budget(programs=200, seconds=15),
  "tests/benchmarks/test_cut_nets.py": Budget(programs=150, seconds=15),
  "tests/benchmarks/test_paper_arms.py": Budget(programs=450, seconds=30),
  "tests/examples/test_examples.py": Budget(programs=60, seconds=35),
  "tests/project/test_packaging.py": Budget(programs=150, seconds=20),
  "tests/kernels/test_pallas.py": Budget(programs=370, seconds=30),
  "tests/report/test_wire_proof.py": Budget(programs=120, seconds=25),
  "tests/exchange/test_float_cast_exchange.py": Budget(programs=200, seconds=25),
  "tests/exchange/test_mesh_axes.py": Budget(programs=250, seconds=25),
  "tests/exchange/test_sparse_exchange.py": Budget(programs=230, seconds=25),
  "tests/core/test_citizen.py": Budget(programs=280, seconds=15),
  "tests/project/test_docs.py": Budget(programs=340, seconds=30),
  "tests/core/test_explicit.py": Budget(programs=290, seconds=20),
  "tests/floats/test_float_sums.py": Budget(programs=640, seconds=20),
  "tests/kernels/test_self_check.py": Budget(programs=280, seconds=15),
  "tests/exchange/test_many_hosts.py": Budget(programs=90, seconds=20),
  "tests/kernels/test_selection_kernels.py": Budget(programs=200, seconds=20),
  "tests/codecs/test_ternary.py": Budget(programs=250, seconds=20),
  "tests/codecs/test_top_k.py": Budget(programs=380, seconds=20),
  "tests/parallel/test_zero.py": Budget(programs=400, seconds=20),
  "tests/benchmarks/test_cluster_cut.py": Budget(programs=390, seconds=25),
  "tests/exchange/test_codec_exchange.py": Budget(programs=310, seconds=15),
  "tests/codecs/test_eight_bit.py": Budget(programs=190, seconds=15),
  "tests/codecs/test_float_cast.py": Budget(programs=290, seconds=15),
  "tests/exchange/test_messages.py": Budget(programs=130, seconds=15),
  "tests/codecs/test_block_top.py": Budget(programs=400, seconds=10),
  "tests/telemetry/test_inspect.py": Budget(programs=110, seconds=15),
  "tests/core/test_citizen_sharded.py": Budget(programs=170, seconds=10),
  "tests/exchange/test_exchange_oracle.py": Budget(programs=290, seconds=10),
  "tests/floats/test_floats.py": Budget(programs=450, seconds=10),
  "tests/transforms/test_freezing.py": Budget(programs=210, seconds=10),
  "tests/local_steps/test_local_steps.py": Budget(programs=200, seconds=10),
  "tests/local_steps/test_local_training.py": Budget(programs=180, seconds=10),
  "tests/core/test_narrow.py": Budget(programs=350, seconds=10),
  "tests/transforms/test_redsync.py": Budget(programs=230, seconds=10),
  "tests/exchange/test_sparse_parts.py": Budget(programs=180, seconds=10),
  "tests/codecs/test_top_k_values.py": Budget(programs=340, seconds=10),
  "tests/training/test_train.py": Budget(programs=290, seconds=10),
  "tests/training/test_train_options.py": Budget(programs=210, seconds=10),
  "tests/codecs/test_codec_errors.py": Budget(programs=180, seconds=5),
  "tests/core/test_errors.py": Budget(programs=370, seconds=10),
  "tests/kernels/test_kernels.py": Budget(programs=290, seconds=5),
  "tests/exchange/test_layout.py": Budget(programs=180, seconds=5),
  "tests/codecs/test_one_bit.py": Budget(programs=210, seconds=5),
  "tests/core/test_state.py": Budget(programs=190, seconds=5),
  "tests/project/test_testing.py": Budget(programs=300, seconds=10),
}


def of(path: str) -> Budget:
  return FILES.get(path, OTHERS)
