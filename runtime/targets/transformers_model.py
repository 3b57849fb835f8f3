# SPDX-License-Identifier: Apache-2.0
"""Any causal language model of `transformers` as a target: hooks for taps, its own cache."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dspark_trt.config import FINAL_NORM
from dspark_trt.errors import CheckpointError
from dspark_trt.runtime.targets.host import HostOutput

Ints = NDArray[np.int64]


class TransformersTarget:
    """Wraps a loaded `AutoModelForCausalLM` (`HostTarget`).

    Args:
        model: in eval mode, on any device.
        target_layer_ids: of the drafter; -1 is the embedding output, `FINAL_NORM` the final norm.

    Raises:
        CheckpointError: the model's decoder layers cannot be found, or an id is beyond them.
    """

    def __init__(self, model: Any, target_layer_ids: tuple[int, ...]) -> None:
        self._model = model
        self._caches: dict[int, Any] = {}
        self._captured: dict[int, torch.Tensor] = {}
        self._ids = target_layer_ids
        decoder = model.get_decoder()
        layers = getattr(decoder, "layers", None)
        if layers is None:
            raise CheckpointError(
                f"{type(model).__name__} has no decoder layers under .layers, so the outputs of layers "
                f"{list(target_layer_ids)}, which the drafter taps, cannot be taken: implement HostTarget"
            )
        if missing := [i for i in target_layer_ids if i >= len(layers)]:
            raise CheckpointError(
                f"{type(model).__name__} has {len(layers)} decoder layers; the drafter taps "
                f"{list(target_layer_ids)}, of which it lacks {missing}: load the target it was trained for"
            )
        if FINAL_NORM in target_layer_ids and not hasattr(decoder, "norm"):
            raise CheckpointError(
                f"{type(model).__name__} has no final norm under .norm, which the drafter taps: implement "
                "HostTarget"
            )
        others = {-1: model.get_input_embeddings(), FINAL_NORM: getattr(decoder, "norm", None)}
        self._hooks = [
            (others[i] if i < 0 else layers[i]).register_forward_hook(self._capture(i))
            for i in target_layer_ids
        ]

    def _capture(self, layer: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            self._captured[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    @torch.inference_mode()
    def forward(self, sequence: int, token_ids: Ints, start: int) -> HostOutput:
        from transformers import DynamicCache

        cache = self._caches.get(sequence)
        if cache is None:
            cache = self._caches[sequence] = DynamicCache(config=self._model.config)
        excess = cache.get_seq_length() - start
        if excess > 0:
            cache.crop(-excess)  # the form all versions take: remove so many
        ids = torch.from_numpy(np.ascontiguousarray(token_ids)).to(self._model.device)
        output = self._model(input_ids=ids[None], past_key_values=cache, use_cache=True)
        taps = torch.cat([self._captured[i][0] for i in self._ids], -1)
        return HostOutput(output.logits[0].float().cpu().numpy(), taps.float().cpu().numpy())

    def release(self, sequence: int) -> None:
        self._caches.pop(sequence, None)

    def close(self) -> None:
        """Remove the hooks; the model is the caller's again."""
        for hook in self._hooks:
            hook.remove()
