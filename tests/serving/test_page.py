# SPDX-License-Identifier: Apache-2.0
"""The live page in a real headless browser (Chromium, driven by Playwright) against a real server."""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from dspark_trt.bundle import Bundle
from dspark_trt.runtime.request import Request, SamplingParams
from dspark_trt.runtime.serving.settings import ServerSettings
from dspark_trt.runtime.text import TextCodec
from tests.serving.conftest import HTTP, MODEL, PROMPT, Running, running_server
from tests.serving.test_openai_client import Alone

playwright = pytest.importorskip("playwright.sync_api")
BROWSER = next(
    (
        found
        for name in ("chromium-headless-shell", "chromium", "google-chrome")
        if (found := os.environ.get("DSPARK_BROWSER") or shutil.which(name))
    ),
    None,
)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium is installed (Debian: chromium-headless-shell)"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, server: Running) -> Iterator[Any]:
    page = browser.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    foreign: list[str] = []
    page.on(
        "request",
        lambda request: (
            None if request.url.startswith(server.url) else foreign.append(request.url)
        ),
    )
    page.goto(f"{server.url}/ui")
    yield page
    assert problems == []
    assert foreign == []
    page.close()


def generate(page: Any, prompt: str, **fields: str) -> None:
    for name, value in fields.items():
        page.fill(f"#{name}", value)
    page.fill("#prompt", prompt)
    page.click("#go")
    page.wait_for_selector("#go:not([disabled])", timeout=20_000)


def tokens(page: Any) -> list[tuple[int, str]]:
    spans = page.query_selector_all("#output .answer:last-child span")
    return [(int(s.get_attribute("data-id")), s.get_attribute("class")) for s in spans]


def test_tokens_and_their_colours_are_the_engines(
    page: Any, server: Running, alone: Alone, tiny_bundle: Bundle
) -> None:
    page.select_option("#mode", "completion")
    generate(page, PROMPT, tokens="60")
    codec = TextCodec(tiny_bundle)
    request = Request(
        prompt_ids=codec.encode(PROMPT),
        params=SamplingParams(max_new_tokens=60),
        detokenize=True,
    )
    expected = alone(request)
    kinds = [kind.value for kind in expected.kinds]
    assert tokens(page) == list(zip(expected.token_ids, kinds, strict=True))
    assert page.inner_text("#output .user") == PROMPT
    colours = {
        kind: page.eval_on_selector(
            f"#output .{kind}", "e => getComputedStyle(e).backgroundColor"
        )
        for kind in set(kinds)
    }
    assert len(set(colours.values())) == len(colours) > 1
    tau = expected.stats.accepted_length
    assert page.inner_text("#accepted-length") == f"{tau:.2f}"


def test_rounds_show_length_and_survival(page: Any, server: Running) -> None:
    page.select_option("#mode", "completion")
    generate(page, PROMPT, tokens="40")
    rounds = page.query_selector_all("#rounds .round")
    assert len(rounds) == int(page.inner_text("#count")) > 3
    bars = [each.query_selector_all(".bars span") for each in rounds]
    drafted = [each for each in bars if each]
    assert all(len(each) == 7 for each in drafted)
    heights = [[bar.bounding_box()["height"] for bar in each] for each in drafted]
    assert all(each == sorted(each, reverse=True) for each in heights)
    assert max(map(max, heights)) > 10
    for row, own in zip(rounds, bars, strict=True):
        text = row.query_selector(".length").inner_text()
        if own:
            accepted = sum(bar.get_attribute("class") == "drafted" for bar in own)
            assert text == f"ℓ 7, accepted {accepted}"
        else:
            assert text == "not drafted"


def test_calibration_adds_up_over_answers(page: Any) -> None:
    page.select_option("#mode", "completion")
    rounds = 0
    for seed in ("1", "2"):
        generate(page, PROMPT, tokens="40", temperature="1", seed=seed)
        rounds += page.locator("#rounds .round .bars:has(span)").count() - rounds
    rows = page.locator("#calibration tbody tr").all()
    cells = [[cell.inner_text() for cell in row.locator("td").all()] for row in rows]
    assert [row[0] for row in cells] == [str(k) for k in range(1, 8)]
    assert {row[4] for row in cells} == {str(rounds)}
    predicted, observed = ([float(row[i]) for row in cells] for i in (1, 2))
    assert predicted == sorted(predicted, reverse=True)
    assert observed == sorted(observed, reverse=True)
    assert 0 < observed[0] <= 1
    page.click("#clear")
    assert page.locator("#calibration tbody tr").count() == 0
    assert page.inner_text("#output") == ""


def test_chat_remembers_the_conversation(page: Any, alone: Alone, tiny_bundle: Bundle) -> None:
    codec = TextCodec(tiny_bundle)
    messages: list[dict[str, str]] = []
    for question in ("How many?", "And in May?"):
        generate(page, question, tokens="20")
        messages.append({"role": "user", "content": question})
        request = Request(
            prompt_ids=codec.encode_chat(messages),
            params=SamplingParams(max_new_tokens=20),
            detokenize=True,
        )
        expected = alone(request)
        assert [token for token, _ in tokens(page)] == list(expected.token_ids)
        messages.append({"role": "assistant", "content": expected.text})
    assert "accepted length" in page.inner_text("#engine")


def test_without_speculation_every_token_is_the_targets(page: Any) -> None:
    page.uncheck("#speculate")
    generate(page, "How many?", tokens="12")
    assert {kind for _, kind in tokens(page)} == {"bonus"}
    assert page.inner_text("#accepted-length") == "–"


def test_markup_stays_text(page: Any) -> None:
    prompt = (
        '<img src="http://127.0.0.1:9/x" onerror="document.title=1"><script>alert(1)</script>'
    )
    generate(page, prompt, tokens="5")
    assert page.inner_text("#output .user") == prompt
    assert page.query_selector("#output img, #output script") is None
    assert page.title() == "dspark-trt"


def test_the_query_says_nothing(server: Running) -> None:
    plain = HTTP.get(f"{server.url}/ui")
    asked = HTTP.get(f"{server.url}/ui?content=<script>1</script>&media_type=text/x")
    assert asked.content == plain.content
    assert asked.headers["content-type"] == plain.headers["content-type"]
    assert "script-src 'self'" in plain.headers["content-security-policy"]


def test_stop_aborts(page: Any, server: Running) -> None:
    page.fill("#tokens", "900")
    page.fill("#prompt", "Go on.")
    page.click("#go")
    page.wait_for_selector("#output .answer span")
    page.click("#stop")
    page.wait_for_selector("#go:not([disabled])", timeout=10_000)
    server.wait_until_idle()


def test_a_key_is_asked_for_where_there_is_one(browser: Any, tiny_bundle: Bundle) -> None:
    settings = ServerSettings(model_name=MODEL, api_keys=("secret",))
    with running_server(tiny_bundle, settings) as server:
        page = browser.new_page()
        page.goto(f"{server.url}/ui")
        page.wait_for_selector("#key-field:not([hidden])")
        assert "no valid API key" in page.inner_text("#message")
        page.fill("#key", "secret")
        page.dispatch_event("#key", "change")
        page.locator("#model", has_text=MODEL).wait_for()  # the policy allows no evaluation
        generate(page, "How many?", tokens="6")
        assert len(tokens(page)) == 6
        generate(page, "How many?", tokens="5000")
        assert "context holds 1024" in page.inner_text("#message")
        page.close()
