# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding around a target that somebody else owns.

The host below is a plain `transformers` model that knows nothing of drafting. It is driven in two ways:
through `Engine`, which only needs `HostTarget.forward`, and by hand with `DraftSession`, for a service that
keeps its own loop. The bundle may be one that was exported without `--target`.

    pip install transformers
    python examples/host_owned_target/main.py BUNDLE TARGET_FOLDER
"""

import argparse

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_trt.bundle import load_bundle
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.request import Request, SamplingParams
from dspark_trt.runtime.session import DraftSession
from dspark_trt.runtime.targets.host import HostTargetModel
from dspark_trt.runtime.targets.transformers_model import TransformersTarget

NEW_TOKENS = 48


def with_engine(bundle, host, prompt):
    """Our loop, their target."""
    target = HostTargetModel(host, max_batch=1)
    with Engine.load(bundle, target=target, options=EngineOptions(max_batch=1)) as engine:
        params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
        done = engine.generate([Request(prompt_ids=prompt, params=params)])[0]
    return list(done.token_ids), done.stats.accepted_length


def by_hand(bundle, host, prompt):
    """Their loop: prefill, then draft, verify and roll back. Greedy, so verifying is comparing."""
    with DraftSession.load(bundle, slots=1) as session:
        output = host.forward(0, np.array(prompt), start=0)
        tokens, position, rounds = [int(output.logits[-1].argmax())], len(prompt), 0
        # Beside the taps of each row the token behind it: Eagle3 drafters read it, others do not.
        session.append(0, output.taps, start=0, tokens=[*prompt[1:], *tokens])
        while len(tokens) < NEW_TOKENS:
            anchor = tokens[-1]
            drafts = session.propose([0], [anchor]).tokens[0]
            output = host.forward(0, np.array([anchor, *drafts]), start=position)
            # The target's own choices, behind the anchor and behind each draft.
            own = output.logits.argmax(-1)
            accepted = int((own[:-1] == drafts).cumprod().sum())
            committed = own[: accepted + 1]
            tokens += committed.tolist()
            session.append(0, output.taps[: accepted + 1], start=position, tokens=committed)
            # The next forward starts here: rejected rows are forgotten.
            position += accepted + 1
            rounds += 1
    return tokens[:NEW_TOKENS], (position - len(prompt)) / rounds


def main(bundle_path, target_path):
    bundle = load_bundle(bundle_path)
    model = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32).eval()
    host = TransformersTarget(model, bundle.draft.target_layer_ids)
    tokenizer = AutoTokenizer.from_pretrained(target_path)
    chat = [{"role": "user", "content": "What is 3 + 4?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    first, accepted = with_engine(bundle, host, prompt)
    second, accepted_by_hand = by_hand(bundle, host, prompt)
    print(tokenizer.decode(first))
    print(f"accepted length: engine {accepted:.2f}, by hand {accepted_by_hand:.2f}")
    print("same tokens:", "yes" if first == second else "NO")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("target", help="the model that the drafter was trained for")
    arguments = parser.parse_args()
    main(arguments.bundle, arguments.target)
