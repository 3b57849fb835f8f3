# SPDX-License-Identifier: Apache-2.0
"""The torch backend on a CPU: the same buffers, buckets, padding and caches as on a GPU, without graphs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from dspark_trt.bundle import Bundle
from dspark_trt.errors import BackendError, BundleError
from dspark_trt.models.drafter import Drafter
from dspark_trt.models.stored_weights import StoredWeights
from dspark_trt.runtime.backends import open_backend
from dspark_trt.runtime.backends.interface import BackendOptions, DraftInputs, TargetModel
from dspark_trt.runtime.backends.torch_backend import TorchBackend
from dspark_trt.runtime.backends.torch_buffers import DeviceArray
from dspark_trt.runtime.backends.torch_caches import DeviceCaches
from dspark_trt.runtime.backends.torch_models import DeviceDraftModel, DeviceTargetModel
from dspark_trt.runtime.backends.torch_steps import ModuleSteps, Prefill
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.ragged import RaggedRows, ragged_rows
from dspark_trt.runtime.request import Completion, Request, SamplingParams
from dspark_trt.runtime.session import DraftSession
from tests.conftest import ExportBundle

CPU = BackendOptions(device="cpu")
VOCAB, TAPS = 2048, 384


def request(
    seed: int, tokens: int = 24, *, speculate: bool = True, **params: object
) -> Request:
    prompt = np.random.default_rng(seed).integers(3, VOCAB, 4 + 5 * (seed % 4)).tolist()
    wanted = {"max_new_tokens": tokens, "ignore_eos": True, "seed": seed, **params}
    return Request(
        prompt_ids=(1, *prompt),
        params=SamplingParams(**wanted),  # type: ignore[arg-type]
        speculate=speculate,
    )


def generate(
    bundle: Bundle, requests: list[Request], backend: str = "torch", **options: int
) -> list[Completion]:
    done = run(bundle, requests, backend, **options)
    assert all(c.error is None for c in done)
    return done


def run(
    bundle: Bundle, requests: list[Request], backend: str = "torch", **options: int
) -> list[Completion]:
    """Whatever becomes of the requests, the engine stays whole."""
    engine = Engine.load(
        bundle,
        backend=backend,
        backend_options=CPU,
        options=EngineOptions(**{"max_batch": 3, **options}),  # type: ignore[arg-type]
    )
    with engine:
        done = engine.generate(requests)
        engine.check_integrity()
    return done


@pytest.mark.parametrize("drafter", ["dspark-vanilla", "dspark-rnn", "dflash", "eagle3"])
def test_tokens_are_those_of_onnxruntime(drafter: str, fixture_bundle: ExportBundle) -> None:
    """Greedy and seeded, filters and unequal prompts, more requests than rows, prompts in chunks."""
    bundle = fixture_bundle(drafter)
    requests = [
        request(i, 12 + 5 * (i % 3), temperature=[0.0, 1.0, 0.7][i % 3], top_k=[0, 30][i % 2])
        for i in range(7)
    ]
    ours = generate(bundle, requests, max_tokens_per_step=16)
    theirs = generate(bundle, requests, "onnxruntime", max_tokens_per_step=16)
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        assert one.stats.accepted_lengths == other.stats.accepted_lengths
    assert sum(c.stats.rounds for c in ours) > 20


def test_penalties_masks_and_logprobs_are_those_of_onnxruntime(tiny_bundle: Bundle) -> None:
    requests = [
        request(1, repetition_penalty=1.3, logprobs=3),
        request(2, temperature=0.8, frequency_penalty=0.5, logit_bias=((7, 4.0),)),
        request(3),
    ]
    ours = generate(tiny_bundle, requests)
    theirs = generate(tiny_bundle, requests, "onnxruntime")
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
    for one, other in zip(ours[0].logprobs, theirs[0].logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_float16(fixture_bundle: ExportBundle) -> None:
    bundle = fixture_bundle("dspark-vanilla", dtype="float16")
    requests = [request(i, 16) for i in range(3)]
    ours = generate(bundle, requests)
    alone = generate(bundle, [request(i, 16, speculate=False) for i in range(3)])
    theirs = generate(bundle, requests, "onnxruntime")
    assert [c.token_ids for c in ours] == [c.token_ids for c in alone]
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]


def test_slots_are_reused_and_aborts_leave_nothing(tiny_bundle: Bundle) -> None:
    expected = generate(tiny_bundle, [request(i) for i in range(6)])
    engine = Engine.load(
        tiny_bundle,
        backend="torch",
        backend_options=CPU,
        options=EngineOptions(max_batch=3, prefix_cache_bytes=1 << 24),
    )
    with engine:
        dropped = [engine.submit(request(50 + i, 200)) for i in range(3)]
        for _ in range(4):
            engine.step()
        kept = [engine.submit(request(i)) for i in range(3)]
        for each in dropped:
            engine.abort(each)
            engine.step()  # others move into its row
        while engine.has_work:
            engine.step()
        first = [engine.take(i).token_ids for i in kept]
        again = [c.token_ids for c in engine.generate([request(i % 6) for i in range(10)])]
        prefixes = engine.status()["prefix_cache"]
        engine.check_integrity()
    whole = [c.token_ids for c in expected]
    assert [*first, *again] == [*whole[:3], *whole, *whole[:4]]
    assert prefixes["hits"] > 0  # cache rows went out to the host and back


def test_sessions_propose_the_same(tiny_bundle: Bundle) -> None:
    taps = np.random.default_rng(0).normal(0, 1, (2, 40, TAPS)).astype(np.float32)
    uniforms = np.random.default_rng(1).random((2, 7), np.float32)
    proposals = []
    for backend in ("torch", "onnxruntime"):
        with DraftSession.load(tiny_bundle, backend=backend, slots=2, options=CPU) as session:
            session.append(0, taps[0, :30], 0)
            session.append(1, taps[1, :5], 0)
            session.propose([1], [9])
            session.append(1, taps[1, 5:9], 5)
            saved = session.snapshot(0, 20)
            session.restore(0, saved)
            session.append(0, taps[0, 20:24], 20)
            proposals.append(
                session.propose([0, 1], [3, 4], temperature=[0.0, 0.9], uniforms=uniforms)
            )
    ours, theirs = proposals
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    np.testing.assert_allclose(ours.logits, theirs.logits, atol=2e-4)
    np.testing.assert_allclose(ours.confidence_logits, theirs.confidence_logits, atol=2e-4)  # type: ignore[arg-type]


# One step -------------------------------------------------------------------------------------------


def open_models(bundle: Bundle, requests: int) -> tuple[DeviceDraftModel, DeviceTargetModel]:
    backend = open_backend("torch", bundle, CPU)
    draft, target = backend.draft_model(requests), backend.target_model(requests)
    assert isinstance(draft, DeviceDraftModel)
    assert isinstance(target, DeviceTargetModel)
    return draft, target


def step_rows(lengths: list[int], context: list[int], seed: int) -> RaggedRows:
    random = np.random.default_rng(seed)
    tokens = [random.integers(3, VOCAB, n) for n in lengths]
    return ragged_rows(tokens, np.array(context, np.int64), np.ones(len(lengths), np.bool_))


def prefilled(target: TargetModel, prompts: list[int]) -> None:
    target.step(step_rows(prompts, [0] * len(prompts), 0))


def test_a_batch_filled_up_gives_the_rows_of_its_requests_alone(tiny_bundle: Bundle) -> None:
    """Three requests in a bucket of four with rows to spare, against each one in a bucket of its own."""
    together, alone = open_models(tiny_bundle, 4)[1], open_models(tiny_bundle, 1)[1]
    prompts, lengths = [9, 30, 17], [3, 8, 1]
    prefilled(together, [*prompts, 12])
    rows = step_rows(lengths, prompts, 5)
    logits = np.array(together.step(rows).logits)
    for r, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        saved = together.read_rows(r, prompt)
        alone.write_rows(0, saved)
        start = rows.offsets[r]
        own = ragged_rows(
            [rows.token_ids[start : start + length]],
            np.array([prompt], np.int64),
            np.ones(1, np.bool_),
        )
        np.testing.assert_allclose(
            alone.step(own).logits, logits[start : start + length], atol=1e-4
        )


def test_a_step_touches_no_row_of_the_others(tiny_bundle: Bundle) -> None:
    """Requests behind the batch only lend their scratch rows; what lies behind a mask is never seen."""
    draft, target = open_models(tiny_bundle, 4)
    prompts = [9, 30, 17, 12]
    prefilled(target, prompts)
    taps = np.random.default_rng(3).normal(0, 1, (30, TAPS)).astype(np.float32)
    for row, prompt in enumerate(prompts):
        draft.append(row, taps[:prompt], 0)
    session_inputs = draft_inputs(prompts[:3])
    before = [(m.read_rows(3, 12), m.read_rows(1, 30)) for m in (draft, target)]
    rows = step_rows([2, 2, 2], prompts[:3], 5)
    logits, drafted = np.array(target.step(rows).logits), draft.draft(session_inputs)
    tokens, scores = drafted.tokens.copy(), drafted.logits.copy()
    for model, saved in zip((draft, target), before, strict=True):
        for row, expected in zip((3, 1), saved, strict=True):
            for one, other in zip(model.read_rows(row, 12), expected, strict=True):
                np.testing.assert_array_equal(one[:, :12], other[:, :12])
    # Rubbish in every row that nobody should read changes nothing.
    for model in (draft, target):
        for tensor in model.caches.tensors:
            for row, prompt in enumerate(prompts):
                tensor[row, :, prompt:] = 3e4
            tensor[3] = 3e4
    np.testing.assert_array_equal(np.array(target.step(rows).logits), logits)
    again = draft.draft(session_inputs)
    np.testing.assert_array_equal(again.tokens, tokens)
    np.testing.assert_array_equal(again.logits.copy(), scores)


def draft_inputs(context: list[int]) -> DraftInputs:
    batch, random = len(context), np.random.default_rng(9)
    new_len = np.arange(batch) % 3
    return DraftInputs(
        anchor_ids=random.integers(3, VOCAB, batch),
        new_taps=random.normal(0, 1, (batch, 8, TAPS)).astype(np.float32),
        new_len=new_len,
        context_len=np.array(context, np.int64),
        temperature=np.array([0, 1, 0.5], np.float32)[:batch],
        uniforms=random.random((batch, 7), np.float32),
    )


def test_a_request_that_left_nan_behind_does_not_reach_the_next(tiny_bundle: Bundle) -> None:
    """A masked NaN times zero is NaN: rows start clean with each request."""
    target = open_models(tiny_bundle, 2)[1]
    rows = step_rows([6, 9], [0, 0], 1)
    expected = np.array(target.step(rows).logits)
    for tensor in target.caches.tensors:
        tensor.fill_(torch.nan)
    np.testing.assert_array_equal(np.array(target.step(rows).logits), expected)


def test_nan_stays_with_its_request(tiny_bundle: Bundle) -> None:
    """Rows that fill a batch up repeat a request's own: one request's NaN is in no other's cache."""
    target = open_models(tiny_bundle, 2)[1]
    prefilled(target, [6, 9])
    rows = step_rows([5, 2], [6, 9], 2)
    expected = np.array(target.step(rows).logits)
    for tensor in target.caches.tensors:
        tensor[0] = torch.nan
    damaged = np.array(target.step(rows).logits)
    assert np.isnan(damaged[:5]).all()
    np.testing.assert_array_equal(damaged[5:], expected[5:])


