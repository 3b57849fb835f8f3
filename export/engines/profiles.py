# SPDX-License-Identifier: Apache-2.0
"""Which shapes engines are tuned for: limits, buckets and optimisation profiles, all pure.

Legend: B requests, M target rows a step, γ drafted tokens, S cache rows.
"""

from collections.abc import Iterator, Mapping

from dspark_trt import bindings
from dspark_trt.bindings import GraphBindings
from dspark_trt.bundle import Bundle
from dspark_trt.engine_manifest import Limits, Profile, Shape
from dspark_trt.errors import BuildError
from dspark_trt.plugins.contract import VerifyMode, verify_bindings

DEFAULT_BATCH = 8
DEFAULT_TOKENS = 512  # the engine loop's default budget of target rows a step
DEFAULT_CAPACITY = 4096

Range = tuple[int, int, int]  # smallest, usual, largest


def resolve_limits(
    bundle: Bundle,
    *,
    batch: int | None = None,
    tokens: int | None = None,
    capacity: int | None = None,
) -> Limits:
    """Fill in defaults, and check that the limits fit each other and the bundle.

    Raises:
        BuildError: a limit that leaves no room for one round, or more rows than there are positions.
    """
    gamma, most = bundle.draft.gamma, bundle.max_context_tokens
    batch = DEFAULT_BATCH if batch is None else batch
    if batch < 1:
        raise BuildError(f"--max-batch must be at least 1, got {batch}")
    verified = batch * (gamma + 1)
    capacity = min(most, DEFAULT_CAPACITY) if capacity is None else capacity
    if tokens is None:
        tokens = max(min(DEFAULT_TOKENS, capacity), verified)
    if tokens < verified:
        raise BuildError(
            f"--max-tokens {tokens} is too small: {batch} requests verify {gamma + 1} rows each. "
            f"Give at least {verified}, or a smaller --max-batch."
        )
    block = gamma + 1 + bundle.draft.block_slots  # rows of one draft step's cache update
    if capacity < block or capacity > most:
        raise BuildError(
            f"--capacity {capacity} is out of range: a draft step writes {block} rows, "
            f"the models have {most} positions"
        )
    return Limits(batch=batch, tokens=tokens, capacity=capacity)


def buckets(largest: int) -> tuple[int, ...]:
    """Powers of two up to `largest`, and `largest` itself."""
    powers = [1 << i for i in range(largest.bit_length())]
    return tuple(sorted({*powers, largest}))


def graph_bindings(bundle: Bundle, graph: str) -> GraphBindings:
    """The contract of one graph of a bundle."""
    draft, dtype = bundle.draft, bundle.dtype
    gamma, vocab = draft.gamma, draft.decoder.vocab_size
    match graph:
        case "context":
            return bindings.context_bindings(draft, dtype)
        case "draft_greedy":
            return bindings.greedy_draft_bindings(draft, dtype)
        case "draft":
            return bindings.draft_bindings(draft, dtype)
        case "backbone":
            return bindings.backbone_bindings(draft, dtype)
        case "sequential_head":
            return bindings.sequential_head_bindings(draft)
        case "confidence_head":
            return bindings.confidence_head_bindings(draft)
        case "target" if bundle.target is not None:
            return bindings.target_bindings(bundle.target, draft.tap_size, dtype)
        case "verify":
            return verify_bindings(VerifyMode.REJECTION, gamma=gamma, vocab_size=vocab)
        case "verify_greedy":
            return verify_bindings(VerifyMode.GREEDY, gamma=gamma, vocab_size=vocab)
        case "verify_processed":
            return verify_bindings(
                VerifyMode.REJECTION,
                gamma=gamma,
                vocab_size=vocab,
                processors=True,
                top_logprobs=bundle.top_logprobs,
            )
    raise BuildError(f"{graph} is no graph that engines are built for")


def profiles_for(
    bundle: Bundle, graph: str, limits: Limits, backend: str
) -> tuple[Profile, ...]:
    """Optimisation profiles of a graph's engine, the most specific first.

    TensorRT tunes kernels for each profile's usual shape: one request, a full batch, and a prompt have
    theirs. TensorRT-RTX specialises kernels on the user's machine for the shapes it meets, and every
    further profile would only repeat the whole build: it gets one that covers all.
    """
    contract = graph_bindings(bundle, graph)
    return tuple(
        Profile(
            name=name,
            shapes={
                binding.name: _shapes(
                    binding.shape, ranges | {"capacity": (limits.capacity,) * 3}
                )
                for binding in contract.inputs
            },
        )
        for name, ranges in _ranges(bundle, graph, limits, backend)
    )


def _ranges(
    bundle: Bundle, graph: str, limits: Limits, backend: str
) -> Iterator[tuple[str, dict[str, Range]]]:
    rows = bundle.draft.gamma + 1
    batch, tokens = limits.batch, limits.tokens
    many = batch * rows
    padded = min(tokens, limits.capacity)
    single = _sized(bundle, (1, 1, 1), (1, rows, rows), (1, rows, rows))
    full = _sized(bundle, (1, batch, batch), (1, many, many), (1, rows, rows))
    prefill = _sized(bundle, (1, 1, batch), (1, tokens, tokens), (1, padded, padded))
    prefill["logit_rows"] = (1, batch, many)
    if backend == "tensorrt-rtx":
        everything = {
            name: (low, usual, prefill[name][2]) for name, (low, usual, _) in single.items()
        }
        if graph == "context":
            everything["context_rows"] = prefill["context_rows"]
        yield "all", everything | _verified_rows(graph, (1, rows, many))
        return
    if graph == "context":
        yield "prefill", prefill
        return
    yield "single", single
    if batch > 1:
        yield "batch", full
    if graph == "target":
        yield "prefill", prefill


def _sized(bundle: Bundle, batch: Range, rows: Range, padded: Range) -> dict[str, Range]:
    """Ranges of all symbolic dimensions, from those of requests, flattened rows and padded rows."""
    return {
        "batch": batch,
        "offsets": (batch[0] + 1, batch[1] + 1, batch[2] + 1),
        "rows": rows,
        "logit_rows": rows,
        "context_rows": padded,
        "padded": padded,
        "slots": (1, bundle.draft.gamma, bundle.draft.gamma),
    }


def _verified_rows(graph: str, rows: Range) -> dict[str, Range]:
    """`rows` of a verification are those whose logits were asked for, not those of a prompt."""
    return {"rows": rows} if graph.startswith("verify") else {"logit_rows": rows}


def _shapes(
    shape: tuple[int | str, ...], ranges: Mapping[str, Range]
) -> tuple[Shape, Shape, Shape]:
    low, usual, high = (
        tuple(d if isinstance(d, int) else ranges[d][i] for d in shape) for i in range(3)
    )
    return low, usual, high
