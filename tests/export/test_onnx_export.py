# SPDX-License-Identifier: Apache-2.0
"""What is inside the exported graphs, and that the parts do what the whole does."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from dspark_trt import bindings
from dspark_trt.bindings import GraphBindings
from dspark_trt.bundle import Bundle
from dspark_trt.checkpoint import read_draft, read_target
from dspark_trt.config import ConfidenceInput, HeadType
from dspark_trt.errors import ExportError
from dspark_trt.export.functions import add_dspark_functions
from dspark_trt.export.graphs import TORCH_DTYPES, draft_graphs
from dspark_trt.export.onnx_from_module import onnx_from_module
from dspark_trt.export.passes import drop_unused_outputs, fold_weight_transposes
from dspark_trt.export.weights import WeightFile
from dspark_trt.models.loading import (
    ParameterSource,
    load_drafter,
    load_target,
    parameter_sources,
    target_skeleton,
)
from tests.checkpoints import Weights, edit_tensors, write_draft, write_target
from tests.export.conftest import RECIPES, Toy, ToyBundle
from tests.export.toys import CAPACITY, empty_caches, make_sums_visible, ragged_inputs

Arrays = dict[str, NDArray[Any]]
VERIFIERS = ("verify", "verify_greedy", "verify_processed")
# Data-dependent shapes and control flow break engine builds; random operators break reproducibility.
FORBIDDEN = re.compile(
    r"NonZero|Unique|Compress|Loop|Scan|Sequence\w+|Random\w+|Multinomial|Bernoulli|Dropout"
)


def contract(bundle: Bundle) -> dict[str, GraphBindings]:
    """Bindings of every graph the bundle must have but the verifiers."""
    draft, dtype = bundle.draft, bundle.dtype
    expected = {
        "context": bindings.context_bindings(draft, dtype),
        "draft": bindings.draft_bindings(draft, dtype),
        "draft_greedy": bindings.greedy_draft_bindings(draft, dtype),
        "backbone": bindings.backbone_bindings(draft, dtype),
    }
    if draft.head_type is not HeadType.NONE:
        expected["sequential_head"] = bindings.sequential_head_bindings(draft)
    if draft.confidence is not ConfidenceInput.NONE:
        expected["confidence_head"] = bindings.confidence_head_bindings(draft)
    if bundle.target is not None:
        expected["target"] = bindings.target_bindings(bundle.target, draft.tap_size, dtype)
    return expected


def load_graph(bundle: Bundle, name: str) -> onnx.ModelProto:
    return onnx.load(bundle.graph_path(name), load_external_data=False)


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (
                *attribute.graphs,
                *([attribute.g] if attribute.HasField("g") else []),
            ):
                yield from all_nodes(graph.node)


def every_node(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    yield from all_nodes(model.graph.node)
    for function in model.functions:
        yield from all_nodes(function.node)


def described(value: onnx.ValueInfoProto) -> tuple[str, str, tuple[int | str, ...]]:
    tensor = value.type.tensor_type
    dtype = onnx.TensorProto.DataType.Name(tensor.elem_type).lower().replace("float", "float32")
    dims = tuple(d.dim_param or d.dim_value for d in tensor.shape.dim)
    return value.name, dtype.replace("float3216", "float16"), dims


def test_graphs_have_the_names_types_and_shapes_of_the_contract(toy: Toy) -> None:
    expected = contract(toy.bundle)
    assert set(toy.bundle.graph_names) == {*expected, *VERIFIERS}
    for name, graph in expected.items():
        model = load_graph(toy.bundle, name)
        for values, wanted in (
            (model.graph.input, graph.inputs),
            (model.graph.output, graph.outputs),
        ):
            assert [described(v) for v in values] == [
                (b.name, b.dtype, b.shape) for b in wanted
            ]


def test_graphs_are_valid_onnx_of_opset_24(toy: Toy) -> None:
    for name in toy.bundle.graph_names:
        onnx.checker.check_model(
            str(toy.bundle.graph_path(name)), full_check=name not in VERIFIERS
        )
        model = load_graph(toy.bundle, name)
        versions = {opset.domain: opset.version for opset in model.opset_import}
        assert versions.pop("") == 24
        assert versions in ({}, {"dspark": 1})


def test_no_operator_with_data_dependent_shape_or_randomness(toy: Toy) -> None:
    for name in toy.bundle.graph_names:
        used = {node.op_type for node in every_node(load_graph(toy.bundle, name))}
        assert not [op for op in used if FORBIDDEN.fullmatch(op)], name
        if name not in VERIFIERS:
            assert "If" not in used


def test_each_cache_is_scattered_once_and_is_an_output(toy: Toy) -> None:
    """TensorRT aliases cache input and output; it allows one update a cache and step."""
    for name in ("context", "draft", "backbone", "target"):
        if name == "target" and toy.target is None:
            continue
        graph = load_graph(toy.bundle, name).graph
        scatters = [node for node in graph.node if node.op_type == "TensorScatter"]
        pairs = [(node.input[0], node.output[0]) for node in scatters]
        caches = [value.name for value in graph.input if value.name.startswith("past_")]
        assert sorted(pairs) == sorted((c, c.replace("past", "present")) for c in caches)
        for node in graph.node:
            if node.op_type == "Attention":
                assert len(node.output) == 1  # TensorRT's parser rejects the optional outputs


def test_norms_softmax_and_tap_projection_run_in_float32(toy_bundle: ToyBundle) -> None:
    """Taps beyond 2e4 are real: nothing between them and the norm may be a float16."""
    model = ir.load(toy_bundle("rnn-borrowing-float16").bundle.graph_path("draft"))
    norms = [node for node in model.graph if node.op_type == "RMSNormalization"]
    assert norms
    for node in norms:
        assert node.attributes["stash_type"].as_int() == 1
        for value in node.inputs:
            assert value is not None
            assert value.dtype in (None, ir.DataType.FLOAT)
    (taps,) = (value for value in model.graph.inputs if value.name == "new_taps")
    assert [node.op_type for node in taps.consumers()] == ["MatMul"]
    for node in model.graph:
        if node.op_type == "Attention":
            assert node.attributes["softmax_precision"].as_int() == 1


def test_nothing_of_the_exporting_machine_is_left(toy: Toy) -> None:
    traces = re.compile(
        rb"/(tmp|home|root|usr|work|opt)/|site-packages|\.py\b|Traceback|pytest"
    )
    for file in toy.bundle.path.rglob("*"):
        if file.is_file() and file.name != "weights.bin":
            assert not (found := traces.search(file.read_bytes())), (file.name, found)


def run(path: Path, inputs: Arrays) -> Arrays:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # caches are copied here, and each time said so
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        str(path), options, providers=["CPUExecutionProvider"]
    )
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def caches_of(bundle: Bundle, batch: int, random: np.random.Generator) -> Arrays:
    shapes = bindings.cache_bindings(bundle.draft.decoder, bundle.dtype, "past")
    sizes = {"batch": batch, "capacity": CAPACITY}
    return {
        b.name: random.standard_normal(
            [d if isinstance(d, int) else sizes[d] for d in b.shape], np.float32
        ).astype(b.dtype)
        for b in shapes
    }


def block_inputs(bundle: Bundle, random: np.random.Generator) -> Arrays:
    """Three requests with 0, 1 and γ+1 new rows over 0, 9 and 20 old ones."""
    config = bundle.draft
    taps = random.standard_normal((3, config.gamma + 1, config.tap_size), np.float32)
    return {
        "anchor_ids": np.array([5, 17, 300]),
        "new_taps": taps,
        "new_len": np.array([1, 0, config.gamma + 1]),
        "context_len": np.array([0, 9, 20]),
        **caches_of(bundle, 3, random),
    }


@pytest.mark.parametrize(
    "name", [n for n, recipe in RECIPES.items() if recipe.dtype != "bfloat16"]
)
def test_the_parts_do_what_the_fused_graph_does(toy_bundle: ToyBundle, name: str) -> None:
    """backbone, then the head slot by slot, then the confidence head: a host's own loop."""
    bundle = toy_bundle(name).bundle
    config, inputs = bundle.draft, block_inputs(bundle, np.random.default_rng(3))
    greedy = {
        "temperature": np.zeros(3, np.float32),
        "uniforms": np.zeros((3, config.gamma), np.float32),
    }
    fused = run(bundle.graph_path("draft"), inputs | greedy)
    parts = run(bundle.graph_path("backbone"), inputs)
    head = bindings.sequential_head_bindings(config)
    state: Arrays = {"state": np.zeros((3, config.markov_rank), np.float32)}
    previous, before = inputs["anchor_ids"], []
    for k in range(config.gamma):
        offered = state | {
            "base_logits": parts["base_logits"][:, k],
            "previous_ids": previous,
            "hidden": parts["hidden"][:, k],
        }
        step = run(
            bundle.graph_path("sequential_head"), {n: offered[n] for n in head.input_names}
        )
        state = {"state": step.get("next_state", state["state"])}
        np.testing.assert_allclose(step["logits"], fused["logits"][:, k], atol=1e-5)
        before.append(previous)
        previous = step["logits"].argmax(-1)
        np.testing.assert_array_equal(previous, fused["tokens"][:, k])
    confident: Arrays = {"hidden": parts["hidden"], "previous_ids": np.stack(before, 1)}
    wanted = bindings.confidence_head_bindings(config).input_names
    scores = run(bundle.graph_path("confidence_head"), {n: confident[n] for n in wanted})
    np.testing.assert_allclose(
        scores["confidence_logits"], fused["confidence_logits"], atol=1e-5
    )
    for cache in bindings.cache_bindings(config.decoder, bundle.dtype, "present"):
        np.testing.assert_array_equal(parts[cache.name], fused[cache.name])


