"""The README's examples run as they stand there, in a process of their own."""

import pathlib
import re
import subprocess
import sys

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_the_fifteen_lines_run(tmp_path):
  blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
  (code,) = [block for block in blocks if block.startswith("import jax")]
  assert len([line for line in code.splitlines() if line]) == 15
  code += 'assert metrics["loss"] < 0.5 * loss_fn({"w": np.zeros((512, 512))}, batch)\n'
  (plain_jit,) = [block for block in blocks if block.startswith("@jax.jit")]
  code += f'{plain_jit}assert loss < metrics["loss"]\n'
  result = subprocess.run(
    [sys.executable, "-W", "error", "-c", code],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert result.returncode == 0, result.stderr
  # The table that it prints is the wire's: words, and their total.
  assert "u32" in result.stdout and "all-to-all" in result.stdout
