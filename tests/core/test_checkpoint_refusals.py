# SPDX-License-Identifier: Apache-2.0
"""Every wrong setting, in every dialect, gets one sentence: the key, its value, what was expected, and a flag.

The flag is then used as the sentence says, and the drafter must be read as if its file were right.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark_trt.checkpoint import (
    DraftCheckpoint,
    DraftOverrides,
    check_pair,
    read_draft,
    read_target,
)
from dspark_trt.checkpoint.convert import convert_draft
from dspark_trt.errors import CheckpointError
from tests.checkpoints import (
    EAGLE3_LAYOUTS,
    LAYOUTS,
    edit_config,
    edit_tensors,
    write_draft,
    write_eagle3_draft,
    write_gemma_draft,
    write_gemma_target,
    write_target,
)
from tests.checkpoints_deepseek import write_deepseek_draft
from tests.checkpoints_mtp import write_mtp

IDS = (0, 2)  # layers that all writers tap
WRITERS: dict[str, Callable[[Path], Path]] = {
    **{layout: partial(write_draft, layout=layout) for layout in LAYOUTS},
    **{
        f"eagle3-{layout}": partial(write_eagle3_draft, layout=layout)
        for layout in EAGLE3_LAYOUTS
    },
    "gemma4": write_gemma_draft,
    "deepseek-v4": partial(write_deepseek_draft, target_layer_ids=IDS),
    "mtp": write_mtp,
}
SPELLINGS = {
    "enable_confidence_head": ("use_confidence_head",),
    "mask_token_id": ("noise_token_id",),
    "target_layer_ids": ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"),
}
STEPS = {"eagle3-authors": 4}  # which this layout does not record
# Another meaning, or another sentence, under the same key.
ELSEWHERE = {("gemma4", "rope_theta"), ("deepseek-v4", "num_hidden_layers")}
WITHOUT_DEPTH = {
    "mtp",
    "speculators",
    "eagle3-authors",
    "eagle3-speculators",
}  # only the target tells

# key, wrong value (None: the key is gone), what the sentence expects instead
WRONG: list[tuple[str, Any, str]] = [
    ("hidden_size", "64", "expected an integer"),
    ("num_attention_heads", 0, "expected at least 1"),
    ("num_hidden_layers", 5000, "expected at (most|model.layers)|with 1 layer"),
    ("vocab_size", None, "is missing"),
    ("rms_norm_eps", "small", "expected a finite number"),
    ("rms_norm_eps", 10**400, "expected a finite number"),
    ("hidden_act", "gelu", "only 'silu'"),
    ("rope_theta", None, "is missing"),
    ("max_position_embeddings", True, "expected an integer"),
    ("layer_types", ["linear_attention"], "only 'full_attention'|'full_attention' (only|and)"),
    ("block_size", 0, "proposes no token"),
    ("num_target_layers", 0, "at least 1"),
    ("target_layer_ids", [3, 1], "not strictly increasing"),
    ("target_layer_ids", "all", "expected a list of integers"),
    ("mask_token_id", 100_000, "outside the embedding of"),
    ("mask_token_id", None, "is missing"),
    ("markov_rank", -1, "expected (0 or more|at least 1)"),
    ("markov_head_type", "tree", "expected vanilla, gated or rnn"),
    ("enable_confidence_head", "yes", "expected true or false"),
    ("enable_confidence_head", False, "but the files hold confidence"),
    ("sample_from_anchor", "no", "expected true or false"),
    ("shift_label", 1, "expected true or false"),
    ("draft_vocab_size", 100_000, "expected 1 to vocab_size"),
    ("norm_before_residual", 0, "expected true or false"),
    ("attention_k_eq_v", None, "is missing"),
    ("final_logit_softcapping", -1, "expected a positive number"),
    ("n_routed_experts", 10**9, "beyond|expected 1 to"),
    ("intermediate_size", 2**31, "expected at most 2147483647"),
    ("qk_nope_head_dim", 10**400, "expected at most 2147483647"),
    ("hc_sinkhorn_iters", 10**6, "expected at most 100"),
]


def places(config: dict[str, Any], key: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Where a config.json has a setting, under which name."""
    names = [key, *SPELLINGS.get(key, ())]
    for name in [*names, *(f"dspark_{name}" for name in names)]:
        for place in (config, *(value for value in config.values() if isinstance(value, dict))):
            if name in place:
                yield place, name


