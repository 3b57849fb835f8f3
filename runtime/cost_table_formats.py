# SPDX-License-Identifier: Apache-2.0
"""Cost tables as SGLang and TensorRT-LLM write them.

| spelling | meaning |
|---|---|
| SGLang flat | ``sample_batch_tokens[n]``, ``sample_steps_per_sec[n]``, ``max_batch_tokens`` |
| SGLang additive | seconds = ``bias_seconds`` + ``alpha_seconds(bs_probes)`` + ``theta_seconds(m_probes)`` |
| TensorRT-LLM curve | ms = ``fixed_overhead_ms`` + ``batch_overhead_ms(batch_sizes)`` + ``step_time_ms(token_counts)`` |
| TensorRT-LLM cells | ``schema_version`` 2: per graph batch size G, whole steps at V tokens; V = 0: G full blocks |

In all of them α depends on the requests, θ on the tokens. α is what ``CostTable`` calls
``draft_seconds``: the part of a round that verification length cannot change. Points are read as
measured and linear in between; SGLang's own look-up takes the point below, which makes tokens look
free right before the next one.

The cell spelling is read, for one G, and not written: its fingerprint describes a TensorRT-LLM engine.
"""

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.errors import TableError
from dspark_trt.runtime import cost_table, round_costs
from dspark_trt.runtime.cost_model import CostModel
from dspark_trt.runtime.cost_table import CostTable
from dspark_trt.runtime.round_costs import RoundCosts

Floats = NDArray[np.float64]