def test_caches_are_written_in_place_and_grow_with_contexts(tiny_bundle: Bundle) -> None:
    target = open_models(tiny_bundle, 2)[1]
    prefilled(target, [20, 20])
    places = [tensor.data_ptr() for tensor in target.caches.tensors]
    bytes_before = [tensor.clone() for tensor in target.caches.tensors]
    target.step(step_rows([3, 1], [20, 20], 1))
    assert [tensor.data_ptr() for tensor in target.caches.tensors] == places
    assert not any(map(torch.equal, target.caches.tensors, bytes_before))
    saved, version = target.read_rows(1, 20), target.caches.version
    target.reserve(500)
    assert target.caches.version == version + 1
    for one, other in zip(target.read_rows(1, 20), saved, strict=True):
        np.testing.assert_array_equal(one, other)


def test_logits_stay_where_they_are_until_somebody_reads(tiny_bundle: Bundle) -> None:
    target = open_models(tiny_bundle, 2)[1]
    output = target.step(step_rows([4, 2], [0, 0], 1))
    assert isinstance(output.logits, DeviceArray)
    assert output.logits.shape == (6, VOCAB)
    part = output.logits[1:3]
    assert isinstance(part, DeviceArray)
    np.testing.assert_array_equal(np.asarray(part), output.logits.copy()[1:3])
    np.testing.assert_array_equal(output.logits[np.array([4, 0])], output.logits.copy()[[4, 0]])
    output.logits[...] = np.nan
    assert np.isnan(part).all()


