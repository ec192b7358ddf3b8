"""What a bundle leaves out, each with its reason: packages, and files of vLLM's wheel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Final

from scripts.bundle.pins import Pin
from scripts.bundle.target import Contents, Engine, Target, Torch

_VIDEO: Final = "video and audio prompts"
_FLASHINFER: Final = "FlashInfer's attention and sampling kernels, compiled on the host"
_CUTE: Final = "CuTe kernels of FlashAttention 4, FlashInfer and quack"
_JIT: Final = "a CUDA compiler for FlashInfer's, DeepGEMM's and humming's kernels"
_KERNELS: Final = "kernels of other backends than Triton and FlashAttention"
_LOADERS: Final = "another loader of weights"

_PACKAGES: Final[Mapping[str, str]] = {
    "flashinfer-python": _FLASHINFER,
    "nccl4py": _FLASHINFER,
    "nccl-extensions": _FLASHINFER,
    "cuda-python": _FLASHINFER,
    "nvidia-cudnn-frontend": _FLASHINFER,
    "nvidia-cutlass-dsl": _CUTE,
    "nvidia-cutlass-dsl-libs-base": _CUTE,
    "nvidia-cutlass-dsl-libs-core": _CUTE,
    "nvidia-cutlass-dsl-libs-cu12": _CUTE,
    "nvidia-cutlass-dsl-libs-cu13": _CUTE,
    "quack-kernels": _CUTE,
    "torch-c-dlpack-ext": _CUTE,
    "nvidia-cuda-nvcc": _JIT,
    "nvidia-cuda-cccl": _JIT,
    "nvidia-cuda-crt": _JIT,
    "nvidia-nvvm": _JIT,
    "cuda-tile": _KERNELS,
    "humming-kernels": _KERNELS,
    "tilelang": _KERNELS,
    "z3-solver": _KERNELS,
    "ml-dtypes": _KERNELS,
    "tokenspeed-mla": _KERNELS,
    "tokenspeed-triton": _KERNELS,
    "fastsafetensors": _LOADERS,
    "instanttensor": _LOADERS,
    "opencv-python-headless": _VIDEO,
    "pynvvideocodec": _VIDEO,
    "torchaudio": _VIDEO,
    "torchcodec": _VIDEO,
}

# Patterns of fnmatch over the wheel's members.
_FLASH_2: Final = {"vllm/vllm_flash_attn/_vllm_fa2_C*": "FlashAttention 2"}
_FLASH_3: Final = {"vllm/vllm_flash_attn/_vllm_fa3_C*": "FlashAttention 3"}
_VLLM: Final[Mapping[str, str]] = {
    "vllm/vllm_flash_attn/cute/*": "FlashAttention 4",
    "vllm/third_party/tml_fa4/*": "FlashAttention 4",
    "vllm/third_party/fmha_sm100/*": "attention of Blackwell devices",
    "vllm/third_party/deep_gemm/*": "DeepGEMM: FP8 products, compiled on the host",
    "vllm/_flashmla*": "FlashMLA",
    "vllm/_flashkda*": "FlashKDA",
    "vllm/_deepselect*": "DeepSeek's sparse attention",
    "vllm/_qutlass*": "FP4 products of Blackwell devices",
}

# What a host that has torch has with it. Anything of CUDA that torch needs comes as nvidia-*.
_OF_TORCH: Final = ("torch", "triton", "torchvision", "torchaudio", "torchcodec", "cuda-toolkit", "nvidia-*")
_NOT_OF_TORCH: Final = ("nvidia-ml-py", "nvidia-cutlass-dsl*", "nvidia-cudnn-frontend")


def chosen(pins: Iterable[Pin], target: Target) -> tuple[list[Pin], dict[str, str]]:
    """Split pins into those that a bundle carries and the names of the others, each with the reason."""
    kept: list[Pin] = []
    left: dict[str, str] = {}
    for pin in pins:
        if reason := _reason(pin.name, target):
            left[pin.name] = reason
        else:
            kept.append(pin)
    return kept, left


def _reason(name: str, target: Target) -> str:
    of_host = any(fnmatchcase(name, p) for p in _OF_TORCH)
    if target.torch is Torch.HOST and of_host and not any(fnmatchcase(name, p) for p in _NOT_OF_TORCH):
        return "the host has it with its torch"
    if target.engine is Engine.GPU and target.contents is not Contents.FULL:
        return _PACKAGES.get(name, "")
    return ""


def environment_of(left_out: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that vLLM needs where these packages are left out."""
    # vLLM imports FlashInfer for top-k and top-p on a GPU without asking whether it is there.
    return {"VLLM_USE_FLASHINFER_SAMPLER": "0"} if "flashinfer-python" in left_out else {}


def dropped_from_vllm(contents: Contents) -> dict[str, str]:
    """Patterns of the members of vLLM's wheel that `contents` does not have, each with what it is."""
    if contents is Contents.FULL:
        return {}
    return {**_VLLM, **(_FLASH_2 if contents is Contents.HOPPER else _FLASH_3)}


def matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return the question whether a member's name matches any of the patterns."""
    wanted = tuple(patterns)
    return lambda name: any(fnmatchcase(name, pattern) for pattern in wanted)
