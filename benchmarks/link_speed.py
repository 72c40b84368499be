"""Times a whole gradient exchange between hosts on links of a known rate.

  python benchmarks/link_speed.py [--hosts 2 4] [--rate 1gbit ...] [--mib 64 ...]
  python benchmarks/link_speed.py --quick [--loopback]

Hosts are network namespaces on rate-limited links (links.py), which need Linux, root,
ip and tc. With --loopback, they are plain processes on a link that nothing limits. Each
host runs one JAX process (link_worker.py), which times in turn the plain f32 mean and
every codec with every exchange. A time covers the way from the gradient to its mean:
encode, exchange, decode. One two_shot is also timed part by part. The time of a step is
the slowest host's.

The table also has bytes from the kernel's counters, as multiples of the arithmetic and
of gradcomp.wire_report, the CPU time, the error, and whether all hosts got the same
bits. The probe sends raw TCP from each host to the next, all at once, and shows what
the links carry. Read two lines first: the probe, and how far plain f32 is from its wire
bound. Where it is far, something other than the link takes the time, and compression
looks better than it is.

Three things bias the times. The hosts share this machine's cores: with 4 hosts on 2
cores, each codec runs on half a core, and speed-ups come out lower than for hosts with
a core each. The links have no delay, which favours exchanges of many small messages.
They are all alike, and hierarchical is for links that differ. The MALLOC_ settings are
the same for all, and keep the pages that XLA would otherwise fault in anew each step.
"""

import argparse
import itertools
import json
import os
import pathlib
import platform
import signal
import statistics
import sys
import tempfile
from importlib import metadata
from typing import Any

import link_worker
import links
import numpy as np
import running

_HERE = pathlib.Path(__file__).parent
_FAR = 1.3  # times the wire bound: too far for a measurement of the link
_MALLOC = {
  "MALLOC_ARENA_MAX": "1",
  "MALLOC_MMAP_MAX_": "0",
  "MALLOC_TRIM_THRESHOLD_": "17179869184",
  "MALLOC_TOP_PAD_": "268435456",
}
_ENVIRONMENT = _MALLOC | {
  "JAX_PLATFORMS": "cpu",
  "XLA_FLAGS": "--xla_cpu_collective_timeout_seconds=120",
}


def run_workers(
  hosts: list[links.Host], job: dict[str, Any], limit: float
) -> list[dict[str, Any]]:
  """Runs link_worker.py on each host, and returns the reports."""
  ports = links.free_ports(len(hosts) + 1)
  ends = [(host.address, port) for host, port in zip(hosts, ports, strict=False)]
  job = job | {"ends": ends, "coordinator": f"{hosts[0].address}:{ports[-1]}"}
  with tempfile.TemporaryDirectory() as folder:
    outputs = [pathlib.Path(folder, f"{rank}.json") for rank in range(len(hosts))]
    commands = []
    for rank, (host, output) in enumerate(zip(hosts, outputs, strict=True)):
      own = {"rank": rank, "interface": host.interface, "output": str(output)}
      worker = str(_HERE / "link_worker.py")
      commands.append([sys.executable, worker, json.dumps(job | own)])
    links.run(hosts, commands, _ENVIRONMENT, limit)
    return [json.loads(output.read_text()) for output in outputs]


def combine(reports: list[dict[str, Any]], kind: str, shared: bool) -> dict[str, Any]:
  """Makes one entry for each program from the entries of all hosts.

  Args:
    reports: one of each host.
    kind: ``"steps"`` or ``"parts"``.
    shared: whether one counter counts the bytes of all hosts.
  """
  results = {}
  for name, first in reports[0][kind].items():
    entries = [report[kind][name] for report in reports]
    seconds = list(map(max, zip(*(e["seconds"] for e in entries), strict=True)))
    sent = max(statistics.median(e["sent"]) for e in entries)
    results[name] = {
      "seconds": seconds,
      "median_seconds": statistics.median(seconds),
      "cpu_seconds_a_host": statistics.mean(
        statistics.median(e["cpu_seconds"]) for e in entries
      ),
      "bytes_sent": sent / len(reports) if shared else sent,
      "bytes_arithmetic": first["arithmetic"],
      "bytes_wire_report": first["wire_report"],
    }
    if "crc32" in first:
      results[name]["error"] = first["error"]
      results[name]["same_bits"] = len({e["crc32"] for e in entries}) == 1
  return results


