# SPDX-License-Identifier: Apache-2.0
"""Worker threads that share one engine: each call blocks its own thread, their requests run as one batch.

python examples/threads/main.py BUNDLE
"""

import argparse
from concurrent.futures import ThreadPoolExecutor

from dspark_trt.runtime.async_engine import AsyncEngine
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.request import Request, SamplingParams
from dspark_trt.runtime.text import TextCodec

QUESTIONS = (
    "Explain what a stack is.",
    "Write a Python function that adds two numbers.",
    "Tom has 3 apples and buys 4. How many does he have?",
)


def main(bundle: str) -> None:
    with AsyncEngine(Engine.load(bundle, options=EngineOptions(max_batch=4))) as engine:
        codec = TextCodec(engine.engine.bundle)

        def answer(question: str) -> str:
            prompt = codec.encode_chat([{"role": "user", "content": question}])
            params = SamplingParams(max_new_tokens=48)
            done = engine.generate(Request(prompt_ids=prompt, params=params), timeout_s=60)
            return codec.decode(done.token_ids)

        with ThreadPoolExecutor(max_workers=len(QUESTIONS)) as workers:
            for question, text in zip(QUESTIONS, workers.map(answer, QUESTIONS), strict=True):
                print(f"> {question}\n{text}")
        status = engine.status()
        print(f"{status['output_tokens']} tokens in {status['rounds']} rounds")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    main(parser.parse_args().bundle)
