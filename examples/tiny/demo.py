# SPDX-License-Identifier: Apache-2.0
"""Export the shipped target and drafter, answer three prompts, compare with the target alone."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from dspark_trt.checkpoint import read_draft, read_target
from dspark_trt.cli.token_writer import TokenWriter
from dspark_trt.export.bundle_from_checkpoints import export_bundle
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.request import Completion, Request, SamplingParams
from dspark_trt.runtime.text import TextCodec

HERE = Path(__file__).parent
BUNDLE = HERE.parents[1] / ".demo" / "tiny"


def main() -> None:
    console = Console()
    with console.status("exporting the example (half a minute)"):
        bundle = export_bundle(
            read_draft(HERE / "drafter"), read_target(HERE / "target"), BUNDLE, overwrite=True
        )
    codec = TextCodec(bundle)
    prompts = (HERE / "prompts.txt").read_text().splitlines()
    runs = {}
    with Engine.load(bundle, options=EngineOptions(max_batch=1)) as engine:
        for speculate in (True, False):
            requests = [
                Request(
                    prompt_ids=codec.encode_chat([{"role": "user", "content": prompt}]),
                    params=SamplingParams(max_new_tokens=96, ignore_eos=True),
                    speculate=speculate,
                )
                for prompt in prompts
            ]
            engine.generate(requests[:1])  # warm-up
            runs[speculate] = engine.generate(requests)
    for prompt, done in zip(prompts, runs[True], strict=True):
        console.print(f"\n[bold]> {prompt}")
        writer = TokenWriter(console, codec, is_coloured=True)
        writer.write(done.token_ids, done.kinds)
        writer.end()
    console.print("\n[green]drafted[/] [bold cyan]bonus[/] [yellow]corrected[/] tokens\n")
    console.print(_table(prompts, runs))
    same = all(a.token_ids == b.token_ids for a, b in zip(runs[True], runs[False], strict=True))
    console.print(f"same tokens with and without speculation: {'yes' if same else 'NO'}")


def _table(prompts: list[str], runs: dict[bool, list[Completion]]) -> Table:
    table = Table("prompt", "accepted length", "tokens/s", "tokens/s, target alone", "speed-up")
    for prompt, with_drafts, alone in zip(prompts, runs[True], runs[False], strict=True):
        fast, slow = with_drafts.stats.tokens_per_second, alone.stats.tokens_per_second
        assert fast is not None
        assert slow is not None
        table.add_row(
            prompt[:32] + "…",
            f"{with_drafts.stats.accepted_length:.2f}",
            f"{fast:.0f}",
            f"{slow:.0f}",
            f"{fast / slow:.2f} x",
        )
    return table


if __name__ == "__main__":
    main()
