# SPDX-License-Identifier: Apache-2.0
"""Which format a drafter is written in, told by its keys and tensor names.

``architectures`` is never asked: the same string names different layouts (vllm-project/vllm#52197).
A dialect is little more than a renaming of tensors; the head mathematics is the same in all of them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dspark_trt.checkpoint.fields import Fields
from dspark_trt.errors import CheckpointError

_HEAD_KEYS = (
    "markov_rank", "markov_head_type", "enable_confidence_head", "use_confidence_head",
    "confidence_head_with_markov",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one format names things.

    ``prefixes`` maps the start of a tensor's name in the file to the canonical one; ``unused`` are
    tensors that only training reads.
    """

    name: str
    prefixes: Mapping[str, str]
    unused: frozenset[str] = frozenset()

    def canonical(self, key: str) -> str:
        for prefix, replacement in self.prefixes.items():
            if key.startswith(prefix):
                return replacement + key.removeprefix(prefix)
        return key

    def stored(self, name: str) -> str:
        """The inverse of ``canonical``."""
        for prefix, replacement in self.prefixes.items():
            if name.startswith(replacement):
                return prefix + name.removeprefix(replacement)
        return name


DEEPSPEC = Dialect(name="deepspec", prefixes={})
SPECFORGE = Dialect(name="specforge", prefixes={})
ZLAB_DFLASH = Dialect(name="zlab-dflash", prefixes={})
SPECULATORS = Dialect(
    name="speculators",
    prefixes={},
    unused=frozenset({"verifier_lm_head.weight", "verifier_norm.weight"}),
)
MODEL_OPTIMIZER = Dialect(
    name="model-optimizer",
    prefixes={
        "markov_w1.": "markov_head.markov_w1.",
        "markov_w2.": "markov_head.markov_w2.",
        "gate_proj.": "markov_head.gate_proj.",
        "joint_proj.": "markov_head.joint_proj.",
        "confidence_proj.": "confidence_head.proj.",
    },
)

DEEPSEEK_V4 = Dialect(name="deepseek-v4", prefixes={})  # read by a module of its own

# Layouts with other mathematics: name -> does this tensor give it away?
_REFUSED: dict[str, Callable[[str], bool]] = {
    "mtp": lambda key: key.startswith("mtp."),
    "DFlash2": lambda key: key.startswith(("dflash.conv_", "selector_")),
}  # fmt: skip


def recognise(fields: Fields, keys: Iterable[str]) -> tuple[Dialect, str]:
    """The dialect of a drafter and what shows it.

    Raises:
        CheckpointError: a layout that is known but not supported, by name; or no drafter at all.
    """
    names = frozenset(keys)
    for layout, gives_away in _REFUSED.items():
        if sign := sorted(filter(gives_away, names)):
            raise CheckpointError(
                f"{fields.path.parent}: {layout} layout not supported yet (it has the tensor {sign[0]})"
            )
    top = fields.places[""]
    for key in ("speculators_model_type", "transformer_layer_config"):
        if key in top:
            return SPECULATORS, f"config.json has {key}"
    if flat := sorted(name for name in names if MODEL_OPTIMIZER.canonical(name) != name):
        return MODEL_OPTIMIZER, f"head tensors have flat names ({flat[0]})"
    if shift := fields.find("shift_label"):
        return MODEL_OPTIMIZER, f"config.json has {shift.where}"
    if nested := _nested_head_key(fields):
        return SPECFORGE, f"head keys are nested or prefixed ({nested})"
    for key in ("markov_rank", "enable_confidence_head", "target_layer_ids"):
        if key in top:
            return DEEPSPEC, f"config.json has {key} at the top level"
    if "dflash_config" in top:
        return ZLAB_DFLASH, "config.json has dflash_config without head keys"
    hint = " It looks like a target." if is_target(names) else ""
    raise CheckpointError(
        f"{fields.path.parent} is not a DSpark or DFlash drafter: config.json has none of "
        f"target_layer_ids, markov_rank, dflash_config, dspark_*, transformer_layer_config.{hint}"
    )


def is_target(keys: Iterable[str]) -> bool:
    """Whether these are a target's tensors: no drafter carries the ``model.`` prefix."""
    return any(key.startswith("model.") for key in keys)


def _nested_head_key(fields: Fields) -> str | None:
    for prefix, place in fields.places.items():
        if not prefix:
            found = [key for key in place if key.startswith("dspark_")]
        else:
            found = [key for key in _HEAD_KEYS if key in place or f"dspark_{key}" in place]
            if place.get("projector_type") == "dspark":
                found.append("projector_type")
        if found:
            return prefix + found[0]
    return None