def load_cost_table(path: Path, *, graph_requests: int | None = None) -> CostModel:
    """Read one of our own formats or any of the spellings above, told apart by their keys.

    ``graph_requests`` picks G of a cell table that holds several. Raises TableError otherwise.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TableError(f"cannot read cost table {path}: {error}") from error
    if not isinstance(data, dict):
        raise TableError(f"{path} must hold a JSON object, got {type(data).__name__}")
    readers: dict[str, Callable[[Mapping[str, Any]], CostTable]] = {
        "sample_batch_tokens": _from_sglang_flat,
        "bias_seconds": _from_sglang_additive,
        "cost_tables": lambda cells: _from_trtllm_cells(cells, graph_requests),
        "token_counts": _from_trtllm_curve,
    }
    try:
        if data.get("format") == cost_table.FORMAT:
            return CostTable.from_json(data)
        if data.get("format") == round_costs.FORMAT:
            return RoundCosts.from_json(data)
        for key, read in readers.items():
            if key in data:
                return read(data)
    except (
        TableError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
    ) as error:
        said = error if isinstance(error, TableError) else TableError(repr(error))
        raise TableError(f"cost table {path} is malformed: {said.reason}", said.mend) from error
    raise TableError(
        f"{path} is no cost table: expected format {round_costs.FORMAT!r}, {cost_table.FORMAT!r} or one of {', '.join(readers)}, "
        f"got keys {sorted(data)}"
    )


def sglang_flat(table: CostTable, *, context_tokens: float | None = None) -> dict[str, Any]:
    """Whole steps by tokens; the draft cost that depends on requests alone is lost."""
    seconds = _at_points(table, context_tokens)
    return {
        "sample_batch_tokens": table.tokens.tolist(),
        "sample_steps_per_sec": (1.0 / seconds).tolist(),
        "max_batch_tokens": table.max_tokens,
    }


def sglang_additive(table: CostTable, *, context_tokens: float | None = None) -> dict[str, Any]:
    """Bias is the cheapest step; θ what more tokens add to it, α the draft cost."""
    seconds = _at_points(table, context_tokens)
    requests, draft = _draft_points(table)
    return {
        "bias_seconds": float(seconds[0]),
        "bs_probes": requests,
        "alpha_seconds": draft,
        "m_probes": table.tokens.tolist(),
        "theta_seconds": (seconds - seconds[0]).tolist(),
    }


def trtllm_curve(
    table: CostTable, *, min_gain: float, context_tokens: float | None = None
) -> dict[str, Any]:
    """Whole steps as θ, the draft cost as batch overhead; ``min_gain`` travels with the table."""
    requests, draft = _draft_points(table)
    return {
        "token_counts": table.tokens.tolist(),
        "step_time_ms": (1e3 * _at_points(table, context_tokens)).tolist(),
        "fixed_overhead_ms": 0.0,
        "batch_sizes": requests,
        "batch_overhead_ms": [1e3 * seconds for seconds in draft],
        "minimum_predicted_gain": min_gain,
    }


def _at_points(table: CostTable, context_tokens: float | None) -> Floats:  # [n]
    curve = table.seconds(0, table.max_tokens, context_tokens=context_tokens)
    return np.asarray(curve[table.tokens])


def _draft_points(table: CostTable) -> tuple[list[int], list[float]]:
    if not table.requests.size:
        return [1], [0.0]
    return table.requests.tolist(), table.draft_seconds.tolist()


def _from_sglang_flat(data: Mapping[str, Any]) -> CostTable:
    return CostTable(data["sample_batch_tokens"], data["sample_steps_per_sec"], padded=False)


def _from_sglang_additive(data: Mapping[str, Any]) -> CostTable:
    return _additive(
        float(data["bias_seconds"]),
        data["m_probes"], np.asarray(data["theta_seconds"], dtype=np.float64),
        data["bs_probes"], np.asarray(data["alpha_seconds"], dtype=np.float64),
    )  # fmt: skip


def _from_trtllm_curve(data: Mapping[str, Any]) -> CostTable:
    return _additive(
        1e-3 * float(data.get("fixed_overhead_ms", 0.0)),
        data["token_counts"], 1e-3 * np.asarray(data["step_time_ms"], dtype=np.float64),
        data.get("batch_sizes", ()), 1e-3 * np.asarray(data.get("batch_overhead_ms", ()), np.float64),
    )  # fmt: skip


def _additive(
    bias: float, tokens: Any, theta: Floats, requests: Any, alpha: Floats
) -> CostTable:
    seconds = bias + theta
    if not np.all(seconds > 0):
        raise TableError(
            f"a step of the cost table takes {seconds.min()} s, expected more than 0"
        )
    return CostTable(
        tokens, 1.0 / seconds, requests=requests, draft_seconds=alpha, padded=False
    )


def _from_trtllm_cells(data: Mapping[str, Any], graph_requests: int | None) -> CostTable:
    fingerprint = data["engine_fingerprint"]
    canonical = json.dumps(fingerprint, sort_keys=True, separators=(",", ":"))
    if sha256(canonical.encode()).hexdigest() != data["engine_fingerprint_sha256"]:
        raise TableError("engine_fingerprint_sha256 does not match engine_fingerprint")
    cells = {int(requests): cell for requests, cell in data["cost_tables"].items()}
    if graph_requests is None and len(cells) == 1:
        graph_requests = next(iter(cells))
    if graph_requests not in cells:
        raise TableError(
            f"the table has cells for {sorted(cells)} requests, asked for {graph_requests}"
        )
    tokens = list(cells[graph_requests]["token_counts"])
    milliseconds = list(cells[graph_requests]["step_time_ms"])
    if not tokens or tokens[0] != 0:
        raise TableError(f"cells of {graph_requests} requests lack V = 0, the full block")
    full = graph_requests * (int(fingerprint["max_draft_len"]) + 1)
    by_tokens = dict(zip(tokens[1:], milliseconds[1:], strict=True)) | {full: milliseconds[0]}
    sizes = sorted(by_tokens)
    origin = {key: str(fingerprint[key]) for key in ("gpu", "source_head", "topology")}
    return CostTable(sizes, [1e3 / by_tokens[size] for size in sizes], origin=origin)