def show(run: dict[str, Any]) -> None:
  """Prints the tables of a run."""
  rate = run["bits_per_second"]
  print(
    f"\n{run['hosts']} hosts, {run['rate']}, {run['mib']} MiB of f32 in "
    f"{run['leaves']} leaves, {run['repeats']} repeats"
  )
  if run["probe"]:
    speed = ", ".join(f"{8e-6 * value:,.0f}" for value in run["probe"])
    of_rate = f": {8 * min(run['probe']) / rate:.2f} of the rate" if rate else ""
    print(f"raw TCP, all hosts sending and receiving: {speed} Mbit/s{of_rate}")
  baseline = next(iter(run["steps"].values()))
  print(
    f"{'':22}{'ms':>7}  {'(min - max)':>15}{'x f32':>7}{'wire ms':>9}{'CPU ms':>8}"
    f"{'MB sent':>9}{'/ formula':>11}{'/ HLO':>8}{'error':>9}"
  )
  for name, row in (run["steps"] | run["parts"]).items():
    median, seconds = row["median_seconds"], row["seconds"]
    spread = f"({1e3 * min(seconds):.0f} - {1e3 * max(seconds):.0f})"
    bound = f"{8e3 * row['bytes_wire_report'] / rate:.1f}" if rate else ""
    is_step = name in run["steps"]
    ratio = f"{baseline['median_seconds'] / median:.2f}" if is_step else ""
    error = f"{row['error']:.4f}" if is_step else ""
    print(
      f"{name if is_step else '  part: ' + name:22}{1e3 * median:7.1f}  {spread:>15}"
      f"{ratio:>7}{bound:>9}{1e3 * row['cpu_seconds_a_host']:8.1f}"
      f"{row['bytes_sent'] / 1e6:9.3f}{_ratio(row, 'bytes_arithmetic'):>11}"
      f"{_ratio(row, 'bytes_wire_report'):>8}{error:>9}"
      f"{'' if row.get('same_bits', True) else '  THE HOSTS DIFFER'}"
    )
  if run["parts"]:
    total = sum(row["median_seconds"] for row in run["parts"].values())
    print(f"  the parts together: {1e3 * total:.1f} ms")
  if not rate:
    print("NOT A MEASUREMENT OF A LINK: nothing limits it, all is memory and cores.")
    return
  far = baseline["median_seconds"] * rate / 8 / baseline["bytes_wire_report"]
  verdict = "" if far < _FAR else ": TOO FAR FOR A MEASUREMENT OF THE LINK"
  print(f"plain f32 takes {far:.2f} x its wire bound{verdict}.")


def _ratio(row: dict[str, Any], key: str) -> str:
  return f"{row['bytes_sent'] / row[key]:.3f}" if row[key] else "-"