def test_drafter_and_target_share_stored_weights(tiny_bundle: Bundle) -> None:
    """The example's drafter borrows embeddings and head from its target: stored once, loaded once."""
    backend = open_backend("torch", tiny_bundle, CPU)
    assert isinstance(backend, TorchBackend)
    assert isinstance(backend._drafter, Drafter)
    embeddings = backend._drafter.backbone.embed_tokens.weight
    assert embeddings.data_ptr() == backend._target.embed_tokens.weight.data_ptr()


def test_every_precision_is_read_from_file_and_graph(
    tiny_bundle: Bundle, tmp_path: Path
) -> None:
    """Large tensors lie in the weight file at an offset, small ones in the graph."""
    values = torch.arange(6).reshape(2, 3)
    (tmp_path / "weights.bin").write_bytes(
        b"\0" * 64 + values.bfloat16().view(torch.uint8).numpy().tobytes()
    )
    outside = onnx.TensorProto(data_type=onnx.TensorProto.BFLOAT16, dims=(2, 3))
    outside.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", "weights.bin"), ("offset", "64"), ("length", "12")):
        outside.external_data.add(key=key, value=value)
    inside = onnx.numpy_helper.from_array(values.half().numpy())
    weights = StoredWeights(replace(tiny_bundle, path=tmp_path))
    assert torch.equal(weights._read(outside), values.bfloat16())
    assert torch.equal(weights._read(inside), values.half())
    assert weights._read(outside) is weights._read(outside)


