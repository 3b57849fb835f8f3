# SPDX-License-Identifier: Apache-2.0
"""The mask of a grammar: place by place, back and forth as drafts are rejected."""

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dspark_trt.bundle import Bundle
from dspark_trt.errors import RequestError
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.request import Request, SamplingParams
from dspark_trt.runtime.serving.grammar import JsonGrammars
from dspark_trt.runtime.text import TextCodec

SCHEMA = {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}


@pytest.fixture(scope="module")
def grammars(tiny_bundle: Bundle) -> JsonGrammars:
    return JsonGrammars(tiny_bundle)


@pytest.fixture(scope="module")
def codec(tiny_bundle: Bundle) -> TextCodec:
    return TextCodec(tiny_bundle)


def allowed(mask: NDArray[np.bool_]) -> list[int]:
    return np.flatnonzero(mask).tolist()


def test_going_back_gives_what_a_fresh_mask_gives(
    grammars: JsonGrammars, codec: TextCodec
) -> None:
    """Random walks over allowed tokens, cut back as verification would."""
    random = np.random.default_rng(0)
    mask = grammars.allowed_tokens(SCHEMA)
    output: list[int] = []
    for _ in range(60):
        seen = mask(output)
        assert (seen == grammars.allowed_tokens(SCHEMA)(output)).all()
        choices = [token for token in allowed(seen) if token not in (0, 2)]
        if not choices or random.random() < 0.3:
            output = output[: int(random.integers(len(output) + 1))]
        else:
            output = [*output, int(random.choice(choices))]


def test_a_complete_document_only_ends(grammars: JsonGrammars, codec: TextCodec) -> None:
    mask = grammars.allowed_tokens({"const": "x"})
    document = list(codec.encode('"x"', add_special_tokens=False))
    assert allowed(mask(document)) == [0, 2]  # the stop tokens of the target


def test_drafts_behind_the_end_ask_nothing_of_the_grammar(
    grammars: JsonGrammars, codec: TextCodec
) -> None:
    """A draft may go on behind a stop token; what is there is never committed."""
    mask = grammars.allowed_tokens({"const": "x"})
    document = list(codec.encode('"x"', add_special_tokens=False))
    for behind in ([2], [2, 199], [2, 199, 200], [0, 0, 0]):
        assert mask([*document, *behind]).all()
    assert allowed(mask(document)) == [0, 2]
    assert allowed(mask(document[:1])) == allowed(
        grammars.allowed_tokens({"const": "x"})(document[:1])
    )


def test_properties_come_in_the_schemas_order(grammars: JsonGrammars, codec: TextCodec) -> None:
    properties = {name: {"type": "null"} for name in ("z", "a")}
    schema = {"type": "object", "properties": properties, "required": ["z", "a"]}
    mask = grammars.allowed_tokens(schema)
    good = codec.encode('{"z": null', add_special_tokens=False)
    assert mask(list(good)).any()
    with pytest.raises(RequestError, match="grammar stopped"):
        grammars.allowed_tokens(schema)(codec.encode('{"a"', add_special_tokens=False))


def test_kept_grammars_do_not_share_their_place(grammars: JsonGrammars) -> None:
    first, second = grammars.allowed_tokens(SCHEMA), grammars.allowed_tokens(SCHEMA)
    start = allowed(first([]))
    first([start[0]])
    assert allowed(second([])) == start


def test_only_the_latest_grammars_are_kept(tiny_bundle: Bundle) -> None:
    grammars = JsonGrammars(tiny_bundle)
    for number in range(70):
        grammars.allowed_tokens({"const": number})
    assert len(grammars._matchers) == 64
    assert json.dumps({"const": 0}) not in grammars._matchers


def test_masked_sampling_is_the_targets(tiny_bundle: Bundle, grammars: JsonGrammars) -> None:
    """Two booleans at temperature 1: as often as without drafts (Pearson's χ², 3 degrees of freedom)."""
    schema: dict[str, Any] = {**SCHEMA, "minItems": 2, "maxItems": 2}
    prompt = TextCodec(tiny_bundle).encode("Is it so? Answer with two booleans: ")
    samples = 120

    def draw(speculate: bool, first_seed: int) -> dict[str, int]:
        counts: dict[str, int] = {}
        with Engine.load(tiny_bundle, options=EngineOptions(max_batch=16)) as engine:
            requests = [
                Request(
                    prompt_ids=prompt,
                    params=SamplingParams(
                        temperature=1, seed=first_seed + n, max_new_tokens=60
                    ),
                    speculate=speculate,
                    detokenize=True,
                    allowed_tokens=grammars.allowed_tokens(schema),
                )
                for n in range(samples)
            ]
            for done in engine.generate(requests):
                value = str(json.loads(done.text))
                counts[value] = counts.get(value, 0) + 1
        return counts

    drafted, plain = draw(True, 0), draw(False, 10_000)
    assert set(drafted) | set(plain) <= {
        str([a, b]) for a in (True, False) for b in (True, False)
    }
    pairs = [(drafted.get(key, 0), plain.get(key, 0)) for key in {*drafted, *plain}]
    statistic = sum((a - b) ** 2 / (a + b) for a, b in pairs)
    assert statistic < 16.3  # p = 0.001
