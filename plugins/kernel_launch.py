# SPDX-License-Identifier: Apache-2.0
"""Verification of torch tensors with the Triton kernels, in buffers that are allocated once.

A call launches kernels on the current stream and does nothing else: no allocation, no synchronisation, no
length read by the host, so it may be captured in a CUDA graph. Results stay valid until the next call.
"""

import torch

from dspark_trt.errors import CapacityError, RequestError
from dspark_trt.plugins.contract import VerifyMode, verify_bindings
from dspark_trt.plugins.kernel_plan import COMPILE_OPTIONS, DRAFT_STEP, Step, verify_plan

Tensor = torch.Tensor

LOGITS = ("target_logits", "draft_logits")
LOGIT_TYPES = (torch.float16, torch.bfloat16, torch.float32)


class Verifier:
    """Kernels and buffers of one mode for up to ``max_batch`` requests."""

    def __init__(
        self,
        mode: VerifyMode,
        *,
        gamma: int,
        vocab_size: int,
        max_batch: int,
        device: torch.device,
    ) -> None:
        self.max_batch = max_batch
        self._bindings = verify_bindings(mode, gamma=gamma, vocab_size=vocab_size).inputs
        self._plan = verify_plan(mode, gamma=gamma, vocab_size=vocab_size)
        self._buffers = {
            name: torch.empty(
                (max_batch, *buffer.shape), dtype=getattr(torch, buffer.dtype), device=device
            )
            for name, buffer in self._plan.buffers.items()
        }

    def __call__(
        self, inputs: dict[str, Tensor], *, drafts_summarised: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Accepted int64 [B] and tokens int64 [B, K+1] for the inputs of `contract.verify_bindings`.

        Logits may be float16, bfloat16 or float32. ``drafts_summarised`` says that `summarise_drafts` has
        run for these drafts. Raises `CapacityError` for more requests than there is room for and
        `RequestError` for a tensor the kernels would misread.
        """
        batch = self._checked_batch(inputs)
        skipped = DRAFT_STEP if drafts_summarised else ""
        self._launch([step for step in self._plan.steps if step.name != skipped], batch, inputs)
        return self._buffers["accepted"][:batch], self._buffers["tokens"][:batch]

    def summarise_drafts(self, inputs: dict[str, Tensor]) -> None:
        """Read the draft logits as soon as they exist, so that verification reads each only where it must.

        Takes what the step reads: draft_logits, offsets (of full blocks, where ℓ is not decided yet),
        temperature and draft_temperature.
        """
        steps = [step for step in self._plan.steps if step.name == DRAFT_STEP]
        self._launch(steps, len(inputs["draft_temperature"]), inputs)

    def _launch(self, steps: list[Step], batch: int, inputs: dict[str, Tensor]) -> None:
        tensors = inputs | self._buffers
        for step in steps:
            arguments = [tensors[name] for name in (*step.inputs, *step.outputs)]
            step.kernel[batch, *step.grid](
                *arguments, **step.constants, num_warps=step.warps, **COMPILE_OPTIONS
            )

    def _checked_batch(self, inputs: dict[str, Tensor]) -> int:
        names = [binding.name for binding in self._bindings]
        if sorted(inputs) != sorted(names):
            raise RequestError(
                f"verification takes {', '.join(names)}; got {', '.join(inputs)}"
            )
        batch = len(inputs["draft_tokens"])
        if batch > self.max_batch:
            raise CapacityError(f"{batch} requests, but there is room for {self.max_batch}")
        sizes = {"batch": batch, "offsets": batch + 1, "rows": len(inputs["target_logits"])}
        device = self._buffers["tokens"].device
        for binding in self._bindings:
            tensor = inputs[binding.name]
            shape = tuple(d if isinstance(d, int) else sizes[d] for d in binding.shape)
            types = LOGIT_TYPES if binding.name in LOGITS else (getattr(torch, binding.dtype),)
            if (
                tuple(tensor.shape) != shape
                or tensor.dtype not in types
                or tensor.device != device
                or not tensor.is_contiguous()
            ):
                raise RequestError(
                    f"{binding.name} is {tensor.dtype} {tuple(tensor.shape)} with strides "
                    f"{tensor.stride()} on {tensor.device}; the kernels read contiguous "
                    f"{' or '.join(map(str, types))} {shape} on {device}"
                )
        return batch


class Sampler:
    """Draws a draft's tokens on the device (`specification.sample_draft`): what verification does for a
    request without drafts or filters.
    """

    def __init__(self, *, vocab_size: int, max_batch: int, device: torch.device) -> None:
        self._verifier = Verifier(
            VerifyMode.REJECTION,
            gamma=0,
            vocab_size=vocab_size,
            max_batch=max_batch,
            device=device,
        )
        self._constants = {
            "draft_tokens": torch.zeros((max_batch, 0), dtype=torch.int64, device=device),
            "draft_logits": torch.zeros((max_batch, 0, vocab_size), device=device),
            "top_k": torch.zeros(max_batch, dtype=torch.int64, device=device),
            "top_p": torch.ones(max_batch, device=device),
            "min_p": torch.zeros(max_batch, device=device),
        }
        self._offsets = torch.arange(max_batch + 1, device=device)

    def __call__(self, logits: Tensor, temperature: Tensor, uniforms: Tensor) -> Tensor:
        """Float32 [B, V], [B], [B] -> int64 [B]; 0 for a row that cannot be sampled from."""
        batch = len(logits)
        _, tokens = self._verifier(
            {
                "target_logits": logits.contiguous(),
                "offsets": self._offsets[: batch + 1],
                "temperature": temperature,
                "draft_temperature": temperature,
                "uniforms": uniforms.reshape(batch, 1).contiguous(),
                **{name: value[:batch] for name, value in self._constants.items()},
            }
        )
        return tokens[:, 0].clamp(min=0)