def written(folder: Path, name: str) -> tuple[Path, dict[str, Any]]:
    path = WRITERS[name](folder)
    return path, json.loads((path / "config.json").read_text())


def of(name: str) -> DraftOverrides:
    return DraftOverrides(gamma=STEPS.get(name))


def as_the_sentence_says(text: str, overrides: DraftOverrides, right: Any) -> DraftOverrides:
    """The flag at the end of a sentence, with the right value."""
    flag = re.search(r"\(override: (--[^()]*)\)|give it with (--[\w-]+)", text)
    assert flag is not None, text
    name, _, rest = (flag[1] or flag[2]).partition(" ")
    match name:
        case "--mask-token-id":
            return replace(overrides, mask_token_id=right)
        case "--target-layer-ids":
            return replace(overrides, target_layer_ids=IDS)
        case "--set":
            return replace(overrides, settings={rest.partition("=")[0]: right})
    raise AssertionError(text)


def refusal(
    path: Path,
    config: dict[str, Any],
    found: list[tuple[dict[str, Any], str]],
    wrong: Any,
    overrides: DraftOverrides,
) -> tuple[str, Any]:
    """What is said of a wrong value in all these places, and the right one."""
    for place, spelling in found:
        right = place[spelling]
        place[spelling] = wrong
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        read_draft(path, overrides=overrides)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"{path / 'config.json'}: ")
    return text, right


def shown(wrong: Any) -> str:
    """A list of one is shown by its element; true and false are JSON's or Python's."""
    is_single = isinstance(wrong, list) and len(wrong) == 1
    return str(wrong[0] if is_single else wrong).lower()


@pytest.mark.parametrize("name", sorted(WRITERS.keys() - WITHOUT_DEPTH))
def test_layers_beyond_the_target(tmp_path: Path, name: str) -> None:
    path, config = written(tmp_path / "draft", name)
    found = list(places(config, "target_layer_ids"))
    text, _ = refusal(path, config, found, [1, 40], of(name))
    assert re.search(r"\[1, 40\] must lie in -1..[23] for a target of 4 layers", text)
    overrides = as_the_sentence_says(text, of(name), list(IDS))
    assert read_draft(path, overrides=overrides).config.target_layer_ids == IDS


@pytest.mark.parametrize(("key", "wrong", "expectation"), WRONG)
@pytest.mark.parametrize("name", WRITERS)
def test_a_wrong_setting(
    tmp_path: Path, name: str, key: str, wrong: Any, expectation: str
) -> None:
    path, config = written(tmp_path / "draft", name)
    sound = read_draft(path, overrides=of(name))
    found = list(places(config, key))
    if (name, key) in ELSEWHERE or not found:
        assert (name, key) in ELSEWHERE or f'"{key}"' not in json.dumps(config)
        return
    text, right = refusal(path, config, found, wrong, of(name))
    assert any(spelling in text for spelling in (key, *(spelling for _, spelling in found)))
    assert wrong is None or shown(wrong) in text.lower()
    assert re.search(expectation, text)
    mended = read_draft(path, overrides=as_the_sentence_says(text, of(name), right))
    assert mended.config == sound.config
    assert mended.tensors.keys() == sound.tensors.keys()


