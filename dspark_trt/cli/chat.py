# SPDX-License-Identifier: Apache-2.0
"""`dspark-trt chat`: a conversation in the terminal."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from dspark_trt.cli.output import console, err_console, print_json
from dspark_trt.cli.running import BackendName, DeviceName, Threads, require_bundled_target
from dspark_trt.cli.token_writer import TokenWriter
from dspark_trt.errors import BackendError, RequestError

if TYPE_CHECKING:
    from dspark_trt.runtime.engine import Engine
    from dspark_trt.runtime.request import Completion, Request, SamplingParams
    from dspark_trt.runtime.text import TextCodec

_PREFIX_CACHE_BYTES = 256 << 20  # earlier turns are not computed again
_HELP = """\
/stats       what the last answer and the whole session cost
/temp X      temperature; 0 is greedy
/nospec      let the target decode alone; /spec drafts again
/reset       forget the conversation
/quit        leave, as Ctrl-D does; Ctrl-C stops an answer"""


def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle folder.", show_default=False)],
    system: Annotated[
        str | None,
        typer.Option(help="System message; default: the chat template's.", show_default=False),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens an answer has at most.")] = 512,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="Let the target decode alone.")
    ] = False,
    threads: Threads = None,
    backend: BackendName = "onnxruntime",
    device: DeviceName = None,
    show: Annotated[
        bool,
        typer.Option(
            "--show", help="Colour tokens: drafted green, bonus cyan, corrected yellow."
        ),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document when the chat is over.")
    ] = False,
) -> None:
    """Chat with a bundle's target.

    One line of input is one message, /help lists commands.
    """
    from dspark_trt.bundle import load_bundle
    from dspark_trt.runtime.backends.interface import BackendOptions
    from dspark_trt.runtime.engine import Engine, EngineOptions
    from dspark_trt.runtime.request import SamplingParams
    from dspark_trt.runtime.text import TextCodec

    loaded = load_bundle(bundle)
    require_bundled_target(loaded)
    codec = TextCodec(loaded)
    if not codec.has_chat_template:
        raise RequestError(
            f"{bundle} has no chat template, so it cannot chat; use: dspark-trt generate --raw"
        )
    params = SamplingParams(temperature=temperature, seed=seed, max_new_tokens=max_new_tokens)
    with Engine.load(
        loaded,
        backend=backend,
        backend_options=BackendOptions(threads=threads, device=device),
        options=EngineOptions(max_batch=1, prefix_cache_bytes=_PREFIX_CACHE_BYTES),
    ) as engine:
        chat = Chat(
            engine,
            codec,
            params,
            system=system,
            speculate=not no_speculation,
            # JSON alone goes to stdout, so the answers do not.
            answers=err_console if json else console,
            is_coloured=show,
        )
        for line in _lines():
            if not chat.take(line):
                break
        if json:
            print_json({"turns": [_record(turn) for turn in chat.turns]})


@dataclass(frozen=True, slots=True)
class Turn:
    user: str
    assistant: str
    completion: "Completion"


class Chat:
    """Takes lines, prints answers, keeps the conversation."""

    def __init__(
        self,
        engine: "Engine",
        codec: "TextCodec",
        params: "SamplingParams",
        *,
        system: str | None,
        speculate: bool,
        answers: Console,
        is_coloured: bool,
    ) -> None:
        from dspark_trt.runtime.conversation import Conversation

        self.turns: list[Turn] = []
        self._engine, self._codec, self._params = engine, codec, params
        self._conversation = Conversation(system)
        self._speculate = speculate
        self._answers, self._is_coloured = answers, is_coloured
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: _say(_HELP),
            "stats": lambda _: self._print_stats(),
            "temp": self._set_temperature,
            "spec": lambda _: self._set_speculation(True),
            "nospec": lambda _: self._set_speculation(False),
            "reset": lambda _: self._reset(),
        }

    def take(self, line: str) -> bool:
        """Answer a message or obey a command; False where it says to leave."""
        line = line.strip()
        if not line:
            return True
        if line in ("/quit", "/exit"):
            return False
        try:
            if line.startswith("/"):
                name, _, argument = line[1:].partition(" ")
                if name not in self._commands:
                    raise RequestError(f"no command /{name}; /help lists them")
                self._commands[name](argument.strip())
            else:
                self._answer(line)
        except (RequestError, BackendError) as error:
            _say(f"[bold red]error:[/] {escape(str(error))}")
        return True

    def _answer(self, text: str) -> None:
        from dspark_trt.runtime.conversation import fitted_prompt
        from dspark_trt.runtime.request import FinishReason, Request

        asked = self._conversation.asked(text)
        context = self._engine.bundle.max_context_tokens
        room = max(context - self._params.max_new_tokens, context // 2)
        fitted, prompt = fitted_prompt(self._codec, asked, most_tokens=room)
        if dropped := len(asked.messages) - len(fitted.messages):
            _say(f"[dim]the oldest {dropped} messages no longer fit and are forgotten[/]")
        request = Request(prompt_ids=prompt, params=self._params, speculate=self._speculate)
        done = self._stream(request)
        if done.finish_reason is FinishReason.ERROR:
            raise RequestError(f"the answer failed: {done.error}")
        answer = self._codec.decode(done.token_ids).strip()
        self._conversation = fitted.answered(answer)
        self.turns.append(Turn(text, answer, done))
        if done.finish_reason is not FinishReason.STOP:
            _say(f"[dim]({_ENDS[done.finish_reason.value]})[/]")

    def _stream(self, request: "Request") -> "Completion":
        """Print the answer as it comes, until it ends or Ctrl-C is pressed."""
        writer = TokenWriter(self._answers, self._codec, is_coloured=self._is_coloured)
        request_id = -1
        with _interrupts() as interrupts:
            for event in self._engine.stream(request):
                request_id = event.request_id
                writer.write(event.token_ids, event.kinds)
                if interrupts.came:
                    self._engine.abort(request_id)
        writer.end()
        return self._engine.take(request_id)

    def _set_temperature(self, value: str) -> None:
        try:
            temperature = float(value)
        except ValueError as error:
            raise RequestError(f"/temp needs a number such as 0.7, got {value!r}") from error
        self._params = replace(self._params, temperature=temperature)
        _say(f"[dim]temperature {temperature:g}[/]")

    def _set_speculation(self, on: bool) -> None:
        self._speculate = on
        _say(f"[dim]speculation {'on' if on else 'off'}[/]")

    def _reset(self) -> None:
        self._conversation = self._conversation.cleared()
        _say("[dim]the conversation starts again[/]")

    def _print_stats(self) -> None:
        if not self.turns:
            _say("[dim]no answer yet[/]")
            return
        _say(f"last answer: {_summary([self.turns[-1].completion])}")
        _say(f"session:     {_summary([turn.completion for turn in self.turns])}")
        stages = self._engine.status()["stage_seconds"]
        total = sum(stages.values())
        shares = ", ".join(
            f"{stage} {seconds / total:.0%}" for stage, seconds in stages.items()
        )
        _say(f"time:        {shares}")


_ENDS = {
    "length": "cut at --max-new-tokens",
    "capacity": "the context is full",
    "aborted": "stopped",
}


def _summary(completions: "list[Completion]") -> str:
    tokens = sum(done.stats.output_tokens for done in completions)
    decoded = sum(max(done.stats.output_tokens - 1, 0) for done in completions)
    seconds = sum(done.stats.decode_seconds for done in completions)
    lengths = [n for done in completions for n in done.stats.accepted_lengths]
    parts = [f"{tokens} tokens"]
    if seconds > 0:
        parts.append(f"{decoded / seconds:.0f} tokens/s")
    if lengths:
        parts.append(
            f"accepted length {sum(lengths) / len(lengths):.2f} over {len(lengths)} rounds"
        )
    prompt = sum(done.stats.prompt_tokens for done in completions)
    cached = sum(done.stats.cached_tokens for done in completions)
    return ", ".join(
        [*parts, f"prompt {prompt} tokens, {cached} of them kept from earlier turns"]
    )


def _record(turn: Turn) -> dict[str, Any]:
    stats = turn.completion.stats
    return {
        "user": turn.user,
        "assistant": turn.assistant,
        "token_ids": list(turn.completion.token_ids),
        "finish_reason": turn.completion.finish_reason.value,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "rounds": stats.rounds,
        "accepted_length": stats.accepted_length,
        "tokens_per_second": stats.tokens_per_second,
        "first_token_seconds": stats.first_token_seconds,
    }


def _lines() -> Iterator[str]:
    """Lines of standard input until it ends. In a terminal they can be edited, and Ctrl-C drops one."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 - input() edits lines and has a history from here on

        _say("[dim]/help lists commands, Ctrl-D leaves[/]")
    while True:
        try:
            yield input("> " if is_terminal else "")
        except EOFError:
            if is_terminal:
                _say("")
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            _say("\n[dim]Ctrl-D or /quit leaves[/]")


@dataclass(slots=True)
class _Interrupts:
    came: bool = field(default=False)


@contextmanager
def _interrupts() -> Iterator[_Interrupts]:
    """Ctrl-C sets a flag meanwhile: a round is never torn apart."""
    seen = _Interrupts()

    def note(_signal: int, _frame: FrameType | None) -> None:
        seen.came = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _say(text: str) -> None:
    """What is not an answer goes to stderr, so that a pipe carries answers only."""
    err_console.print(text, highlight=False, soft_wrap=True)
