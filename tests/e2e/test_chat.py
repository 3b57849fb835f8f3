# SPDX-License-Identifier: Apache-2.0
"""`dspark-trt chat` as people and pipes use it: the real command, with the shipped toy."""

import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dspark_trt.bundle import MANIFEST, Bundle, load_bundle, record_files, write_manifest
from dspark_trt.errors import CapacityError
from dspark_trt.runtime.conversation import Conversation, fitted_prompt
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.request import Request, SamplingParams
from dspark_trt.runtime.text import TextCodec

QUESTIONS = ("How many clips did she sell?", "And in May?")


def _chat(bundle: Path, text: str, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [
        sys.executable,
        "-m",
        "dspark_trt",
        "chat",
        str(bundle),
        "--max-new-tokens",
        "24",
    ]
    return subprocess.run(
        [*command, *options],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _expected_answers(bundle: Bundle) -> list[str]:
    """What the target alone answers, the first question and answer being part of the second prompt."""
    codec, messages, answers = TextCodec(bundle), [], []
    with Engine.load(bundle, options=EngineOptions(max_batch=1)) as engine:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            request = Request(
                prompt_ids=codec.encode_chat(messages),
                params=SamplingParams(max_new_tokens=24),
                speculate=False,
            )
            answers.append(codec.decode(engine.generate([request])[0].token_ids).strip())
            messages.append({"role": "assistant", "content": answers[-1]})
    return answers


# Pipes --------------------------------------------------------------------------------------------


def test_a_pipe_carries_the_answers_alone(tiny_bundle: Bundle) -> None:
    done = _chat(
        tiny_bundle.path, "\n".join(["/help", *QUESTIONS, "/stats", "/quit", "unread"])
    )
    assert done.returncode == 0, done.stderr
    first, second = _expected_answers(tiny_bundle)
    assert first != second
    assert [line.strip() for line in done.stdout.strip().split("\n")] == [
        line.strip() for line in f"{first}\n{second}".split("\n")
    ]
    assert "/temp X" in done.stderr
    assert re.search(
        r"last answer: 24 tokens, .*accepted length \d\.\d\d over \d+ rounds", done.stderr
    )
    assert re.search(r"session: +48 tokens", done.stderr)
    assert re.search(r"time: .*draft \d+%.*target \d+%", done.stderr)


def test_turns_are_recorded_and_share_their_beginning(tiny_bundle: Bundle) -> None:
    done = _chat(tiny_bundle.path, "\n".join(QUESTIONS), "--json")
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)["turns"]
    assert [first["assistant"], second["assistant"]] == _expected_answers(tiny_bundle)
    assert first["cached_tokens"] == 0
    # All of the first prompt but its last incomplete block of 16.
    assert second["cached_tokens"] == first["prompt_tokens"] // 16 * 16
    assert first["rounds"] < len(first["token_ids"])


def test_reset_forgets(tiny_bundle: Bundle) -> None:
    done = _chat(tiny_bundle.path, f"{QUESTIONS[0]}\n/reset\n{QUESTIONS[0]}\n", "--json")
    first, second = json.loads(done.stdout)["turns"]
    assert second["prompt_tokens"] == first["prompt_tokens"]
    assert second["token_ids"] == first["token_ids"]


def test_speculation_is_switched_off_and_on(tiny_bundle: Bundle) -> None:
    ask = f"/reset\n{QUESTIONS[0]}\n"
    done = _chat(tiny_bundle.path, f"{ask}/nospec\n{ask}/spec\n{ask}", "--json")
    drafted, alone, again = json.loads(done.stdout)["turns"]
    assert alone["rounds"] == 0
    assert alone["accepted_length"] is None
    assert alone["token_ids"] == drafted["token_ids"] == again["token_ids"]
    assert again["rounds"] == drafted["rounds"] > 0


def test_the_temperature_changes_the_answers(tiny_bundle: Bundle) -> None:
    ask = f"/reset\n{QUESTIONS[0]}\n"
    script = f"{ask}/temp 1.5\n{ask}/temp 0\n{ask}"
    greedy, sampled, again = json.loads(
        _chat(tiny_bundle.path, script, "--json", "--seed", "3").stdout
    )["turns"]
    assert greedy["token_ids"] == again["token_ids"] != sampled["token_ids"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/temp hot", "/temp needs a number such as 0.7, got 'hot'"),
        ("/temp -1", "temperature must be finite and at least 0, got -1.0"),
        ("/nonsense", "no command /nonsense; /help lists them"),
        ("word " * 2000, "fit beside an answer"),
        ("/stats", "no answer yet"),
    ],
)
def test_a_mistake_is_one_sentence_and_the_chat_goes_on(
    line: str, sentence: str, tiny_bundle: Bundle
) -> None:
    done = _chat(tiny_bundle.path, f"{line}\n{QUESTIONS[0]}\n", "--json")
    assert done.returncode == 0
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert [turn["user"] for turn in json.loads(done.stdout)["turns"]] == [QUESTIONS[0]]


