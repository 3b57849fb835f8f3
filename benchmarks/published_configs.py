# SPDX-License-Identifier: Apache-2.0
"""Seconds, peak memory and bytes of exporting and building each published drafter, one layer deep.

    python benchmarks/published_configs.py [NAME ...] [--folder DIR] [--dtype bfloat16] [--experts N]

`published_configs.json` has what the configurations of released drafters say; widths, vocabularies, taps and
blocks are theirs, only the depth is 1, and experts are 32 unless --experts says another number: building takes
0.13 GB of memory for each. For each, one after another: random weights are written, exported, and built
into TensorRT-RTX engines on the CPU, by the command line in processes of their own; then all of it is removed
(about 20 GB at a time for the widest). The last line is JSON; exit code 1 if any could not be built.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from export_scale import PUBLISHED, shallow, write_checkpoint

GB = 1e9


class Ran(NamedTuple):
    """One command of the command line."""

    answer: dict[str, Any]
    seconds: float
    peak_bytes: int  # of the largest process among it and its children


class CommandError(Exception):
    """A command that ended with an error; the text is the last line it wrote."""


def run(*arguments: str) -> Ran:
    """Run a command with --json and wait for it.

    Raises:
        CommandError: it did not succeed.
    """
    command = [sys.executable, "-m", "dspark_trt", *arguments, "--json"]
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            raise CommandError(" ".join(errors.read().split())[-500:])
    seconds = time.perf_counter() - started
    return Ran(json.loads(text), seconds, usage.ru_maxrss * 1024)


def measure(name: str, dtype: str, experts: int, parent: Path | None) -> dict[str, Any]:
    """Export and build one configuration."""
    config = shallow(name, experts)
    row: dict[str, Any] = {"name": name, "hidden": config["hidden_size"], "dtype": dtype}
    row |= {
        "vocab": config["vocab_size"],
        "heads": _heads(config),
        "block": _block(config),
        "experts": config.get("n_routed_experts"),
    }
    work = Path(tempfile.mkdtemp(prefix="published-", dir=parent))
    try:
        row["checkpoint_bytes"] = write_checkpoint(work / "drafter", config)
        bundle = str(work / "bundle")
        exported = run(
            "export", "--draft", str(work / "drafter"), "-o", bundle, "--dtype", dtype
        )
        row |= {"export_seconds": exported.seconds, "export_peak_bytes": exported.peak_bytes}
        row["bundle_bytes"] = exported.answer["bytes"]
        shutil.rmtree(work / "drafter")
        built = run("build", bundle, "--backend", "tensorrt-rtx")
        engines = built.answer["engines"]
        row |= {"build_seconds": built.seconds, "version": built.answer["version"]}
        row["build_peak_bytes"] = max(engine["peak_bytes"] for engine in engines)
        row["engine_bytes"] = sum(engine["bytes"] for engine in engines)
        row["engines"] = {engine["graph"]: engine["seconds"] for engine in engines}
    except CommandError as error:
        row["error"] = str(error)
    finally:
        shutil.rmtree(work)
    return row


def check_experts(parser: argparse.ArgumentParser, name: str, experts: int) -> None:
    """End with a sentence where a configuration cannot have so many experts."""
    config = PUBLISHED[name]
    if "n_routed_experts" not in config:
        return
    fewest, most = config["num_experts_per_tok"], config["n_routed_experts"]
    if not fewest <= experts <= most:
        parser.error(f"--experts {experts}: {name} has {most} and a token takes {fewest}")


def _block(config: dict[str, Any]) -> int:
    size: int = config["dspark_block_size" if "hc_mult" in config else "block_size"]
    return size


def _heads(config: dict[str, Any]) -> str:
    prefix = "global_" if "global_head_dim" in config else ""
    kv_heads = config["num_global_key_value_heads" if prefix else "num_key_value_heads"]
    return f"{config['num_attention_heads']}/{kv_heads}x{config[f'{prefix}head_dim']}"


def show(row: dict[str, Any]) -> str:
    """One line of the table."""
    start = f"{row['name']:17} {row['hidden']:6} {row['vocab']:7} {row['heads']:>9} {row['block']:5} {row['experts'] or '':>7}"
    if "error" in row:
        return f"{start}  {row['error']}"
    gigabytes = (
        row[key] / GB
        for key in (
            "checkpoint_bytes", "bundle_bytes", "export_peak_bytes", "engine_bytes", "build_peak_bytes",
        )
    )  # fmt: skip
    checkpoint, bundle, export_peak, engine, build_peak = gigabytes
    return (
        f"{start} {checkpoint:8.2f} {bundle:8.2f} {row['export_seconds']:8.1f} {export_peak:8.2f} "
        f"{engine:8.2f} {row['build_seconds']:8.1f} {build_peak:8.2f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PUBLISHED)}")
    parser.add_argument(
        "--folder", type=Path, help="where to write; default: the temporary folder"
    )
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--experts", type=int, default=32, help="of a layer that has any")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - PUBLISHED.keys()):
        parser.error(f"no configuration {', '.join(unknown)} among {', '.join(PUBLISHED)}")
    for name in arguments.names or PUBLISHED:
        check_experts(parser, name, arguments.experts)
    print(
        f"{'':17} {'hidden':>6} {'vocab':>7} {'heads':>9} block experts {'weights':>8} {'bundle':>8} "
        f"{'export s':>8} {'peak':>8} {'engines':>8} {'build s':>8} {'peak':>8}   (GB)"
    )
    rows = []
    for name in arguments.names or PUBLISHED:
        rows.append(measure(name, arguments.dtype, arguments.experts, arguments.folder))
        print(show(rows[-1]), flush=True)
    print(json.dumps(rows))
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
