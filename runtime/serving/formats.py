# SPDX-License-Identifier: Apache-2.0
"""How tokens look in OpenAI's two kinds of answers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from dspark_trt.runtime.request import Completion, FinishReason, TokenEvent, TokenKind
from dspark_trt.runtime.serving.round_trace import RoundTrace
from dspark_trt.runtime.text import TextCodec

Json = dict[str, Any]

_FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CAPACITY: "length",
}


def finish_reason(reason: FinishReason | None) -> str | None:
    """OpenAI's word; reasons it has no word for are errors and never get here."""
    return None if reason is None else _FINISH[reason]


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token, its log-probability and the best alternatives."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]


def token_scores(
    codec: TextCodec, token_ids: Sequence[int], source: TokenEvent | Completion
) -> list[TokenScore]:
    return [
        TokenScore(
            codec.piece(token),
            score.logprob,
            tuple((codec.piece(each), logprob) for each, logprob in score.top),
        )
        for token, score in zip(token_ids, source.logprobs, strict=True)
    ]


class Format(Protocol):
    """One endpoint's spelling."""

    prefix: str  # of ids
    whole_object: str
    part_object: str

    def opening(self, index: int) -> Json | None:
        """The part of a choice that comes before its first token."""
        ...

    def part(self, index: int, text: str, logprobs: Json | None, finish: str | None) -> Json:
        """What one round adds to a choice."""
        ...

    def whole(self, index: int, text: str, logprobs: Json | None, finish: str | None) -> Json:
        """A choice at once."""
        ...

    def logprobs(self, scores: Sequence[TokenScore], offset: int) -> Json:
        """Scores of tokens; `offset` characters of the choice's tokens come before them."""
        ...


class CompletionFormat:
    prefix = "cmpl"
    whole_object = part_object = "text_completion"

    def opening(self, index: int) -> Json | None:
        return None

    def part(self, index: int, text: str, logprobs: Json | None, finish: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    whole = part

    def logprobs(self, scores: Sequence[TokenScore], offset: int) -> Json:
        offsets = []
        for score in scores:
            offsets.append(offset)
            offset += len(score.text)
        return {
            "tokens": [score.text for score in scores],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [dict(score.top) for score in scores],
            "text_offset": offsets,
        }


class ChatFormat:
    prefix = "chatcmpl"
    whole_object, part_object = "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> Json | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, index: int, text: str, logprobs: Json | None, finish: str | None) -> Json:
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def whole(self, index: int, text: str, logprobs: Json | None, finish: str | None) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": finish,
        }

    def logprobs(self, scores: Sequence[TokenScore], offset: int) -> Json:
        return {
            "content": [
                {
                    **_chat_token(score.text, score.logprob),
                    "top_logprobs": [_chat_token(*each) for each in score.top],
                }
                for score in scores
            ],
            "refusal": None,
        }


def _chat_token(text: str, logprob: float) -> Json:
    is_whole = "\ufffd" not in text  # else a part of a character, whose bytes the text has not
    return {
        "token": text,
        "logprob": logprob,
        "bytes": list(text.encode()) if is_whole else None,
    }


def usage(completions: Sequence[Completion], choices: int) -> Json:
    """Tokens of an HTTP request; `choices` sequences share each prompt, which counts once."""
    firsts = completions[::choices]
    prompt = sum(done.stats.prompt_tokens for done in firsts)
    output = sum(done.stats.output_tokens for done in completions)
    lengths = [n for done in completions for n in done.stats.accepted_lengths]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(d.stats.cached_tokens for d in firsts)},
        "dspark": {
            "rounds": len(lengths),
            "accepted_length": sum(lengths) / len(lengths) if lengths else None,
            "verified_drafts": sum(sum(d.stats.verification_lengths) for d in completions),
            "accepted_drafts": sum(d.kinds.count(TokenKind.DRAFTED) for d in completions),
        },
    }


def round_json(trace: RoundTrace, event: TokenEvent, pieces: Sequence[str]) -> Json:
    """A round and the tokens it committed; `pieces` are their texts as they appear in the answer."""
    return {
        **asdict(trace),
        "tokens": [
            {"id": token, "text": text, "kind": kind.value}
            for token, text, kind in zip(event.token_ids, pieces, event.kinds, strict=True)
        ],
    }