@pytest.mark.parametrize(
    ("layout", "changes", "nested", "settings"),
    [
        ("zlab-dflash", {"block_size": 9}, "dflash_config", {"block_size": 5}),
        ("specforge", {"markov_rank": 8}, None, {"markov_rank": 16}),
        ("deepspec", {"dflash_config": {"use_swa": True}}, None, {"use_swa": None}),
        ("deepspec", {"rope_parameters": {"rope_theta": 5.0}}, None, {"rope_parameters": None}),
        ("deepspec", {"rope_scaling": {"type": "yarn"}}, None, {"rope_scaling": None}),
        ("deepspec", {"rope_scaling": {"type": "longrope"}}, None, {"rope_scaling": None}),
        ("speculators", {"markov_rank": 8}, None, {"markov_rank": 16}),  # not that of the tensors
        ("model-optimizer", {"hidden_size": 32}, None, {"hidden_size": 64}),
        ("deepspec", {"num_hidden_layers": 3}, None, {"num_hidden_layers": 2}),
        ("deepspec", {"confidence_head_with_markov": False}, None,
         {"confidence_head_with_markov": True}),
    ],
)  # fmt: skip
def test_contradictions(
    tmp_path: Path,
    layout: str,
    changes: dict[str, Any],
    nested: str | None,
    settings: dict[str, Any],
) -> None:
    path = write_draft(tmp_path / "draft", layout=layout)
    sound = read_draft(path)
    edit_config(path, changes, nested=nested)
    with pytest.raises(CheckpointError, match=r"\(override: --set \w+=VALUE\)") as caught:
        read_draft(path)
    assert "\n" not in str(caught.value)
    assert read_draft(path, overrides=DraftOverrides(settings=settings)).config == sound.config


def test_pairs_that_do_not_fit(tmp_path: Path) -> None:
    """What only the target shows names the drafter's flags too."""
    target = read_target(write_target(tmp_path / "target"))
    path = write_draft(tmp_path / "draft", config={"num_target_layers": 6})
    with pytest.raises(
        CheckpointError, match=r"num_target_layers of the drafter is 6, but"
    ) as caught:
        check_pair(read_draft(path), target)
    assert "(override: --set num_target_layers=VALUE)" in str(caught.value)
    settings = DraftOverrides(settings={"num_target_layers": 4})
    check_pair(read_draft(path, overrides=settings), target)
    silent = write_draft(
        tmp_path / "speculators", layout="speculators", target_layer_ids=(0, 5)
    )
    with pytest.raises(CheckpointError, match=r"\[0, 5\] must lie in.*--target-layer-ids I,J"):
        check_pair(read_draft(silent), target)


def test_stop_tokens_of_another_file_can_be_stated(tmp_path: Path) -> None:
    path = write_target(tmp_path / "target", stop_token_ids=(1, 4000))
    with pytest.raises(
        CheckpointError, match=r"generation_config.json: eos_token_id 4000 .*--set target\.eos"
    ):
        read_target(path)
    assert read_target(path, settings={"eos_token_id": 2}).config.stop_token_ids == (2,)


