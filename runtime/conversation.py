# SPDX-License-Identifier: Apache-2.0
"""A conversation as the chat template wants it, cut to what the context holds."""

from dataclasses import dataclass, replace

from dspark_trt.errors import CapacityError
from dspark_trt.runtime.text import TextCodec

Message = dict[str, str]  # role, content


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages so far: the user's and the assistant's take turns, the user's first."""

    system: str | None = None  # None: whatever the template says
    messages: tuple[Message, ...] = ()

    def asked(self, text: str) -> "Conversation":
        return self._with("user", text)

    def answered(self, text: str) -> "Conversation":
        return self._with("assistant", text)

    def cleared(self) -> "Conversation":
        return replace(self, messages=())

    def without_oldest_turn(self) -> "Conversation":
        return replace(self, messages=self.messages[2:])

    def rendered(self) -> list[Message]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.messages]

    def _with(self, role: str, text: str) -> "Conversation":
        return replace(self, messages=(*self.messages, {"role": role, "content": text}))


def fitted_prompt(
    codec: TextCodec, conversation: Conversation, *, most_tokens: int
) -> tuple[Conversation, tuple[int, ...]]:
    """The conversation without as many of its oldest turns as it takes, and its prompt.

    Args:
        codec: of a bundle with a chat template.
        conversation: ends with the user's message.
        most_tokens: the longest prompt that leaves room for an answer.

    Raises:
        RequestError: there is no chat template, or it refuses the messages.
        CapacityError: the last message alone is too long.
    """
    prompt = codec.encode_chat(conversation.rendered())
    while len(prompt) > most_tokens:
        if len(conversation.messages) == 1:
            raise CapacityError(
                f"the message has {len(prompt)} tokens with its template; {most_tokens} fit beside an answer"
            )
        conversation = conversation.without_oldest_turn()
        prompt = codec.encode_chat(conversation.rendered())
    return conversation, prompt
