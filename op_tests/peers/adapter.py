"""Loads public tests that are written for other packages and for GPUs, as they are, for this one.

A test file is read from a checkout of its repository. It imports stand-ins: modules with the names
of its package, which hold this package's functions and, where these are plain PyTorch and nothing
that this package has, those of the checkout. The device "cuda" becomes "cpu", and `torch.cuda`
answers what the tests ask of it.
"""

import functools
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import jitfmha
import jitfmha.aiter.mla
from jitfmha.flash_attn import bert_padding


@dataclass(frozen=True)
class Suite:
    """Tests of another package.

    Attributes:
        repository: on GitHub.
        tests: the file, in a checkout.
        stand_in: puts the modules in place that it imports; takes a checkout and fp8.
        refusals: what may be refused: names of reasons, each with a pattern of the message.
        edits: what is another text here, or none.
        axes: what its one test is called with, where that is a script's own loop; takes fp8.
        left_out: tests that ask HIP itself.
    """

    repository: str
    tests: str
    stand_in: Callable[[Path, torch.dtype], None]
    refusals: tuple[tuple[str, str], ...] = ()
    edits: tuple[tuple[str, str], ...] = ()
    axes: Callable[[torch.dtype], Iterable[tuple[str, list[Any]]]] = lambda fp8: ()
    left_out: tuple[str, ...] = ()

    def load(self, checkout: Path, arch: str | None = None) -> ModuleType:
        """The test file as a module, for the CPU or an emulated ``arch``."""
        _stand_in_for_cuda()
        fp8 = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
        self.stand_in(checkout, fp8)
        name = Path(self.tests).stem
        module = _load(name, checkout / self.tests, self.edits)
        for axis in self.axes(fp8):
            vars(module)[name] = pytest.mark.parametrize(*axis)(getattr(module, name))
        for name in self.left_out:
            delattr(module, name)
        if hasattr(module, "normalize_flash_attn_S"):
            # flash-attn's kernels write probabilities that are scaled block by block, which the
            # tests undo; ours are probabilities.
            module.normalize_flash_attn_S = lambda probabilities, *_, **__: probabilities
        return module


def _load(name: str, path: Path, edits: tuple[tuple[str, str], ...] = ()) -> ModuleType:
    """The module in a file, with the CPU in place of the GPU, and ``edits`` made."""
    text = path.read_text(encoding="utf-8")
    for pattern, other in (('"cuda"', '"cpu"'), (r"\.(to\(0\)|cuda\(\))", ".cpu()"), *edits):
        text = re.sub(pattern, other, text, flags=re.DOTALL)
    module = _module(name)
    module.__file__, module.__package__ = str(path), name.rpartition(".")[0]
    exec(compile(text, path, "exec"), module.__dict__)
    return module


def _module(name: str, **content: Any) -> ModuleType:
    """A module that can be imported under ``name``, also as a package, with the content."""
    module = ModuleType(name)
    module.__path__ = []
    vars(module).update(content)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
    return module


calls: Counter[str] = Counter()
"""How often each function of this package was called."""


def _counted(module: ModuleType, names: list[str]) -> dict[str, Callable[..., Any]]:
    """Functions of this package, which count their calls.

    They refuse a wrong argument with a RuntimeError, as the C++ of the other packages does.
    """

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            calls[name] += 1
            try:
                return function(*arguments, **named)
            except (TypeError, ValueError) as error:
                raise RuntimeError(str(error)) from error

        return call

    return {name: counted(name, getattr(module, name)) for name in names}


def _stand_in_for_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda device=None: (9, 0)  # all that the tests make depend on it
    cuda.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1 << 40)
    cuda.empty_cache = cuda.synchronize = lambda *_: None
    cuda.mem_get_info = lambda: (1 << 30, 1 << 40)  # free: tests that ask want many times as much
    os.environ["PYTEST_CURRENT_TEST"] = "that of a peer"  # by which tests know how to be skipped


# ---- flash-attn ----------------------------------------------------------------------------------


def _stand_in_for_flash_attn(checkout: Path, fp8: torch.dtype) -> None:
    names = [n for n in jitfmha.__all__ if n.startswith("flash_attn_")]
    _module("flash_attn", **_counted(jitfmha, names))
    _module(
        "flash_attn.bert_padding", **{n: getattr(bert_padding, n) for n in bert_padding.__all__}
    )
    interface = _module(
        "flash_attn.flash_attn_interface", _get_block_size_n=lambda *_: 0, USE_TRITON_ROCM=False
    )
    interface.__getattr__ = _missing
    for name in ("flash_attn.layers", "flash_attn.ops", "flash_attn.ops.triton"):
        _module(name)
    _module("flash_attn.ops.triton.rotary", apply_rotary=_apply_rotary)
    _load("flash_attn.layers.rotary", checkout / "flash_attn/layers/rotary.py")


def _apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    seqlen_offsets: int | Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    interleaved: bool,
    inplace: bool,
) -> Tensor:
    """What flash-attn's Triton kernel computes of ``x (b, s, h, hdim)``."""
    assert cu_seqlens is max_seqlen is None
    assert not inplace
    positions = torch.arange(x.shape[1])[None] + torch.as_tensor(seqlen_offsets).view(-1, 1)
    cos, sin = cos[positions][:, :, None], sin[positions][:, :, None]
    width = 2 * cos.shape[-1]
    rotated = x[..., :width].float()
    if interleaved:
        a, b = rotated[..., ::2], rotated[..., 1::2]
    else:
        a, b = rotated.chunk(2, dim=-1)
    pair = a * cos - b * sin, a * sin + b * cos
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., width:]], dim=-1)