def test_an_engine_shares_its_parts_and_the_next_one_gets_new_ones(tiny_bundle: Bundle) -> None:
    backend = open_backend("torch", tiny_bundle, CPU)
    found = []
    for _ in range(2):
        draft, target = backend.draft_model(2), backend.target_model(2)
        assert isinstance(draft, DeviceDraftModel)
        assert isinstance(target, DeviceTargetModel)
        assert draft._buffers is target._buffers is backend.verifier(2)._buffers  # type: ignore[attr-defined]
        found.append(draft._buffers)
    assert found[0] is not found[1]


# Refusals -------------------------------------------------------------------------------------------


def test_devices_that_are_not_there_are_refused(tiny_bundle: Bundle) -> None:
    for device, message in (
        ("cuda:77", r"sees \d+ CUDA devices"),
        ("meta", "is unknown; expected cpu, cuda or cuda:N"),
        ("gpu0", "is unknown; expected cpu, cuda or cuda:N"),
    ):
        with pytest.raises(BackendError, match=message):
            open_backend("torch", tiny_bundle, BackendOptions(device=device))


def test_unknown_backends_are_named(tiny_bundle: Bundle) -> None:
    with pytest.raises(
        BackendError, match="unknown backend 'cudnn'; there are onnxruntime, torch, tensorrt"
    ):
        open_backend("cudnn", tiny_bundle)


