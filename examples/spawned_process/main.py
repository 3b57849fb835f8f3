# SPDX-License-Identifier: Apache-2.0
"""The engine in a process of its own: the host's interpreter never loads a model, and outlives a crash.

Started with `spawn`: a forked copy of a process with onnxruntime's threads can stand still for ever.

    python examples/spawned_process/main.py BUNDLE
"""

import argparse
import multiprocessing
from multiprocessing.connection import Connection

from dspark_trt.bundle import load_bundle
from dspark_trt.runtime.request import Completion, Request, SamplingParams
from dspark_trt.runtime.text import TextCodec

QUESTIONS = (
    "Explain what a stack is.",
    "Write a Python function that adds two numbers.",
    "Tom has 3 apples and buys 4. How many does he have?",
)


def serve(bundle: str, pipe: Connection) -> None:
    """The child: lists of requests in, lists of completions out, until the pipe closes."""
    from dspark_trt.runtime.engine import Engine, EngineOptions

    with Engine.load(bundle, options=EngineOptions(max_batch=4)) as engine:
        while True:
            try:
                requests = pipe.recv()
            except EOFError:
                return
            pipe.send(engine.generate(requests))


def main(bundle: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    child = spawn.Process(target=serve, args=(bundle, theirs))
    child.start()
    theirs.close()  # so that a child that died is an EOFError here, not a wait without end

    codec = TextCodec(load_bundle(bundle))
    chats = [codec.encode_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    params = SamplingParams(max_new_tokens=48)
    pipe.send([Request(prompt_ids=prompt, params=params) for prompt in chats])
    answers: list[Completion] = pipe.recv()
    for question, done in zip(QUESTIONS, answers, strict=True):
        print(f"> {question}\n{codec.decode(done.token_ids)}")

    pipe.close()
    child.join()
    print(f"the engine's process ended with code {child.exitcode}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    main(parser.parse_args().bundle)