def test_prefill_then_draft_equals_one_step(toy_bundle: ToyBundle) -> None:
    """Rows through `context.onnx` or with the step: the same proposal."""
    bundle = toy_bundle("gated-in-place-llama-yarn").bundle
    random = np.random.default_rng(4)
    inputs = block_inputs(bundle, random) | {
        "temperature": np.array([0, 1, 0.5], np.float32),
        "uniforms": random.random((3, bundle.draft.gamma), np.float32),
    }
    at_once = run(bundle.graph_path("draft"), inputs)
    past = {name: value for name, value in inputs.items() if name.startswith("past_")}
    prefilled = run(
        bundle.graph_path("context"),
        past | {"taps": inputs["new_taps"], "context_len": inputs["context_len"]},
    )
    later = inputs | {name.replace("present", "past"): v for name, v in prefilled.items()}
    later["context_len"] = inputs["context_len"] + inputs["new_len"]
    later["new_len"] = np.zeros(3, np.int64)
    later["new_taps"] = np.full_like(inputs["new_taps"], 99)
    after = run(bundle.graph_path("draft"), later)
    np.testing.assert_array_equal(after["tokens"], at_once["tokens"])
    np.testing.assert_allclose(after["logits"], at_once["logits"], atol=1e-5)


def test_target_graph_taps_the_outputs_of_the_named_layers(
    toy_bundle: ToyBundle, tmp_path: Path
) -> None:
    """The exported graph with weights in which layer i adds 2^i (microsoft/onnxruntime-genai#2538)."""
    toy = toy_bundle("gated-in-place-llama-yarn")
    recipe = RECIPES["gated-in-place-llama-yarn"].target
    assert recipe is not None
    edit_tensors(write_target(tmp_path / "target", **recipe), make_sums_visible)
    checkpoint = read_target(tmp_path / "target")
    ids = toy.bundle.draft.target_layer_ids
    module = target_skeleton(checkpoint.config, ids)
    sources = parameter_sources(module, checkpoint.tensors, torch.float32)
    path = save(ir.load(toy.bundle.graph_path("target")), sources, tmp_path)
    prompts = [[3, 14, 15, 92], [7], [2, 71]]
    names = ("token_ids", "positions", "pad_index", "unpad_index", "logit_rows", "context_len")
    inputs = dict(zip(names, (t.numpy() for t in ragged_inputs(prompts)), strict=True))
    past = bindings.cache_bindings(checkpoint.config.decoder, "float32", "past")
    empty = empty_caches(checkpoint.config.decoder, len(prompts))
    inputs |= {b.name: cache.numpy() for b, cache in zip(past, empty, strict=True)}
    taps = run(path, inputs)["taps"]
    embedded = checkpoint.tensors["embed_tokens.weight"].load().numpy()[inputs["token_ids"]]
    expected = [embedded + sum(2.0**layer for layer in range(i + 1)) for i in ids]
    np.testing.assert_array_equal(taps, np.concatenate(expected, -1))


