"""Starts the queue of trainings in a tree of this commit: ``make evidence``.

  setsid nohup make evidence &      goes on when the terminal is closed
  make evidence-status              says how far it is, and its process

Work on the checkout does not disturb the queue: it runs in a worktree of git, which
moves to HEAD whenever the queue starts. Records go to the checkout. A second queue of a
checkout does not start.
"""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.common import cli, locks
from benchmarks.study.queue.supervisor import Folders

FOLDERS = Folders(cli.RESULTS / "study" / "evidence", cli.ROOT / ".evidence")


def move(root: Path, tree: Path) -> str:
  """Makes a worktree of a checkout's HEAD, or moves it there; returns the commit.

  Its datasets are the checkout's.
  """

  def git(folder: Path, *words: str) -> str:
    line = ["git", "-C", str(folder), *words]
    return subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout

  commit = git(root, "rev-parse", "HEAD").strip()
  if (tree / ".git").exists():
    git(tree, "checkout", "--quiet", "--detach", "--force", commit)
  else:  # --force: git may know of one that was removed
    git(root, "worktree", "add", "--quiet", "--detach", "--force", str(tree), commit)
  sets = tree / "datasets"
  if not sets.is_symlink():
    sets.symlink_to(root / "datasets")
  return commit


def environment(tree: Path, work: Path) -> dict[str, str]:
  """Returns the variables with which the tree's own library is imported.

  Trainings that differ in their seeds alone share what they compile.
  """
  own = {
    "PYTHONPATH": str(tree),
    "JAX_PLATFORMS": "cpu",
    "JAX_TRACEBACK_FILTERING": "off",  # so that an error is the last line of a log
    "JAX_COMPILATION_CACHE_DIR": str(work / "programs"),
  }
  return os.environ | own


def main(folders: Folders = FOLDERS, root: Path = cli.ROOT) -> None:
  parser = cli.parser(__doc__)
  parser.add_argument("--jobs", type=int, help="trainings at once; default: the cores")
  args = parser.parse_args()
  folders.work.mkdir(exist_ok=True)
  lock = locks.take(folders.lock)
  if lock is None:
    print(f"the queue runs already: {locks.holder(folders.lock)}")
    return
  folders.running.unlink(missing_ok=True)  # that of a queue that was killed
  tree = folders.work / "tree"
  commit = move(root, tree)
  log = folders.work / "queue.txt"
  print(f"trains with {commit[:12]}, prints to {log}", flush=True)
  # -P: nothing is imported from the folder that the queue starts in.
  line = [sys.executable, "-P", "-m", "benchmarks.study.queue.supervisor"]
  line += ["--records", str(folders.records)]
  line += ["--work", str(folders.work)]
  line += ["--jobs", str(args.jobs)] if args.jobs else []
  with log.open("a") as file:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
  os.set_inheritable(lock, True)  # the queue holds it on
  os.execve(sys.executable, line, environment(tree, folders.work))


if __name__ == "__main__":
  main()
