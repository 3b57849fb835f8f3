# SPDX-License-Identifier: Apache-2.0
"""`export --fused-verify`: a target graph that returns verified tokens instead of logits."""

from pathlib import Path

import onnx

from dspark_trt.bundle import load_bundle
from dspark_trt.checkpoint import read_draft, read_target
from dspark_trt.export.bundle_from_checkpoints import export_bundle
from dspark_trt.export.parity import check_parity
from tests.checkpoints import write_draft, write_target


def test_the_fused_target_verifies_its_own_logits(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    draft = write_draft(tmp_path / "draft")
    path = tmp_path / "bundle"
    export_bundle(read_draft(draft), read_target(target), path, fused_verify=True)
    results = [r for r in check_parity(load_bundle(path)) if r.name == "target_verify"]
    assert {"accepted", "tokens", "taps"} < {r.output for r in results}
    assert all(result.passed for result in results)
    outputs = {o.name for o in onnx.load(path / "target_verify.onnx").graph.output}
    assert "logits" not in outputs
    weights = path / "weights.bin"
    stored = onnx.load(path / "target_verify.onnx", load_external_data=False).graph.initializer
    locations = {e.value for t in stored for e in t.external_data if e.key == "location"}
    assert locations == {weights.name}  # shared with the other graphs