@pytest.mark.parametrize(("value", "dtype"), [(1e5, "float16"), (float("nan"), "float32")])
def test_weights_without_place_in_the_precision_are_refused(
    toy_bundle: ToyBundle, tmp_path: Path, value: float, dtype: str
) -> None:
    """Silent infinities would come out as drafts that nobody accepts."""
    recipe = RECIPES["no-head-bfloat16"].draft

    def enlarge(weights: Weights) -> None:
        weights["layers.0.mlp.up_proj.weight"][3, 5] = value

    edit_tensors(write_draft(tmp_path / "draft", **recipe), enlarge)
    checkpoint = read_draft(tmp_path / "draft")
    module = load_drafter(checkpoint)
    sources = parameter_sources(module, checkpoint.tensors, TORCH_DTYPES[dtype])
    model = ir.load(toy_bundle("no-head-bfloat16").bundle.graph_path("draft"))
    with pytest.raises(
        ExportError, match=rf"gate_up_proj.*not finite in {dtype}. Export with --dtype"
    ):
        save(model, sources, tmp_path)


def test_every_dynamic_size_may_be_one(toy_bundle: ToyBundle) -> None:
    """Export traces sizes above one; none may be baked in. No row need ask for logits either."""
    toy = toy_bundle("gated-in-place-llama-yarn")
    assert toy.target is not None
    module = load_target(toy.target, toy.bundle.draft.target_layer_ids)
    path = toy.bundle.graph_path("target")
    names = ("token_ids", "positions", "pad_index", "unpad_index", "logit_rows", "context_len")
    past = bindings.cache_bindings(toy.target.config.decoder, "float32", "past")
    caches = empty_caches(toy.target.config.decoder, 1)
    ones = ragged_inputs([[9]])
    for rows in (ones[4], torch.zeros(0, dtype=torch.int64)):
        tensors = (*ones[:4], rows, ones[5])
        inputs = dict(zip(names, (t.numpy() for t in tensors), strict=True))
        inputs |= {b.name: cache.numpy() for b, cache in zip(past, caches, strict=True)}
        outputs = run(path, inputs)
        with torch.inference_mode():
            logits, taps, *_ = module(*tensors, *(cache.clone() for cache in caches))
        np.testing.assert_allclose(outputs["logits"], logits.numpy(), atol=1e-5)
        np.testing.assert_allclose(outputs["taps"], taps.numpy(), atol=1e-5)