def plot(runs: list[dict[str, Any]], path: pathlib.Path) -> None:
  """Draws a panel for each run: a bar a program, its speed-up and its wire bound."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  columns = min(2, len(runs))
  lines = -(-len(runs) // columns)
  height = 1.2 + 0.28 * max(len(run["steps"]) for run in runs)
  size = (7 * columns, height * lines)
  figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False)
  for axis, run in zip(axes.flat, runs, strict=False):
    names, entries = list(run["steps"]), run["steps"].values()
    times = 1e3 * np.array([entry["seconds"] for entry in entries])
    median, low, high = np.median(times, 1), times.min(1), times.max(1)
    codecs = [name.split()[0] for name in names]  # one colour each
    colors = [f"C{list(dict.fromkeys(codecs)).index(codec)}" for codec in codecs]
    axis.barh(names, median, color=["0.6", *colors[1:]], alpha=0.8)
    around = np.stack([median - low, high - median])
    axis.errorbar(median, names, xerr=around, fmt="none", ecolor="0.3", capsize=2)
    for i, speed_up in enumerate(median[0] / median):
      axis.text(high[i], i, f"  {speed_up:.1f} x", va="center", fontsize=9)
    if rate := run["bits_per_second"]:
      bounds = [8e3 * entry["bytes_wire_report"] / rate for entry in entries]
      axis.plot(bounds, names, "|", color="k", ms=11, mew=2, label="bytes / rate")
      axis.legend(loc="lower right")
    axis.set_xlim(0, 1.15 * high.max())
    axis.invert_yaxis()
    axis.set_xlabel("ms a step: median, min to max; x: speed-up over plain f32")
    axis.set_title(f"{run['hosts']} hosts, {run['rate']}, {run['mib']} MiB of f32")
  for axis in axes.flat[len(runs) :]:
    axis.remove()
  figure.tight_layout()
  figure.savefig(path, dpi=120)
  plt.close(figure)


def machine() -> dict[str, Any]:
  """Describes the machine, on which the times depend."""
  cpu = pathlib.Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2]
  return {
    "jax": metadata.version("jax"),
    "cpu": cpu.splitlines()[0] if cpu else platform.machine(),
    "cores": os.cpu_count(),
    "kernel": platform.release(),
    "load": os.getloadavg()[0],
    "malloc": _MALLOC,
  }


def parse() -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add("--hosts", type=int, nargs="+", default=[2, 4])
  add("--rate", nargs="+", default=["1gbit"], help="of each direction, in tc's words")
  add("--mib", type=int, nargs="+", default=[64], help="size of the f32 gradient")
  add("--leaves", type=int, default=1, help="equal arrays that make up the gradient")
  add("--repeats", type=int, default=5)
  add("--codecs", nargs="+", choices=link_worker.CODECS, default=[*link_worker.CODECS])
  add("--no-probe", dest="probe", action="store_false", help="skip the raw TCP probe")
  add("--loopback", action="store_true", help="plain processes, no limit on the link")
  running.add_quick(parser, "2 hosts, 1 MiB, 2 codecs, 1 repeat")
  add("--limit", type=float, default=900, help="seconds after which a run has failed")
  where = "folder of link_speed.json and .png; by default benchmarks/results, and none "
  add("--output", type=pathlib.Path, help=where + "with --quick or without a limit")
  options = parser.parse_args()
  if options.quick:
    options.hosts, options.mib, options.repeats = [2], [1], 1
    options.codecs = ["qsgd-4", "terngrad"]
    running.compile_fast()
  if not options.loopback and (missing := links.missing()):
    running.skip(f"limited links need {missing}; --loopback does without")
  if options.loopback:
    options.rate = ["unlimited"]
  elif options.output is None and not options.quick:
    options.output = _HERE / "results"
  return options


def main() -> None:
  sys.stdout.reconfigure(line_buffering=True)
  options = parse()
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, _leave)
  results: dict[str, Any] = {"machine": machine(), "runs": []}
  print(json.dumps(results["machine"]))
  for rate, count, mib in itertools.product(options.rate, options.hosts, options.mib):
    speed = None if options.loopback else links.bits_per_second(rate)
    job = {
      "mib": mib,
      "leaves": options.leaves,
      "repeats": options.repeats,
      "codecs": options.codecs,
      "probe_bytes": int((speed or 8e9) / 8 / 2) if options.probe else 0,
    }
    network = links.limited(count, rate) if speed else links.loopback(count)
    load = os.getloadavg()[0]
    with network as hosts:
      reports = run_workers(hosts, job, options.limit)
    run = {
      "hosts": count,
      "rate": rate,
      "bits_per_second": speed,
      **{key: job[key] for key in ("mib", "leaves", "repeats")},
      "load_before": load,
      "probe": [report["probe"] for report in reports] if options.probe else [],
      "steps": combine(reports, "steps", shared=options.loopback),
      "parts": combine(reports, "parts", shared=options.loopback),
    }
    show(run)
    results["runs"].append(run)
    if options.output:
      options.output.mkdir(parents=True, exist_ok=True)
      text = json.dumps(results, indent=1)
      (options.output / "link_speed.json").write_text(text)
      plot(results["runs"], options.output / "link_speed.png")
  steps = [step for run in results["runs"] for step in run["steps"].values()]
  if not all(step["same_bits"] for step in steps):
    sys.exit("The hosts of a step did not get the same bits.")


def _leave(number: int, frame: Any) -> None:
  """Ends the program once, through its clean-up; a second signal does not cut it."""
  for other in (signal.SIGINT, signal.SIGTERM):
    signal.signal(other, signal.SIG_IGN)
  sys.exit(128 + number)


if __name__ == "__main__":
  main()
