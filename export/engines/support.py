# SPDX-License-Identifier: Apache-2.0
"""What cannot be built is refused here, before minutes are spent on it, with what to do instead."""

from collections.abc import Iterable
from importlib.util import find_spec

from dspark_trt.bundle import GREEDY_DRAFT, Bundle
from dspark_trt.config import DecoderConfig
from dspark_trt.engine_manifest import AMPERE_PLUS
from dspark_trt.errors import BackendError, BuildError
from dspark_trt.gpu import Gpu
from dspark_trt.tensorrt_library import Library

FUSED_HEAD_DIMS = range(16, 257, 8)  # of fused attention, in both libraries
ALL = "all"
# For hosts that sample between the drafter's steps, or never; they hold the fused graph's weights once more.
PARTS = ("backbone", "sequential_head", "confidence_head", GREEDY_DRAFT)
_ATTENTION = {
    "draft": "drafter",
    GREEDY_DRAFT: "drafter",
    "backbone": "drafter",
    "target": "target",
}


def choose_graphs(bundle: Bundle, wanted: Iterable[str]) -> tuple[str, ...]:
    """The graphs to build: those named, "all", or by default all but the drafter's parts.

    Raises:
        BundleError: the bundle has no such graph.
    """
    graphs = tuple(dict.fromkeys(wanted))
    if ALL in graphs:
        return bundle.graph_names
    for graph in graphs:
        bundle.graph_path(graph)
    return graphs or tuple(graph for graph in bundle.graph_names if graph not in PARTS)


def check_bundle(bundle: Bundle) -> None:
    """The precision that attention over caches takes.

    Raises:
        BuildError: a graph could only fail to build.
    """
    if bundle.dtype == "float32":
        raise BuildError(
            f"{bundle.path} is float32, and fused attention exists in float16 and bfloat16 only. "
            "Export it again with --dtype float16 (float32 is for backend onnxruntime on a CPU)."
        )


def unfused_attention(bundle: Bundle, graphs: Iterable[str]) -> tuple[str, ...]:
    """A sentence for each model among ``graphs`` with heads of a size that fused attention does not take."""
    decoders: dict[str, DecoderConfig] = {"drafter": bundle.draft.decoder}
    if bundle.target is not None:
        decoders["target"] = bundle.target.decoder
    sentences = []
    for model in sorted({_ATTENTION[graph] for graph in graphs if graph in _ATTENTION}):
        sizes = {size for _, size in decoders[model].cache_sizes}
        if unfused := sorted(sizes - set(FUSED_HEAD_DIMS)):
            sentences.append(
                f"attention of the {model} has heads of size {', '.join(map(str, unfused))}; fused attention "
                f"takes multiples of {FUSED_HEAD_DIMS.step} from {FUSED_HEAD_DIMS[0]} to "
                f"{FUSED_HEAD_DIMS[-1]}, so its scores go through memory"
            )
    return tuple(sentences)


def choose_archs(library: Library, wanted: Iterable[str], gpu: Gpu | None) -> tuple[str, ...]:
    """Architectures to build for: by default all from Ampere on (RTX), or the GPU at hand (TensorRT).

    Raises:
        BuildError: an architecture the library cannot build for, here or at all.
    """
    archs = tuple(sorted({arch.lower() for arch in wanted}))
    if AMPERE_PLUS in archs and len(archs) > 1:
        raise BuildError(f"--arch {AMPERE_PLUS} covers the others: give it alone")
    if library.backend == "tensorrt":
        return _tensorrt_archs(archs, gpu)
    if "sm75" in archs:
        raise BuildError(
            "--arch sm75: TensorRT-RTX compiles no float32 matrix products for Turing, and the drafter's "
            "projection of the taps is one. Use backend onnxruntime or torch there."
        )
    for arch in archs:
        if arch not in (AMPERE_PLUS, *library.archs):
            known = ", ".join(a for a in library.archs if a != "sm75")
            raise BuildError(
                f"--arch {arch}: TensorRT-RTX {library.version} builds for {known}, "
                f"or for all of them with {AMPERE_PLUS}"
            )
    return archs or (AMPERE_PLUS,)


def _tensorrt_archs(archs: tuple[str, ...], gpu: Gpu | None) -> tuple[str, ...]:
    if gpu is None:
        raise BuildError(
            "TensorRT times its kernels on the GPU it builds for, and no CUDA device is visible here. "
            "Build on the machine that will run the engines, or use --backend tensorrt-rtx, which builds anywhere."
        )
    if int(gpu.arch.removeprefix("sm")) < 80:
        raise BuildError(f"{gpu.name} is {gpu.arch}; bundles need sm80 (Ampere) or later")
    for arch in archs:
        if arch not in (gpu.arch, AMPERE_PLUS):
            raise BuildError(
                f"--arch {arch}: TensorRT builds for the GPU at hand ({gpu.name}, {gpu.arch}). "
                f"Build on a machine with {arch}, or portably with --arch {AMPERE_PLUS}."
            )
    return archs or (gpu.arch,)


def check_options(
    library: Library,
    archs: tuple[str, ...],
    gpu: Gpu | None,
    *,
    stripped: bool,
    refit: bool,
    version_compatible: bool,
) -> None:
    """Combinations of options that a library or this machine cannot do.

    Raises:
        BuildError: such a combination.
        BackendError: a package the build needs is missing.
    """
    rtx = library.backend == "tensorrt-rtx"
    if version_compatible and rtx:
        raise BuildError(
            "TensorRT-RTX has no version-compatible engines: build again after an upgrade of the library"
        )
    if (stripped or refit) and gpu is None:
        raise BuildError(
            "engines without weights are made and filled on a GPU, and no CUDA device is visible here. "
            "Build them on a GPU machine, or whole engines here without --strip-weights and --refit."
        )
    if stripped and rtx and (len(archs) > 1 or archs == (AMPERE_PLUS,)):
        raise BuildError(
            "TensorRT-RTX builds engines without weights for one architecture at a time: "
            f"--strip-weights goes with one --arch, got {', '.join(archs)}"
        )
    if not rtx and find_spec("triton") is None:
        raise BackendError(
            "backend tensorrt compiles its verification kernels with triton, which is not installed. "
            "Install it with: pip install 'dspark-trt[kernels]'"
        )
