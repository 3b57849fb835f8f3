# SPDX-License-Identifier: Apache-2.0
"""`dspark-trt bench`, as a user runs it."""

import json
from pathlib import Path

import pytest

from dspark_trt.bundle import Bundle
from dspark_trt.cli.prompts import encode_prompt, numbered_lines, read_line, read_prompts
from dspark_trt.errors import RequestError
from dspark_trt.runtime.text import TextCodec
from tests.command_line import dspark


def test_a_bench_writes_what_it_prints(tiny_bundle: Bundle, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "What is 3 + 4?", "domain": "math"}\n{"prompt_ids": [1, 5, 9], "domain": "ids"}\n'
    )
    done = dspark(
        "bench",
        tiny_bundle.path, "--requests", 2, "--temperatures", 0, "--repeats", 1, "--new-tokens", 4,
        "--schedulers", "fixed:0,threshold:0.5", "--prompts", prompts, "--json",
        "--output", tmp_path / "out", "--plots", tmp_path / "plots",
    )  # fmt: skip
    assert done.code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["prompts"]["count"] == {"math": 1, "ids": 1}
    assert {(cell["scheduler"], cell["domain"]) for cell in report["cells"]} == {
        (scheduler, domain)
        for scheduler in ("fixed:0", "threshold:0.5")
        for domain in ("math", "ids", "all")
    }
    assert report["limits"]["gigaflops"] > 0
    assert all(cell["over_limit"]["target"] > 0 for cell in report["cells"])
    plots = [Path(path) for path in report.pop("plots")]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots)
    assert json.loads((tmp_path / "out" / "bench.json").read_text()) == report
    assert "threshold:0.5" in (tmp_path / "out" / "bench.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "1,x"], "--requests must be numbers like 1,8,32, got '1,x'"),
        (["--requests", "1.5"], "--requests must be whole numbers, got '1.5'"),
        (["--schedulers", "fixed:9"], "fixed:9: expected a length from 0 to 7"),
        (["--temperatures", "-1"], "temperature must be finite and at least 0, got -1.0"),
        (["--prompts", "nowhere.jsonl"], "prompts file nowhere.jsonl cannot be read"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], message: str, tiny_bundle: Bundle
) -> None:
    done = dspark("bench", tiny_bundle.path, *arguments)
    assert done.code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_prompts_are_lines_of_text_or_of_json(tiny_bundle: Bundle, tmp_path: Path) -> None:
    """In every command that takes a file of them: JSON is never a prompt itself."""
    file = tmp_path / "prompts.txt"
    file.write_text('What?\n\n{"prompt": "What?", "domain": "math"}\n{"prompt_ids": [1, 5]}\n')
    what = encode_prompt(TextCodec(tiny_bundle), "What?")
    assert read_prompts(tiny_bundle, file) == [(what, "all"), (what, "math"), ((1, 5), "all")]


def test_lines_end_at_line_feeds_and_marks_are_no_text(tmp_path: Path) -> None:
    """JSON may hold U+2028 as it is, and Windows begins a file with a mark, and ends lines with two."""
    file = tmp_path / "prompts.jsonl"
    file.write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n\r\nc\x0cd\n'.encode())
    lines = numbered_lines(file)
    assert lines == [(1, '{"prompt": "a\u2028b"}'), (3, "c\x0cd")]
    assert read_line(file, *lines[0]) == ("a\u2028b", "all")


@pytest.mark.parametrize("line", ['{"prompt_ids": [1, true]}', '{"a":' + "[" * 100_000])
def test_records_that_hold_no_prompt(tmp_path: Path, line: str) -> None:
    with pytest.raises(RequestError, match=r"x\.jsonl:3 (has neither|is no JSON)"):
        read_line(tmp_path / "x.jsonl", 3, line)