def test_what_no_setting_mends_names_no_flag(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", layout="speculators", drafted=(1, 4, 9, 300))
    edit_tensors(path, lambda w: w.update({"t2d": torch.ones(320, dtype=torch.bool)}))
    with pytest.raises(CheckpointError, match=r"maps come from different files$"):
        read_draft(path)


def test_misspelt_settings_are_refused(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft")
    overrides = DraftOverrides(settings={"markov_rnak": 16, "markov_rank": 16})
    with pytest.raises(CheckpointError, match="--set markov_rnak: no setting of this format"):
        read_draft(path, overrides=overrides)


@pytest.mark.parametrize("name", sorted(WRITERS.keys() - {"mtp"}))  # which taps the final norm
def test_tapped_layers_can_be_stated(tmp_path: Path, name: str) -> None:
    """In one convention for all: a file that counts in another is contradicted, and says so."""
    path, config = written(tmp_path / "draft", name)
    other = (-1, 1)
    read = read_draft(path, overrides=replace(of(name), target_layer_ids=other))
    assert read.config.target_layer_ids == other
    decided = next(item for item in read.decisions if item.name == "target_layer_ids")
    assert (decided.value, decided.reason[:9]) == (list(other), "asked for")
    assert any("tapped layers [-1, 1] as asked; " in text for text in read.warnings)
    with pytest.raises(
        CheckpointError, match=r"target_layer_ids \[2, 1\] \(asked for\) is not"
    ):
        read_draft(path, overrides=replace(of(name), target_layer_ids=(2, 1)))
    for place, spelling in places(config, "target_layer_ids"):
        del place[spelling]
    (path / "config.json").write_text(json.dumps(config))
    if name != "zlab-dflash":  # which has a default
        with pytest.raises(CheckpointError, match=r"is missing.*--target-layer-ids I,J"):
            read_draft(path, overrides=of(name))
    silent = read_draft(path, overrides=replace(of(name), target_layer_ids=IDS))
    assert silent.config.target_layer_ids == IDS
    assert not any("as asked" in text for text in silent.warnings)


def test_stated_settings_reach_a_converted_drafter(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", config={"rope_theta": None})
    settings = {"rope_theta": 10_000.0}
    draft: DraftCheckpoint = read_draft(path, overrides=DraftOverrides(settings=settings))
    copy = convert_draft(draft, tmp_path / "copy", to="speculators", settings=settings)
    assert copy.config.decoder == draft.config.decoder


def test_flags_of_the_command_line(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from dspark_trt.cli import build_app

    path = write_eagle3_draft(
        tmp_path / "draft", layout="authors", config={"eagle_config": None}
    )

    def inspect(*flags: str) -> Any:
        command = ["inspect", str(path), "--json", "--gamma", "3", *flags]
        result = CliRunner().invoke(build_app(), command)
        if result.exception is not None:
            raise result.exception
        return json.loads(result.stdout)["decisions"]

    with pytest.raises(
        CheckpointError, match=r"is missing.*\(override: --target-layer-ids I,J,"
    ):
        inspect()
    assert inspect("--target-layer-ids", "0,2")["target_layer_ids"]["value"] == [0, 2]
    stated = inspect(
        "--set", "eagle_aux_hidden_state_layer_ids=[1,3]", "--set", "hidden_act=silu"
    )
    assert stated["target_layer_ids"]["value"] == [0, 2]
    for flags, text in (
        (("--target-layer-ids", "0;2"), "expected layers such as 1,9,17"),
        (("--set", "markov_rank"), "expected KEY=VALUE"),
    ):
        with pytest.raises(CheckpointError, match=text):
            inspect(*flags)


@pytest.mark.parametrize(
    ("key", "wrong", "expectation"),
    [
        *(case for case in WRONG if case[0] not in ("num_hidden_layers", "hidden_act")),
        ("num_hidden_layers", 5000, "expected at most 1000"),
        ("model_type", "mamba", "supported: qwen2, qwen3"),
        ("eos_token_id", 4000, "not a token of the vocabulary of 320"),
        ("tie_word_embeddings", "no", "expected true or false"),
        ("num_kv_shared_layers", 2, "only 0"),
        ("moe_intermediate_size", None, "is missing"),
        ("decoder_sparse_step", 0, "expected at least 1"),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe", "llama", "gemma4"])
def test_a_wrong_setting_of_a_target(
    tmp_path: Path, family: str, key: str, wrong: Any, expectation: str
) -> None:
    write = write_gemma_target if family == "gemma4" else partial(write_target, family=family)
    path = write(tmp_path / "target")
    (path / "generation_config.json").unlink()  # which says another time where text ends
    config = json.loads((path / "config.json").read_text())
    sound = read_target(path)
    if key not in config or (family == "gemma4" and key == "rope_theta"):
        return
    right, config[key] = config[key], wrong
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        read_target(path)
    text = str(caught.value)
    assert "\n" not in text
    assert key in text
    assert wrong is None or shown(wrong) in text.lower()
    assert re.search(expectation, text)
    assert re.search(rf"\(override: --set target\.({key}|KEY)=VALUE\)", text)
    assert read_target(path, settings={key: right}).config == sound.config
    with pytest.raises(CheckpointError, match=r"--set target\.keey: no setting"):
        read_target(path, settings={key: right, "keey": 1})
