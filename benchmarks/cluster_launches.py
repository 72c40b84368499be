"""Lists the launches that make the committed records of emulated workers.

``python benchmarks/cluster_study.py run --papers --idx FOLDER --output DIR`` runs all,
one after another, and skips what is there. Most arms that ended more than a point below
float32 with their first seeds have no more of them.
"""

_LENET = "--networks lenet --pixels 14 --emulate 8 --epochs 2"
_MLP = "--networks mlp --pixels 14 --emulate 8"
_RESNET = "--networks resnet --pixels 14 --emulate 8 --epochs 0.5 --points 5"
_TEXT = "--text brown --emulate 8 --batch-size 32 --steps 600"
_WEN = (
  "--networks lenet --pixels 14 --batch-size 64 --schedule polynomial --weight-decay "
  "0.0005"
)
_WEN_ADAM = (
  "--networks lenet --pixels 14 --batch per-worker --batch-size 64 --optimizer adam "
  "--learning-rate 0.0002 --codecs f32 terngrad --seeds 5"
)
_HAN = (
  "--networks lenet --pixels 7 --emulate 256 --batch-size 256 --epochs 0.5 --points 5"
)

LAUNCHES = (
  # All codecs at their papers' settings, and settings that should fail.
  f"{_LENET} --seeds 5 --codecs f32 qsgd-16 qsgd-8 qsgd-4 qsgd-2 qsgd-2:conv "
  "qsgd-2:dense qsgd-4-8192 qsgd-2-tensor qsgd-4-l2 qsgd-4-paper qsgd-2-paper "
  "qsgd-2-paper:conv qsgd-2-paper:dense qsgd-4-8192-paper qsgd-2-tensor-paper "
  "qsgd-4-l2-paper qsgd-2-fitted onebit-64 onebit-64:dense onebit-512 terngrad "
  "terngrad:body terngrad-noclip dynamic-tree linear mantissa static-tree aps-5-2 "
  "aps-5-2:body aps-4-3 cast-4-3 redsync-1",
  f"{_LENET} --seeds 3 --codecs qsgd-2-l2 qsgd-2-l2-paper qsgd-1-uniform "
  "qsgd-1-uniform-paper aps-3-0",
  f"{_LENET} --seeds 2 --codecs onebit-64-warm onebit-64-nofeedback aps-3-0:body "
  "cast-3-0 redsync-0.1 topk-1-noresidual topk-0.1-noresidual powersgd-2",
  f"{_LENET} --seeds 5 --codecs f32 --exchanges all_gather",
  f"{_LENET} --seeds 2 --codecs onebit-64 --exchanges all_gather",
  "--networks lenet --pixels 14 --emulate 8 --epochs 6 --seeds 3 "
  "--codecs f32 onebit-64",
  f"{_MLP} --epochs 2 --seeds 5 --codecs f32 qsgd-16 qsgd-8 qsgd-4 qsgd-2 "
  "qsgd-2-tensor-paper onebit-64 terngrad dynamic-tree linear mantissa static-tree "
  "aps-5-2 aps-4-3 redsync-1 redsync-0.1 topk-1-noresidual powersgd-2",
  f"{_RESNET} --seeds 5 --codecs f32 qsgd-16 qsgd-8 qsgd-4 qsgd-2 terngrad "
  "dynamic-tree linear mantissa static-tree aps-5-2 aps-4-3",
  f"{_RESNET} --seeds 2 --codecs onebit-64 redsync-1",
  # Adam.
  f"{_LENET} --optimizer adam --seeds 5 --codecs f32 qsgd-4 terngrad aps-5-2",
  f"{_LENET} --optimizer adam --seeds 3 --codecs onebit-64",
  # Text.
  f"--networks lstm {_TEXT} --seeds 5 --codecs f32 qsgd-4 qsgd-3 qsgd-2 terngrad",
  f"--networks lstm {_TEXT} --seeds 3 --codecs onebit-64 redsync-1 redsync-0.1 "
  "powersgd-2",
  f"--networks transformer {_TEXT} --seeds 5 --codecs f32 qsgd-4 qsgd-3 qsgd-2 "
  "terngrad aps-5-2",
  f"--networks transformer {_TEXT} --seeds 3 --codecs onebit-64 redsync-1 redsync-0.1 "
  "powersgd-2",
  # Wen's workers, with momentum and without, and his batch for each worker with Adam.
  f"{_WEN} --learning-rate 0.01 --steps 937 --emulate 2 4 8 16 32 --seeds 5 --codecs "
  "f32 terngrad",
  f"{_WEN} --learning-rate 0.01 --steps 468 --emulate 64 --seeds 5 --codecs f32 "
  "terngrad",
  f"{_WEN} --learning-rate 0.01 --steps 937 --emulate 2 4 8 --seeds 5 --codecs "
  "terngrad-noclip",
  f"{_WEN} --learning-rate 0.1 --steps 937 --emulate 4 --momentum 0 --seeds 5 --codecs "
  "f32 terngrad",
  f"{_WEN_ADAM} --emulate 2 --steps 936",
  f"{_WEN_ADAM} --emulate 16 --steps 117",
  f"{_MLP} --epochs 2 --dropout 0 --codecs f32 terngrad --seeds 5",
  # Han's 256 workers.
  f"{_HAN} --codecs f32 aps-5-2:body aps-5-2-h16 aps-5-2-h32 aps-5-2-h16:body "
  "aps-4-3-h16-hybrid:body --seeds 5",
  # Fang's batches, and a training in which every element has time to be sent.
  f"{_MLP} --batch-size 512 --epochs 2 --codecs f32 redsync-1 --seeds 5",
  f"{_MLP} --batch-size 2048 --steps 936 --codecs f32 redsync-1 --seeds 5",
  "--networks mlp --pixels 14 --emulate 4 --batch-size 16 --steps 10000 "
  "--learning-rate 0.00625 --codecs f32 redsync-0.1 --seeds 3",
)
