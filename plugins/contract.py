# SPDX-License-Identifier: Apache-2.0
"""Names, types and shapes of the verification graphs, for their builders and the runtime alike.

Symbolic dimensions: `batch` requests B, `offsets` = B + 1, `rows` flattened target rows T. Numbers:
K = γ drafted tokens, V vocabulary, N alternatives whose log-probability is asked for.
"""

from enum import StrEnum

from dspark_trt.bindings import Binding, GraphBindings

DOMAIN = "dspark"
OPSET = 24


class VerifyMode(StrEnum):
    """How draft tokens are checked; GREEDY is the small graph for hosts that never sample."""

    REJECTION = "rejection"
    COUPLED = "coupled"
    GREEDY = "greedy"


def top_logprobs(vocab_size: int) -> int:
    """Alternatives a bundle's graph reports: 20, what the OpenAI API can ask for, or the whole vocabulary."""
    return min(20, vocab_size)


def verify_bindings(
    mode: VerifyMode,
    *,
    gamma: int,
    vocab_size: int,
    processors: bool = False,
    top_logprobs: int | None = None,
) -> GraphBindings:
    """Inputs and outputs of ``verify.onnx`` in graph order.

    ``processors`` adds penalties, logit bias and allowed tokens; ``top_logprobs`` = N the log-probabilities
    of the committed tokens and of the N likeliest ones, under the target's raw logits.
    """
    own = {
        VerifyMode.REJECTION: (
            *_draft(gamma, vocab_size),
            *_SAMPLING,
            Binding("uniforms", "float32", ("batch", gamma + 1)),
        ),
        VerifyMode.COUPLED: (*_SAMPLING, *_NOISE),
        VerifyMode.GREEDY: (),
    }[mode]
    logprobs = () if top_logprobs is None else _logprobs(gamma, top_logprobs)
    return GraphBindings(
        (
            Binding("target_logits", "float32", ("rows", vocab_size)),
            # Request r owns rows offsets[r] .. offsets[r+1]-1: its anchor's, then ℓ_r drafted ones.
            Binding("offsets", "int64", ("offsets",)),
            Binding("draft_tokens", "int64", ("batch", gamma)),  # anything behind ℓ_r
            *own,
            *(_processors(vocab_size) if processors else ()),
        ),
        (
            Binding("accepted", "int64", ("batch",)),  # -1: refused
            Binding("tokens", "int64", ("batch", gamma + 1)),  # -1 behind the committed ones
            *logprobs,
        ),
    )


_SAMPLING = (
    Binding("temperature", "float32", ("batch",)),
    Binding("top_k", "int64", ("batch",)),
    Binding("top_p", "float32", ("batch",)),
    Binding("min_p", "float32", ("batch",)),
)
_NOISE = (
    Binding("seeds", "int64", ("batch",)),
    Binding("positions", "int64", ("batch",)),  # absolute position of the first drafted token
)


def _draft(gamma: int, vocab_size: int) -> tuple[Binding, ...]:
    return (
        # The very vectors the tokens were drawn from, before temperature; anything behind ℓ_r.
        Binding("draft_logits", "float32", ("batch", gamma, vocab_size)),
        Binding("draft_temperature", "float32", ("batch",)),
    )


def _processors(vocab_size: int) -> tuple[Binding, ...]:
    return (
        Binding("logit_bias", "float32", ("batch", vocab_size)),
        Binding("repetition_penalty", "float32", ("batch",)),  # 1: off
        Binding("presence_penalty", "float32", ("batch",)),
        Binding("frequency_penalty", "float32", ("batch",)),
        Binding("prompt_mask", "bool", ("batch", vocab_size)),  # the token occurs in the prompt
        # Occurrences among the output tokens committed so far, the anchor included.
        Binding("output_counts", "int32", ("batch", vocab_size)),
        Binding("allowed", "bool", ("rows", vocab_size)),
    )


def _logprobs(gamma: int, alternatives: int) -> tuple[Binding, ...]:
    """Places behind the committed tokens hold 0 and -1."""
    logprobs = Binding("logprobs", "float32", ("batch", gamma + 1))
    if not alternatives:
        return (logprobs,)
    shape = ("batch", gamma + 1, alternatives)
    return (
        logprobs,
        Binding("top_tokens", "int64", shape),
        Binding("top_logprobs", "float32", shape),
    )
