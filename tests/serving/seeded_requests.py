# SPDX-License-Identifier: Apache-2.0
"""Requests with seeds of their own, and what the engine of this process says to them."""

from collections.abc import Sequence

from dspark_trt.bundle import Bundle
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.request import Completion, Request, SamplingParams
from dspark_trt.runtime.text import TextCodec

TOPICS = (
    "a stack",
    "a queue",
    "a tree",
    "a hash table",
    "a graph",
    "a list",
    "a heap",
    "a set",
)


def requests_about(
    bundle: Bundle,
    tokens: int,
    temperature: float = 0.0,
    *,
    verbs: Sequence[str] = ("Explain",),
) -> list[Request]:
    codec = TextCodec(bundle)
    prompts = [f"{verb} what {topic} is." for topic in TOPICS for verb in verbs]
    return [
        Request(
            prompt_ids=codec.encode_chat([{"role": "user", "content": prompt}]),
            params=SamplingParams(
                max_new_tokens=tokens, temperature=temperature, seed=seed, ignore_eos=True
            ),
            detokenize=True,
        )
        for seed, prompt in enumerate(prompts)
    ]


def here(bundle: Bundle, requests: list[Request]) -> list[Completion]:
    """What the engine of this process says."""
    with Engine.load(bundle, options=EngineOptions(max_batch=4)) as engine:
        return engine.generate(requests)
