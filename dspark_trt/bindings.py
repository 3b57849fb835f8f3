# SPDX-License-Identifier: Apache-2.0
"""THE contract: name, dtype and symbolic shape of every graph tensor. Export writes it, the runtime and
the engine builder read it; nothing else types these names.

Symbolic dimensions: `batch` requests, `capacity` cache rows, `rows` flattened target rows T,
`padded` rows per request around attention L, `logit_rows` rows whose logits are asked for,
`context_rows` taps appended by one prefill call, `slots` rows of a host's block.

A context row is the taps of one position. A chain drafter (Eagle3) pairs them with the token behind that
position, whose id is one more column; the token behind the last new row is the anchor.
"""

from dataclasses import dataclass

from dspark_trt.config import (
    ConfidenceInput,
    DecoderConfig,
    DraftConfig,
    HeadType,
    TargetConfig,
)

Dim = int | str

# Name of a weight that graphs hold transposed: that of the parameter and this.
TRANSPOSED_SUFFIX = ".T"


@dataclass(frozen=True, slots=True)
class Binding:
    name: str
    dtype: str  # numpy spelling; "bfloat16" as well
    shape: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class GraphBindings:
    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(b.name for b in self.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(b.name for b in self.outputs)


def cache_bindings(decoder: DecoderConfig, dtype: str, prefix: str) -> tuple[Binding, ...]:
    """Caches `[B, Hkv, S, D]`: key and value of each layer in turn (keys alone where they are the values);
    `prefix` is past or present.
    """
    names = [
        f"{prefix}_{kind}_{layer}"
        for layer in range(decoder.num_layers)
        for kind in decoder.cache_kinds
    ]
    return tuple(
        Binding(name, dtype, ("batch", heads, "capacity", size))
        for name, (heads, size) in zip(names, decoder.cache_sizes, strict=True)
    )


def _with_caches(
    decoder: DecoderConfig,
    dtype: str,
    inputs: tuple[Binding, ...],
    outputs: tuple[Binding, ...],
) -> GraphBindings:
    return GraphBindings(
        inputs + cache_bindings(decoder, dtype, "past"),
        outputs + cache_bindings(decoder, dtype, "present"),
    )


def context_bindings(config: DraftConfig, dtype: str) -> GraphBindings:
    inputs = (
        Binding("taps", "float32", ("batch", "context_rows", config.context_size)),
        Binding("context_len", "int64", ("batch",)),
    )
    return _with_caches(config.decoder, dtype, inputs, ())


def _block_inputs(config: DraftConfig) -> tuple[Binding, ...]:
    return (
        Binding("anchor_ids", "int64", ("batch",)),
        Binding("new_taps", "float32", ("batch", config.gamma + 1, config.context_size)),
        Binding("new_len", "int64", ("batch",)),
        Binding("context_len", "int64", ("batch",)),
    )


def sampling_inputs(config: DraftConfig) -> tuple[Binding, ...]:
    """What `draft.onnx` takes besides the inputs of `draft_greedy.onnx`."""
    return (
        Binding("temperature", "float32", ("batch",)),
        Binding("uniforms", "float32", ("batch", config.gamma)),
    )


def greedy_draft_bindings(config: DraftConfig, dtype: str) -> GraphBindings:
    """The draft step of a batch in which every temperature is 0."""
    whole = draft_bindings(config, dtype)
    sampling = sampling_inputs(config)
    return GraphBindings(tuple(b for b in whole.inputs if b not in sampling), whole.outputs)


def draft_bindings(config: DraftConfig, dtype: str) -> GraphBindings:
    gamma, vocab = config.gamma, config.decoder.vocab_size
    inputs = (*_block_inputs(config), *sampling_inputs(config))
    outputs: tuple[Binding, ...] = (
        Binding("tokens", "int64", ("batch", gamma)),
        Binding("logits", "float32", ("batch", gamma, vocab)),
    )
    if config.confidence is not ConfidenceInput.NONE:
        outputs += (Binding("confidence_logits", "float32", ("batch", gamma)),)
    return _with_caches(config.decoder, dtype, inputs, outputs)


def backbone_bindings(config: DraftConfig, dtype: str) -> GraphBindings:
    gamma, decoder = config.gamma, config.decoder
    outputs = (
        Binding("hidden", "float32", ("batch", gamma, decoder.hidden_size)),
        Binding("base_logits", "float32", ("batch", gamma, decoder.vocab_size)),
    )
    return _with_caches(decoder, dtype, _block_inputs(config), outputs)


def sequential_head_bindings(config: DraftConfig) -> GraphBindings:
    """One step of the head; `state` only for `rnn` (zeros at the first slot of a block)."""
    decoder = config.decoder
    state = Binding("state", "float32", ("batch", config.markov_rank))
    has_state = config.head_type is HeadType.RNN
    inputs: tuple[Binding, ...] = (
        Binding("base_logits", "float32", ("batch", decoder.vocab_size)),
        Binding("previous_ids", "int64", ("batch",)),
        Binding("hidden", "float32", ("batch", decoder.hidden_size)),
    )
    if config.head_type is HeadType.VANILLA:
        inputs = inputs[:2]  # reads no hidden state
    logits = Binding("logits", "float32", ("batch", decoder.vocab_size))
    next_state = Binding("next_state", "float32", ("batch", config.markov_rank))
    return GraphBindings(
        (*inputs, state) if has_state else inputs,
        (logits, next_state) if has_state else (logits,),
    )


def confidence_head_bindings(config: DraftConfig) -> GraphBindings:
    inputs: tuple[Binding, ...] = (
        Binding("hidden", "float32", ("batch", "slots", config.decoder.hidden_size)),
    )
    if config.confidence is ConfidenceInput.HIDDEN_MARKOV:
        inputs += (Binding("previous_ids", "int64", ("batch", "slots")),)
    return GraphBindings(inputs, (Binding("confidence_logits", "float32", ("batch", "slots")),))


def target_bindings(config: TargetConfig, tap_size: int, dtype: str) -> GraphBindings:
    inputs = (
        Binding("token_ids", "int64", ("rows",)),
        Binding("positions", "int64", ("rows",)),
        Binding("pad_index", "int64", ("batch", "padded")),
        Binding("unpad_index", "int64", ("rows",)),
        Binding("logit_rows", "int64", ("logit_rows",)),
        Binding("context_len", "int64", ("batch",)),
    )
    outputs = (
        Binding("logits", "float32", ("logit_rows", config.decoder.vocab_size)),
        Binding("taps", "float32", ("rows", tap_size)),
    )
    return _with_caches(config.decoder, dtype, inputs, outputs)