# ---- AITER ---------------------------------------------------------------------------------------


def _stand_in_for_aiter(checkout: Path, fp8: torch.dtype) -> None:
    _module("pandas")  # for its tables of times
    package = _module("aiter", logger=logging.getLogger("aiter"))
    vars(package).update(_counted(jitfmha.aiter, jitfmha.aiter.__all__))
    package.__getattr__ = _missing
    _module("aiter.mla", **_counted(jitfmha.aiter.mla, jitfmha.aiter.mla.__all__))
    package.per_tensor_quant = _per_tensor_quant
    _module(
        "aiter.dtypes",
        fp8=fp8,
        fp16=torch.float16,
        bf16=torch.bfloat16,
        fp32=torch.float32,
        i32=torch.int32,
        d_dtypes={"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": fp8},
        **dict.fromkeys(("str2bool", "str2tuple", "str2Dtype"), str),  # for its command line
    )
    for name in ("aiter.jit", "aiter.jit.utils", "aiter.ops"):
        _module(name)
    _module("aiter.jit.utils.chip_info", get_gfx=lambda: "cpu")
    # Tests of one chip's kernels: they skip themselves on others.
    opus = ("fmha_fwd_bf16_opus_fwd", "fmha_fwd_bf16_opus_varlen_fwd")
    _module("aiter.ops.mha", **dict.fromkeys(opus))
    _module(
        "aiter.test_common",
        benchmark=lambda: lambda test: test,
        perftest=lambda: lambda test: test,
        run_perftest=_run_once,
        checkAllclose=_check_close,
    )
    _load("aiter.bert_padding", checkout / "aiter/bert_padding.py")
    _load("aiter.test_mha_common", checkout / "aiter/test_mha_common.py")


def _missing(name: str) -> Any:
    """What another package has and this one does not."""
    if name.startswith("__"):
        raise AttributeError(name)
    calls[name] += 1
    raise NotImplementedError(f"there is no {name}")


def _per_tensor_quant(x: Tensor, quant_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = x.abs().max().float() / torch.finfo(quant_dtype).max
    return (x / scale).to(quant_dtype), scale.view(1)


def _check_close(a: Tensor, b: Tensor, msg: str, tol_err_ratio: float = 0.05) -> float:
    """The share of numbers that differ. AITER's own logs one that is too large, and goes on.

    With 8 bits many do, whose cosine the test then looks at.
    """
    share = 1 - torch.isclose(a, b, rtol=1e-2, atol=1e-2).float().mean().item()
    assert "fp8" in msg or share <= tol_err_ratio, f"{msg}: {share:.1%} of the numbers differ"
    return share


def _run_once(
    function: Callable[..., Any], *arguments: Any, num_rotate_args: int = 0, **named: Any
) -> tuple[Any, float]:
    """The result, and in place of its time in microseconds a number to divide by."""
    return function(*arguments, **named), 1.0


def _axes_of_mla(fp8: torch.dtype) -> Iterable[tuple[str, list[Any]]]:
    return (
        ("nhead,decode_qlen", [(16, 1), (16, 2), (16, 4), (128, 1), (128, 2)]),
        ("ctx_lens", [21, 64, 256, 512, 1200, 3200, 5200, 8192]),
        ("batch_size", [1, 3, 5, 16, 32, 64, 128, 256]),
        ("varlen", [False, True]),
        ("is_causal", [True, False]),
        ("sequential_page_indices", [False, True]),
        ("split_per_batch", [None, 1, 32]),
        ("dtype,kvtype", [(dtype, dtype) for dtype in (torch.bfloat16, fp8)]),
        ("kv_lora_rank,qk_nope_head_dim,qk_rope_head_dim", [(512, 128, 64)]),
        ("v_head_dim,page_size", [(128, 1)]),
    )


_INTERNAL = "_flash_attn_varlen_forward|flash_attn_gpu"
SUITES = {
    "flash-attn": Suite(
        *("Dao-AILab/flash-attention", "tests/test_flash_attn.py", _stand_in_for_flash_attn),
        (("an internal function of flash-attn", f"there is no ({_INTERNAL})$"),),
    ),
    "aiter": Suite("ROCm/aiter", "op_tests/test_mha.py", _stand_in_for_aiter),
    "aiter-varlen": Suite("ROCm/aiter", "op_tests/test_mha_varlen.py", _stand_in_for_aiter),
    "aiter-prefill": Suite(
        *("ROCm/aiter", "op_tests/test_batch_prefill.py", _stand_in_for_aiter),
        left_out=("test_batch_prefill_aick1171_hard_fault_via_guard_page",),
    ),
    "aiter-mla": Suite(
        *("ROCm/aiter", "op_tests/test_mla.py", _stand_in_for_aiter),
        # The loop over its command line, and a cache of 2.4 GB.
        edits=((r"\nparser = .*", ""), (r"65536 \* 32", "1 << 14")),
        axes=_axes_of_mla,
    ),
}