def test_a_parameter_that_no_graph_holds_is_named(tiny_bundle: Bundle, tmp_path: Path) -> None:
    graph = onnx.load(tiny_bundle.path / "target.onnx", load_external_data=False)
    kept = [t for t in graph.graph.initializer if not t.name.startswith("norm.weight")]
    del graph.graph.initializer[:]
    graph.graph.initializer.extend(kept)
    onnx.save(graph, tmp_path / "target.onnx")
    (tmp_path / "weights.bin").symlink_to(tiny_bundle.path / "weights.bin")
    with pytest.raises(BundleError, match=r"no graph holds norm\.weight\. Export"):
        StoredWeights(replace(tiny_bundle, path=tmp_path)).target()


def test_one_request_without_memory_ends_alone(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator refuses the rows of a long context, after half of a cache's tensors have grown."""
    asked = [request(seed) for seed in range(3)]
    asked.insert(1, replace(asked[0], prompt_ids=(1, *range(3, 400))))
    expected = generate(tiny_bundle, [asked[0], *asked[2:]])
    grow, refused = torch.Tensor.new_zeros, []

    def new_zeros(self: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
        if len(size) == 4 and size[2] > 300:
            refused.append(size)
            if len(refused) % 3 == 0:
                raise torch.OutOfMemoryError("no memory is left\nand pages of advice")
        return grow(self, size)

    monkeypatch.setattr(torch.Tensor, "new_zeros", new_zeros)
    done = run(tiny_bundle, asked, max_batch=4, max_tokens_per_step=512)
    assert refused
    assert (done.pop(1).error or "").endswith("no memory is left")
    for one, other in zip(done, expected, strict=True):
        assert one.token_ids == other.token_ids


def test_a_cache_that_cannot_grow_stays_what_it_was(tiny_bundle: Bundle) -> None:
    decoder = replace(tiny_bundle.draft.decoder, num_layers=1)
    caches = DeviceCaches(
        decoder, requests=1, dtype=torch.float32, device=torch.device("cpu"), scratch=8
    )
    caches.reserve(20)
    rows = caches.capacity_rows
    caches.tensors[0].normal_()
    kept = caches.read_rows(0, rows)
    with pytest.raises(
        BackendError, match=rf"^no memory for caches of \d+ rows instead of {rows}: "
    ):
        caches.reserve(1 << 42)
    assert caches.capacity_rows == rows
    for now, before in zip(caches.read_rows(0, rows), kept, strict=True):
        np.testing.assert_array_equal(now, before)
    caches.reserve(rows)
    np.testing.assert_array_equal(caches.read_rows(0, rows)[0], kept[0])
    assert caches.capacity_rows > rows


def test_caches_that_grew_half_way_are_again_what_they_were(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs are given their addresses, and the memory of those that had grown is wanted by others."""
    caches = DeviceCaches(
        tiny_bundle.draft.decoder,
        requests=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
        scratch=8,
    )
    caches.reserve(20)
    rows = caches.capacity_rows
    for tensor in caches.tensors:
        tensor.normal_()
    kept = [caches.read_rows(row, rows) for row in (0, 1)]
    held = sum(tensor.untyped_storage().nbytes() for tensor in caches.tensors)
    grow = torch.Tensor.new_zeros
    grown: list[tuple[int, ...]] = []

    def new_zeros(self: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
        if len(grown) == 2:
            raise torch.OutOfMemoryError("no memory is left")
        grown.append(size)
        return grow(self, size)

    monkeypatch.setattr(torch.Tensor, "new_zeros", new_zeros)
    with pytest.raises(BackendError, match="no memory is left"):
        caches.reserve(rows)
    assert len(grown) == 2
    assert caches.capacity_rows == rows
    assert all(tensor.is_contiguous() for tensor in caches.tensors)
    assert sum(tensor.untyped_storage().nbytes() for tensor in caches.tensors) == held
    for row, before in enumerate(kept):
        for now, own in zip(caches.read_rows(row, rows), before, strict=True):
            np.testing.assert_array_equal(now, own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_change_places_without_memory(
    tiny_bundle: Bundle, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a swap would give two requests parts of each other's context."""
    caches = DeviceCaches(
        tiny_bundle.draft.decoder,
        requests=3,
        dtype=dtype,
        device=torch.device("cpu"),
        scratch=8,
        fixed=16,
    )
    for tensor in caches.tensors:
        tensor.normal_()[2, 0, 0, 0] = float("nan")
    before = [caches.read_rows(row, 16) for row in range(3)]

    def clone(_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(torch.Tensor, "clone", clone)
    caches.swap(0, 2)
    caches.swap(1, 1)
    for row, was in enumerate((2, 1, 0)):
        for now, own in zip(caches.read_rows(row, 16), before[was], strict=True):
            np.testing.assert_array_equal(now, own)


@pytest.mark.parametrize("call", ["prefill", "append"])
def test_a_prompt_without_memory_ends_alone(
    call: str, tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and their context rows go through no static buffers: they take what memory there is."""
    asked = [request(seed, temperature=seed / 2) for seed in range(3)]
    expected = generate(tiny_bundle, asked)
    asked.insert(1, replace(asked[0], prompt_ids=(1, *range(3, 400))))
    step = getattr(ModuleSteps, call)

    def without_memory(steps: ModuleSteps, *args: object) -> object:
        if any(len(each) > 300 for each in map(_rows, args)):
            raise torch.OutOfMemoryError("no memory is left\nand pages of advice")
        return step(steps, *args)

    monkeypatch.setattr(ModuleSteps, call, without_memory)
    done = run(tiny_bundle, asked, max_batch=4, max_tokens_per_step=512)
    assert (done.pop(1).error or "").endswith("no memory is left")
    assert [one.token_ids for one in done] == [other.token_ids for other in expected]


def _rows(argument: object) -> torch.Tensor:
    if isinstance(argument, Prefill):
        return argument.token_ids
    return argument if isinstance(argument, torch.Tensor) else torch.empty(0)


@pytest.mark.parametrize("call", ["read_rows", "write_rows"])
def test_a_prefix_without_memory_fails_nobody_else(
    call: str, tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = (1, *range(3, 40))
    asked = [replace(request(seed, temperature=0.7), prompt_ids=prompt) for seed in range(4)]
    expected = generate(tiny_bundle, asked, max_batch=1)
    copy = getattr(DeviceCaches, call)
    failed: list[str] = []

    def without_memory(caches: DeviceCaches, *args: object) -> object:
        if not failed:
            failed.append(call)
            raise torch.OutOfMemoryError("no memory is left")
        return copy(caches, *args)

    monkeypatch.setattr(DeviceCaches, call, without_memory)
    options = EngineOptions(max_batch=2, prefix_cache_bytes=1 << 24)
    with Engine.load(
        tiny_bundle, backend="torch", backend_options=CPU, options=options
    ) as engine:
        done = engine.generate(asked)
        engine.check_integrity()
        assert engine.status()["prefix_cache"]["hits"]
    assert failed
    errors = [one.error for one in done if one.error]
    assert errors == ["write_rows failed: no memory is left"] * (call == "write_rows")
    for one, other in zip(done, expected, strict=True):
        assert one.error or one.token_ids == other.token_ids
