"""MaxText, its own train loop and decoder.

A function in the place of ``jax.value_and_grad`` returns the mean that 4 bits sent.
"""

import functools
import json
import types
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from maxtext.trainers.pre_train import train as own
from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR

import gradcomp
from examples.lib import trainers

OPTIONS = (
  "skip_jax_distributed_system=true enable_checkpointing=false per_device_batch_size=1 "
  "base_num_decoder_layers=2 ici_tensor_parallelism=2 base_num_query_heads=4 "
  "ici_data_parallelism=4 dataset_type=synthetic attention=dot_product base_emb_dim=64 "
  "max_target_length=32 base_num_kv_heads=4 learning_rate=3e-3 base_mlp_dim=128 "
  "run_name=example jax_cache_dir='' vocab_size=256 dtype=float32 hardware=cpu "
  "head_dim=16"
)


def train(steps: int, compressed: bool) -> tuple[float, Any]:
  seen = types.SimpleNamespace(**vars(jax))
  if compressed:

    def mean(loss_fn: Any, *args: Any, **given: Any) -> Any:
      over = {"param_specs": nnx.get_partition_spec(args[:2])}
      given |= over | {"axis_name": "data", "batch_argnums": 4}
      value, grads = gradcomp.value_and_grad(loss_fn, **given)(*args)
      over |= {"codec": gradcomp.codecs.QSGD(bits=4), "mesh_axis": "data"}
      loss, _ = value  # whose bits are other ones in each step
      over["key"] = jax.lax.bitcast_convert_type(loss, jnp.uint32)
      return value, gradcomp.mean_over(jax.tree.map(lambda g: g.rows, grads), **over)

    seen.value_and_grad = functools.partial(functools.partial, mean)
  with TemporaryDirectory() as folder:
    file = Path(folder) / "metrics"
    told = f"{OPTIONS} base_output_directory={folder} metrics_file={file} steps={steps}"
    argv = ["train", f"{MAXTEXT_CONFIGS_DIR}/base.yml", *told.split()]
    with mock.patch.object(own, "jax", seen), trainers.compiled() as programs:
      own.main(argv)
    return json.loads(file.read_text().splitlines()[-1])["learning/loss"], programs[0]


if __name__ == "__main__":
  trainers.main(__doc__, train, axes={"data": 4, "tensor": 2}, over="data")