def test_a_bundle_without_chat_template_is_refused(tiny_bundle: Bundle, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_bundle.path, tmp_path / "bundle")
    (folder / "tokenizer" / "chat_template.jinja").unlink()
    (folder / MANIFEST).unlink()
    write_manifest(replace(tiny_bundle, path=folder, files=record_files(folder)))
    assert load_bundle(folder).path == folder
    done = _chat(folder, "hello\n")
    assert done.returncode == 2
    assert "has no chat template, so it cannot chat" in done.stderr


# A terminal ----------------------------------------------------------------------------------------


class Terminal:
    """The command in a pseudo-terminal."""

    def __init__(self, bundle: Path) -> None:
        import pty

        command = [sys.executable, "-m", "dspark_trt", "chat", str(bundle), "--show"]
        self.pid, self._file = pty.fork()
        if self.pid == 0:
            os.environ |= {"TERM": "xterm-256color", "COLUMNS": "200"}
            os.execv(command[0], [*command, "--max-new-tokens", "900"])
        self._unread = ""

    def read_until(self, pattern: str, timeout_s: float = 60) -> str:
        """Everything up to a match, which must come."""
        until = time.monotonic() + timeout_s
        while (found := re.search(pattern, self._unread)) is None:
            assert time.monotonic() < until, f"no {pattern!r} in {self._unread!r}"
            if select.select([self._file], [], [], 0.2)[0]:
                self._unread += os.read(self._file, 1 << 16).decode(errors="replace")
        text, self._unread = self._unread[: found.end()], self._unread[found.end() :]
        return text

    def type(self, keys: str) -> None:
        os.write(self._file, keys.encode())

    def exit_code(self, timeout_s: float = 30) -> int:
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.1)
        raise AssertionError("the program does not end")

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
        os.close(self._file)


@pytest.fixture
def terminal(tiny_bundle: Bundle) -> Iterator[Terminal]:
    terminal = Terminal(tiny_bundle.path)
    yield terminal
    terminal.close()


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(terminal: Terminal) -> None:
    terminal.read_until("> $")
    terminal.type(f"{QUESTIONS[0]}\n")
    terminal.read_until(r"\x1b\[(32|33|1;36)m")  # the first coloured token
    terminal.type("\x03")  # the terminal turns it into SIGINT
    stopped = terminal.read_until(r"\(stopped\)")
    assert "Traceback" not in stopped
    terminal.read_until("> $")
    terminal.type("/stats\n")
    tokens = re.search(r"last answer: (\d+) tokens", terminal.read_until(r"time:.*\n"))
    assert tokens is not None
    assert 0 < int(tokens[1]) < 900
    terminal.read_until("> $")
    terminal.type(f"/reset\n{QUESTIONS[1]}\n")
    terminal.read_until(r"\x1b\[(32|33|1;36)m")  # it answers again
    terminal.type("\x03")
    terminal.read_until(r"\(stopped\)[^>]*> $")
    terminal.type("\x04")
    assert terminal.exit_code() == 0


def test_ctrl_c_at_the_prompt_drops_the_line(terminal: Terminal) -> None:
    terminal.read_until("> $")
    terminal.type("half a mess")
    terminal.read_until("half a mess")
    time.sleep(0.5)  # readline has gone back to waiting
    terminal.type("\x03")
    terminal.read_until(r"Ctrl-D or /quit leaves[^>]*> $")
    terminal.type("/stats\n")
    terminal.read_until("no answer yet")
    terminal.type("/quit\n")
    assert terminal.exit_code() == 0


# The conversation ----------------------------------------------------------------------------------


def test_the_oldest_turns_go_first(tiny_bundle: Bundle) -> None:
    codec = TextCodec(tiny_bundle)
    conversation = Conversation("Be brief.")
    for turn in range(4):
        conversation = conversation.asked(f"question {turn}").answered(f"answer {turn}")
    conversation = conversation.asked("the last one")
    whole = codec.encode_chat(conversation.rendered())
    assert fitted_prompt(codec, conversation, most_tokens=len(whole)) == (conversation, whole)

    fitted, prompt = fitted_prompt(codec, conversation, most_tokens=len(whole) - 1)
    assert fitted.messages == conversation.messages[2:]
    assert fitted.system == "Be brief."
    assert prompt == codec.encode_chat(fitted.rendered())
    assert "question 0" not in codec.decode(prompt)

    alone = codec.encode_chat([conversation.rendered()[0], conversation.rendered()[-1]])
    fitted, prompt = fitted_prompt(codec, conversation, most_tokens=len(alone))
    assert prompt == alone
    with pytest.raises(CapacityError, match=f"{len(alone)} tokens .* {len(alone) - 1} fit"):
        fitted_prompt(codec, conversation, most_tokens=len(alone) - 1)
