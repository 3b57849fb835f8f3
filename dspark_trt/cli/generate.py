# SPDX-License-Identifier: Apache-2.0
"""`dspark-trt generate`: text from a bundle, with or without speculation."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from dspark_trt.cli.output import console, err_console, print_json, print_notes
from dspark_trt.cli.prompts import encode_prompt, numbered_lines, read_line
from dspark_trt.cli.running import BackendName, DeviceName, Threads, require_bundled_target
from dspark_trt.cli.token_writer import TokenWriter
from dspark_trt.errors import RequestError
from dspark_trt.files import require_place

if TYPE_CHECKING:
    from dspark_trt.runtime.engine import Engine
    from dspark_trt.runtime.request import Completion, Request
    from dspark_trt.runtime.text import TextCodec


def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle folder.", show_default=False)],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="A prompt; repeat for several.")
    ] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(help='One prompt a line, or JSON lines with "prompt" or "prompt_ids".'),
    ] = None,
    prompt_ids: Annotated[
        list[str] | None,
        typer.Option("--prompt-ids", help="A prompt as token ids, 1,2,3; repeat for several."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep this much probability mass.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens below this share of the best.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(help="Instead of the model's stop tokens; repeatable.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Do not stop at stop tokens.")
    ] = False,
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="Let the target decode alone.")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Do not wrap prompts in the chat template.")
    ] = False,
    max_batch: Annotated[int, typer.Option(help="Prompts decoded at the same time.")] = 8,
    threads: Threads = None,
    backend: BackendName = "onnxruntime",
    device: DeviceName = None,
    scheduler: Annotated[
        str, typer.Option(help="auto, fixed:K, threshold:C, algorithm1 or async.")
    ] = "auto",
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Record rounds here (.npz, docs/calibration.md).", show_default=False
        ),
    ] = None,
    show: Annotated[
        bool,
        typer.Option(
            "--show", help="Colour tokens: drafted green, bonus cyan, corrected yellow."
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Generate text for one or more prompts."""
    from dspark_trt.bundle import load_bundle
    from dspark_trt.runtime.backends.interface import BackendOptions
    from dspark_trt.runtime.engine import Engine, EngineOptions
    from dspark_trt.runtime.request import Request, SamplingParams
    from dspark_trt.runtime.text import TextCodec
    from dspark_trt.runtime.trace_recorder import TraceRecorder

    if trace is not None:
        require_place(trace)
    loaded = load_bundle(bundle)
    require_bundled_target(loaded)
    codec = TextCodec(loaded) if TextCodec.is_available(loaded) else None
    prompts = _prompts(codec, prompt or [], prompts_file, prompt_ids or [], raw)
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_new_tokens=max_new_tokens,
        stop_token_ids=tuple(stop_token_id) if stop_token_id else None,
        ignore_eos=ignore_eos,
    )
    requests = [
        Request(prompt_ids=ids, params=params, speculate=not no_speculation)
        for _, ids in prompts
    ]
    with Engine.load(
        loaded,
        backend=backend,
        backend_options=BackendOptions(threads=threads, device=device),
        options=EngineOptions(
            max_batch=max_batch,
            max_tokens_per_step=max(512, max_batch),
            max_waiting=len(requests),
        ),
        scheduler=scheduler,
    ) as engine:
        recorder = TraceRecorder(engine.bundle)
        if trace is not None:
            engine.observers.append(recorder.observe)
        started = time.perf_counter()
        if json:
            completions = engine.generate(requests)
        else:
            completions = _print_answers(engine, codec, prompts, requests, show)
        seconds = time.perf_counter() - started
        notes = engine.status()["notes"]
    if trace is not None:
        recorder.traces().save(trace)
    if json:
        print_json([_record(codec, *each) for each in zip(prompts, completions, strict=True)])
        return
    _print_summary(completions, seconds)
    if not no_speculation:
        print_notes(notes)


def _prompts(
    codec: "TextCodec | None",
    texts: Sequence[str],
    file: Path | None,
    id_lists: Sequence[str],
    raw: bool,
) -> list[tuple[str | None, tuple[int, ...]]]:
    """Every prompt as (text, token ids)."""
    listed: list[str | list[int]] = [*texts]
    if file is not None:
        listed += [read_line(file, number, line)[0] for number, line in numbered_lines(file)]
    listed += [_parse_ids(text) for text in id_lists]
    if not listed:
        raise RequestError(
            "no prompt. Give --prompt TEXT, --prompts-file FILE or --prompt-ids 1,2,3."
        )
    return [
        (None, tuple(each)) if isinstance(each, list) else (each, _encode(codec, each, raw))
        for each in listed
    ]


def _encode(codec: "TextCodec | None", text: str, raw: bool) -> tuple[int, ...]:
    if codec is None:
        raise RequestError("this bundle has no tokenizer: give --prompt-ids instead of text")
    if not text.strip():
        raise RequestError("the prompt is empty: at least one token is needed")
    return encode_prompt(codec, text, raw=raw)


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise RequestError(f"--prompt-ids must be numbers like 1,2,3, got {text!r}") from error


def _record(
    codec: "TextCodec | None", prompt: tuple[str | None, tuple[int, ...]], done: "Completion"
) -> dict[str, Any]:
    stats = done.stats
    return {
        "prompt": prompt[0],
        "prompt_ids": list(done.prompt_ids),
        "token_ids": list(done.token_ids),
        "text": codec.decode(done.token_ids) if codec else None,
        "finish_reason": done.finish_reason.value,
        "error": done.error,
        "rounds": stats.rounds,
        "accepted_length": stats.accepted_length,
        "accepted_lengths": list(stats.accepted_lengths),
        "verification_lengths": list(stats.verification_lengths),
        "reasons": dict(stats.reasons),
        "tokens_per_second": stats.tokens_per_second,
        "seconds": stats.seconds,
        "token_kinds": [kind.value for kind in done.kinds],
    }


def _print_answers(
    engine: "Engine",
    codec: "TextCodec | None",
    prompts: list[tuple[str | None, tuple[int, ...]]],
    requests: "list[Request]",
    show: bool,
) -> "list[Completion]":
    """Streamed where there is one prompt, else one answer after the other."""
    if len(requests) > 1:
        completions = engine.generate(requests)
        for (text, ids), done in zip(prompts, completions, strict=True):
            console.print(f"> {text or list(ids)}", style="bold", markup=False, highlight=False)
            writer = TokenWriter(console, codec, is_coloured=show)
            writer.write(done.token_ids, done.kinds)
            writer.end()
        return completions
    writer = TokenWriter(console, codec, is_coloured=show)
    last = None
    for event in engine.stream(requests[0]):
        writer.write(event.token_ids, event.kinds)
        last = event
    writer.end()
    assert last is not None
    return [engine.take(last.request_id)]


def _print_summary(completions: "list[Completion]", seconds: float) -> None:
    tokens = sum(done.stats.output_tokens for done in completions)
    lengths = [n for done in completions for n in done.stats.accepted_lengths]
    text = f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.0f} tokens/s"
    if lengths:
        text += (
            f"; accepted length {sum(lengths) / len(lengths):.2f} over {len(lengths)} rounds"
        )
    for done in completions:
        if done.error:
            err_console.print(
                f"[bold red]request {done.request_id} failed:[/] {escape(done.error)}",
                highlight=False,
                soft_wrap=True,
            )
    err_console.print(text, highlight=False)
