# SPDX-License-Identifier: Apache-2.0
"""`export --weights`: matrices of few bits, what onnxruntime makes of them, and what they are refused for."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from filelock import FileLock
from onnx import TensorProto, helper, numpy_helper

from dspark_trt.block_weights import block_size, pack, packed_shapes, unpack
from dspark_trt.bundle import MANIFEST, Bundle, load_bundle
from dspark_trt.checkpoint import read_draft, read_target
from dspark_trt.config import WEIGHT_BITS
from dspark_trt.errors import ExportError
from dspark_trt.export.bundle_from_checkpoints import export_bundle
from dspark_trt.export.parity import check_parity
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.request import Request, SamplingParams
from tests.checkpoints import write_draft, write_target
from tests.plugins.cases import session_of

PRODUCTS = {"draft": 2 * 5 + 1 + 4, "target": 4 * 4 + 1, "context": 2, "sequential_head": 1}


@pytest.fixture(scope="module")
def exported(shared_folder: Path) -> dict[str, Bundle]:
    """A toy drafter (two layers, γ = 4) and its target (four layers, biases), with int8 matrices here and there."""
    folder = shared_folder / "toy-int8"
    kinds = ("both", "draft")
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            target = read_target(
                write_target(
                    folder / "checkpoint" / "target", attention_bias=True, family="llama"
                )
            )
            draft = read_draft(write_draft(folder / "checkpoint" / "draft"))
            for kind in kinds:
                export_bundle(
                    draft,
                    target,
                    folder / kind,
                    weights="int8" if kind == "both" else None,
                    draft_weights="int8" if kind == "draft" else None,
                )
    return {kind: load_bundle(folder / kind, verify_hashes=False) for kind in kinds}


@pytest.fixture(scope="module")
def quantised(exported: dict[str, Bundle]) -> Bundle:
    return exported["both"]


@pytest.mark.parametrize("bits", WEIGHT_BITS.values())
@pytest.mark.parametrize("inputs", [32, 40, 96, 256, 576])
def test_kernels_multiply_with_what_unpack_says(inputs: int, bits: int) -> None:
    """Without rounding of the inputs (`accuracy_level` 0) the two differ by the order of sums only."""
    rng = np.random.default_rng(inputs)
    matrix = rng.standard_normal((50, inputs), np.float32)
    matrix[3] = 0
    packed, scales = pack(matrix, bits)
    assert (packed.shape, scales.shape) == packed_shapes(50, inputs, bits)
    attributes: dict[str, Any] = {
        "K": inputs,
        "N": 50,
        "bits": bits,
        "block_size": block_size(inputs, bits),
    }
    graph = helper.make_graph(
        [
            helper.make_node(
                "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", **attributes
            )
        ],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("rows", inputs))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("rows", 50))],
        [numpy_helper.from_array(packed, "w"), numpy_helper.from_array(scales, "s")],
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    x = rng.standard_normal((5, inputs), np.float32)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    (y,) = session_of(model).run(None, {"x": x})
    rounded = unpack(packed, scales, inputs)
    np.testing.assert_allclose(y, x @ rounded.T, atol=1e-3)
    step = np.abs(scales).repeat(block_size(inputs, bits), axis=1)[:, :inputs]
    assert (np.abs(rounded - matrix) <= step * 1.001).all()
    assert np.abs(rounded - matrix).mean() < 0.3 * step.mean()


def test_products_are_quantised_and_stored_once(quantised: Bundle) -> None:
    assert quantised.weights == "int8"
    places = Counter[str]()
    for graph, expected in PRODUCTS.items():
        model = onnx.load(quantised.graph_path(graph), load_external_data=False)
        nodes = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
        assert len(nodes) == expected, graph
        for tensor in model.graph.initializer:
            if tensor.name.endswith(".packed") and tensor.external_data:
                places[{e.key: e.value for e in tensor.external_data}["offset"]] += 1
    assert max(places.values()) > 1  # the context graph's products are the draft step's


@pytest.mark.parametrize("kind", ["both", "draft"])
def test_graphs_agree_with_the_matrices_that_the_bits_stand_for(
    exported: dict[str, Bundle], kind: str
) -> None:
    failed = [result for result in check_parity(exported[kind]) if not result.passed]
    assert not failed


def test_a_drafter_of_few_bits_leaves_the_target_as_it_is(exported: dict[str, Bundle]) -> None:
    """Its graph has no product of few bits, and parity holds it to the tolerance of float32."""
    bundle = exported["draft"]
    assert bundle.precision == {
        "dtype": "float32",
        "weights": "float32",
        "draft_weights": "int8",
    }
    for graph, count in (PRODUCTS | {"target": 0}).items():
        model = onnx.load(bundle.graph_path(graph), load_external_data=False)
        assert sum(node.op_type == "MatMulNBits" for node in model.graph.node) == count, graph


def test_manifests_from_before_drafters_had_their_own_weights_mean_both(
    quantised: Bundle, tmp_path: Path
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(quantised.path, folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["draft_weights"]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert load_bundle(folder).draft_weights == "int8"


def test_a_row_s_result_does_not_depend_on_its_company(quantised: Bundle) -> None:
    """Greedy text is the same token by token and in blocks, alone and in a batch."""
    prompts = [tuple(range(3, 3 + n)) for n in (9, 14, 20)]
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    with Engine.load(quantised, options=EngineOptions(max_batch=3)) as engine:
        together = engine.generate([Request(prompt_ids=p, params=params) for p in prompts])
    with Engine.load(quantised, options=EngineOptions(max_batch=1)) as engine:
        alone = engine.generate(
            [Request(prompt_ids=p, params=params, speculate=False) for p in prompts]
        )
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


def test_what_has_no_kernel_is_refused(tmp_path: Path) -> None:
    draft = read_draft(write_draft(tmp_path / "draft"))
    with pytest.raises(
        ExportError, match=r"--weights int4 goes with --dtype float32.*TensorRT"
    ):
        export_bundle(draft, None, tmp_path / "bundle", weights="int4", dtype="float16")
    with pytest.raises(ExportError, match=r"--draft-weights int8 goes with --dtype float32"):
        export_bundle(draft, None, tmp_path / "b", draft_weights="int8", dtype="bfloat16")
    with pytest.raises(ExportError, match=r"weights 'int3' is not one of int8, int4"):
        export_bundle(draft, None, tmp_path / "bundle", weights="int3")
    assert not (tmp_path / "bundle").exists()