def save(model: ir.Model, sources: dict[str, ParameterSource], folder: Path) -> Path:
    with (folder / "weights.bin").open("wb") as stream:
        WeightFile(stream, "weights.bin", lambda _: None).attach(model, sources)
    path = folder / "graph.onnx"
    path.write_bytes(ir.to_proto(add_dspark_functions(model)).SerializeToString())
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "confidence"),
    [
        ("none", "none"),
        ("vanilla", "none"),
        ("vanilla", "hidden"),
        ("gated", "none"),
        ("gated", "hidden+markov"),
        ("rnn", "none"),
        ("rnn", "hidden"),
    ],
)
def test_the_fused_graph_of_the_other_pairs_of_heads(
    tmp_path: Path, head: str, confidence: str
) -> None:
    """The pairs that no shared bundle has: graph against the module with the checkpoint's weights."""
    checkpoint = read_draft(
        write_draft(tmp_path / "draft", head=head, confidence=confidence, layers=1, gamma=2)
    )
    drafter = load_drafter(checkpoint)
    graph = next(graph for graph in draft_graphs(drafter, "float32") if graph.name == "draft")
    sources = parameter_sources(drafter, checkpoint.tensors, torch.float32)
    path = save(onnx_from_module(graph), sources, tmp_path)
    random, gamma = np.random.default_rng(1), checkpoint.config.gamma
    inputs: Arrays = {
        "anchor_ids": np.array([5, 17]),
        "new_taps": random.standard_normal(
            (2, gamma + 1, checkpoint.config.tap_size), np.float32
        ),
        "new_len": np.array([1, 3]),
        "context_len": np.array([12, 0]),
        "temperature": np.array([0, 1], np.float32),
        "uniforms": random.random((2, gamma), np.float32),
    }
    decoder = checkpoint.config.decoder
    shape = (2, decoder.num_kv_heads, CAPACITY, decoder.head_dim)
    for cache in bindings.cache_bindings(decoder, "float32", "past"):
        inputs[cache.name] = random.standard_normal(shape, np.float32)
    outputs = run(path, inputs)
    with torch.inference_mode():
        expected = drafter(
            *(torch.from_numpy(inputs[n].copy()) for n in graph.bindings.input_names)
        )
    for name, value in zip(graph.bindings.output_names, expected, strict=True):
        np.testing.assert_allclose(outputs[name], value.numpy(), atol=1e-5, err_msg=name)


def test_passes_find_nothing_to_do_a_second_time(toy: Toy) -> None:
    model = ir.load(toy.bundle.graph_path("draft"))
    assert fold_weight_transposes(model) == 0
    assert drop_unused_outputs(model) == 0


def linear_model() -> ir.Model:
    """Y = x · Wᵀ with W [3, 2], used twice, and a Split whose last output nobody reads."""
    text = """
        <ir_version: 10, opset_import: ["" : 24]>
        linear (float[n, 2] x, float[3, 2] w) => (float[n, 3] y, float[n, 3] z, float[n, 1] a) {
            wt = Transpose<perm = [1, 0]>(w)
            y = MatMul(x, wt)
            ww = Transpose<perm = [1, 0]>(w)
            z = MatMul(x, ww)
            a, b = Split<num_outputs = 2, axis = 1>(x)
        }
    """
    model = ir.from_proto(onnx.parser.parse_model(text))
    weight = model.graph.inputs.pop()
    weight.const_value = ir.tensor(np.arange(6, dtype=np.float32).reshape(3, 2), name="w")
    model.graph.initializers.add(weight)
    return model


def test_transposed_weights_are_folded_once_with_their_values() -> None:
    model = linear_model()
    assert fold_weight_transposes(model) == 2
    (folded,) = model.graph.initializers.values()
    assert folded.name == "w.T"
    assert folded.const_value is not None
    np.testing.assert_array_equal(
        folded.const_value.numpy(), np.arange(6, dtype=np.float32).reshape(3, 2).T
    )
    assert [node.op_type for node in model.graph] == ["MatMul", "MatMul", "Split"]


def test_only_trailing_unread_outputs_are_dropped() -> None:
    model = linear_model()
    assert drop_unused_outputs(model) == 1
    (split,) = (node for node in model.graph if node.op_type == "Split")
    assert [value.name for value in split.outputs] == ["a"]


def test_outputs_that_an_operator_must_have_stay() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 24]>
    g (float[4] x, int64[1] k) => (float[1] best) { best, unread = TopK(x, k) }
    """
    model = ir.from_proto(onnx.parser.parse_model(text))
    assert drop_unused_outputs(model) == 0
