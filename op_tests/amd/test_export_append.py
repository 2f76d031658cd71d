"""Keys appended by an exported library: the same bits as in Python, and what is refused."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from exported_calls import (
    DTYPES,
    AppendArguments,
    AppendTraits,
    CallError,
    Descale,
    ExportedCalls,
    build_shared,
    build_shim,
    write_library,
)
from packed_pages import packed_keys, packed_values
from torch import Tensor

from jitfmha import emulate
from jitfmha.amd.tree import AITER_ASM_DIR, HSA_DIR
from jitfmha.emulator.library import load
from jitfmha.emulator.session import DEVICES
from jitfmha.export.append import append_passes
from jitfmha.export.kernels import Selection, features_named, selection_of
from jitfmha.problem.dtypes import DTYPE_NAMES
from jitfmha.problem.packed_pages import are_packed, shape_of_keys
from jitfmha.rows.heads.ops import operator
from jitfmha.rows.heads.problem import HeadArguments

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

# Without masks there are no kernels but those of heads.
APPEND = Selection(("gfx942",), ("forward",), hdims=((64, 40),), appends=True)
NOTHING = Selection(("gfx942",), directions=(), hdims=((1, 1),))
PACKED = (("packed_pages",),)
WHERE = ("", "cache_batch_idx", "block_table", "packed_pages")
ROPES = ("none", "interleaved", "half_rotated")


class Kind(NamedTuple):
    """Calls that a library has kernels for."""

    arch: str
    dtype: torch.dtype
    cache_dtype: torch.dtype
    hdims: tuple[int, int]
    may_be_packed: bool = True


KINDS = (
    Kind("gfx942", torch.bfloat16, torch.bfloat16, (64, 40)),
    Kind("gfx950", torch.float16, torch.float8_e4m3fn, (20, 24), may_be_packed=False),
    Kind("gfx942", torch.float8_e4m3fnuz, torch.float8_e4m3fnuz, (64, 48)),
)
EXPORTED = (
    APPEND._replace(dtypes=("bf16",), features=PACKED),
    APPEND._replace(arches=("gfx950",), dtypes=("fp16",), hdims=((20, 24),), kv_dtype="fp8"),
    APPEND._replace(dtypes=("fp8",), hdims=((64, 48),), features=PACKED),
)


@pytest.fixture(scope="module")
def calls(built_once: Callable[[str, Callable[[Path], object]], Path]) -> ExportedCalls:
    for variable in (HSA_DIR, AITER_ASM_DIR):
        if variable in os.environ:
            pytest.skip(f"{variable} is set, and exports have the kernels of this package")

    def build(folder: Path) -> None:
        write_library(folder / "append", NOTHING, EXPORTED, keeps=lambda _: False)
        build_shim(folder / "append", build_shared(folder / "append"))

    shim = built_once("appending", build) / "append_calls.so"
    return ExportedCalls(shim, load("plain")._name)


class Given(NamedTuple):
    """A call, as Python's kernel of heads takes it."""

    rope: str
    has_mask: bool
    tensors: dict[str, Tensor]

    @classmethod
    def draw(cls, drawn: random.Random, rng: torch.Generator, kind: Kind, where: str) -> "Given":
        """With the keys of sequences in the cache as ``where`` says, one of ``WHERE``."""
        hdim, hdim_v = kind.hdims
        is_rotated = kind.dtype.itemsize > 1 and drawn.random() < 0.8
        batch, heads, heads_k = drawn.choice((1, 3)), drawn.choice((1, 5)), drawn.choice((1, 2))
        new = drawn.choice((1, 1, 4, 37, 0))
        queries = drawn.choice((new, 3, 0)) if is_rotated else new
        lengths = torch.randint(0, 30, (batch,), generator=rng).int()

        def tensor(*shape: int, dtype: torch.dtype = kind.dtype) -> Tensor:
            """By head or by row, at any address or an aligned one."""
            *outer, rows, heads, columns = shape
            flat = torch.randn(torch.Size(shape).numel() + 8, generator=rng).mul(3).to(dtype)
            flat = flat[drawn.choice((0, 0, 1)) :][: torch.Size(shape).numel()]
            if drawn.random() < 0.5:
                return flat.view(*outer, heads, rows, columns).transpose(-3, -2)
            return flat.view(shape)

        tensors = {"seqlens": lengths, "q": tensor(batch, queries, heads, hdim)}
        tensors |= {"knew": tensor(batch, new, heads_k, hdim)}
        tensors |= {"vnew": tensor(batch, new, heads_k, hdim_v)}
        page_size, pages = 70, batch
        if where == "cache_batch_idx":
            tensors[where] = torch.randperm(batch + 2, generator=rng)[:batch].int()
            pages = batch + 2
        elif where:
            page_size = 16 if where == "packed_pages" else drawn.choice((1, 7, 16))
            of_sequence = -(-70 // page_size)
            order = torch.randperm(batch * of_sequence, generator=rng)
            tensors["block_table"] = order.view(batch, of_sequence).int()
            pages = batch * of_sequence
        for name, columns in (("k", hdim), ("v", hdim_v)):
            cache = tensor(pages, page_size, heads_k, columns, dtype=kind.cache_dtype)
            if where == "packed_pages" and kind.may_be_packed:
                cache = packed_keys(cache) if name == "k" else packed_values(cache)
            tensors[name] = cache
            if kind.dtype != kind.cache_dtype and drawn.random() < 0.7:
                count = drawn.choice((1, heads_k))
                tensors[f"{name}_descale"] = torch.rand(count, generator=rng) * 0.05 + 0.001
        if is_rotated:
            width = drawn.randint(1, hdim // 2) if drawn.random() < 0.5 else hdim // 2
            angles = torch.rand(70, width, generator=rng) * 6
            tensors |= {"cos": angles.cos().to(kind.dtype), "sin": angles.sin().to(kind.dtype)}
        rope = drawn.choice(ROPES[1:]) if is_rotated else "none"
        return cls(rope, drawn.random() < 0.7, tensors)

    def copy(self) -> "Given":
        """With caches and queries of its own, by the same strides."""
        own = {}
        for name in ("q", "k", "v"):
            x = self.tensors[name]
            own[name] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)
        return self._replace(tensors=self.tensors | own)

    def run_in_python(self, arch: str) -> None:
        given = self.tensors
        names = ("knew", "vnew", "k", "v")
        rows = dict(zip(names, (given[name] for name in names), strict=True))
        if given["knew"].dtype.itemsize == 1:
            rows = {name: x.view(torch.int8) for name, x in rows.items()}
        rotation = {name: given.get(name) for name in ("cos", "sin")}
        shared = {"cache_seqlens": given["seqlens"], **rotation}
        shared["interleaved"] = self.rope == "interleaved"
        with emulate(arch):
            if self.rope != "none" and given["q"].numel():
                q = given["q"]
                queries = HeadArguments(q, None, None, q_out=q, q_moves=self.has_mask, **shared)
                operator.launch(queries)
            if given["knew"].numel():
                operator.launch(
                    HeadArguments(
                        *(None, rows["knew"], rows["vnew"]),
                        k_cache=rows["k"],
                        v_cache=rows["v"],
                        block_table=given.get("block_table"),
                        cache_batch_idx=given.get("cache_batch_idx"),
                        k_scale=given.get("k_descale"),
                        v_scale=given.get("v_descale"),
                        **shared,
                    )
                )

    def run_in_cpp(self, calls: ExportedCalls, arch: str, q_out: Tensor | None = None) -> None:
        given = self.tensors
        arguments = AppendArguments(
            batch=len(given["seqlens"]),
            seqlen_q=given["q"].shape[1],
            seqlen_knew=given["knew"].shape[1],
            nhead_q=given["q"].shape[2],
            nhead_k=given["knew"].shape[2],
            hdim_q=given["q"].shape[3],
            hdim_v=given["vnew"].shape[3],
            seqlen_k_ptr=given["seqlens"].data_ptr(),
            has_mask=self.has_mask,
        )
        for name in ("q", "k", "v", "knew", "vnew"):
            arguments.set_tensor(name, given[name])
        arguments.has_packed_pages = are_packed(given["k"])
        if arguments.has_packed_pages:
            for name in ("k", "v"):
                page, head, *_ = given[name].stride()
                setattr(arguments, f"batch_stride_{name}", page)
                setattr(arguments, f"nhead_stride_{name}", head)
        if q_out is not None:
            arguments.q_out_ptr = q_out.data_ptr()
        if self.rope != "none":
            arguments.rotary_cos_ptr = given["cos"].data_ptr()
            arguments.rotary_sin_ptr = given["sin"].data_ptr()
            arguments.rotary_dim = 2 * given["cos"].shape[1]
        if "block_table" in given:
            table = given["block_table"]
            arguments.block_table_ptr = table.data_ptr()
            arguments.batch_stride_block_table = table.stride(0)
            arguments.page_block_size = shape_of_keys(given["k"])[1]
        if "cache_batch_idx" in given:
            arguments.cache_batch_idx = given["cache_batch_idx"].data_ptr()
        for name in ("k_descale", "v_descale"):
            if name in given:
                scale = given[name]
                setattr(arguments, name, Descale(scale.data_ptr(), 0, int(len(scale) > 1)))
        assert load("plain").hipSetDevice(DEVICES[arch]) == 0
        calls.append(self.traits(), arguments)

    def traits(self) -> AppendTraits:
        given = self.tensors
        dtype, cache = given["knew"].dtype, given["k"].dtype
        return AppendTraits(
            hdim_q=given["q"].shape[3],
            hdim_v=given["vnew"].shape[3],
            data_type=DTYPES[DTYPE_NAMES[dtype]],
            rope_type=ROPES.index(self.rope),
            cache_type=0 if dtype == cache else 2 if cache == torch.int8 else 1,
        )


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_python(kind, calls, rng):
    drawn = random.Random(rng.initial_seed())
    for where in WHERE * 2:
        given = Given.draw(drawn, rng, kind, where)
        expected, found = given.copy(), given.copy()
        expected.run_in_python(kind.arch)
        found.run_in_cpp(calls, kind.arch)
        for name in ("q", "k", "v"):
            one, other = expected.tensors[name], found.tensors[name]
            assert torch.equal(bits_of(one), bits_of(other)), name
        if given.rope == "none":
            continue
        again, q_out = given.copy(), found.tensors["q"].fill_(torch.nan)
        again.run_in_cpp(calls, kind.arch, q_out)
        assert torch.equal(again.tensors["q"], given.tensors["q"])
        assert torch.equal(q_out, expected.tensors["q"])


def bits_of(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def refused(calls: ExportedCalls, traits: dict[str, Any], arguments: dict[str, Any]) -> str:
    shape = {"hdim_q": 64, "hdim_v": 40}
    room = torch.zeros(64)
    pointers = dict.fromkeys(("k_ptr", "knew_ptr", "v_ptr", "vnew_ptr"), room.data_ptr())
    pointers["seqlen_k_ptr"] = room.data_ptr()
    sizes = dict.fromkeys(("batch", "seqlen_knew", "nhead_q", "nhead_k"), 1)
    assert load("plain").hipSetDevice(DEVICES["gfx942"]) == 0
    with pytest.raises(CallError) as raised:
        calls.append(
            AppendTraits(**{**shape, **traits}),
            AppendArguments(**{**shape, **pointers, **sizes, **arguments}),
        )
    return str(raised.value)


@pytest.mark.parametrize(
    ("traits", "arguments", "text"),
    [
        ({"is_v_rowmajor": False}, {}, "unsupported: is_v_rowmajor is false"),
        ({"data_type": 9}, {}, "data_type is 9, which is no value"),
        ({"data_type": 2, "rope_type": 1}, {}, "unsupported: rope_type is given, and data_type"),
        ({"data_type": 3}, {}, "unsupported: dtype is fp8_e4m3fn; the fp8 of gfx942 is fp8_e4"),
        ({"data_type": 2, "cache_type": 1}, {}, "cache_type is given, and data_type has 8 bits"),
        ({"rope_type": 1}, {"rotary_dim": 3}, "rotary_dim is 3; it is even, and from 2 to hdim_q"),
        ({"rope_type": 1}, {"rotary_dim": 66}, "rotary_dim is 66;"),
        ({"rope_type": 2}, {"rotary_dim": 8}, "rotary_cos_ptr is null"),
        ({}, {"batch": -1}, "batch is -1; it is not negative"),
        ({}, {"hdim_q": 65}, "hdim_q is 65, and of the traits 64"),
        ({}, {"knew_ptr": None}, "knew_ptr is null"),
        ({}, {"seqlen_k_ptr": None}, "seqlen_k_ptr is null"),
        ({}, {"stride_v": -1}, "stride_v is -1; it is not negative"),
        ({}, {"stride_k": 1 << 31}, "unsupported: stride_k is 2147483648; kernels take up to"),
        ({}, {"batch": 1 << 31}, "unsupported: batch is 2147483648, of 1 tokens"),
        ({}, {"block_table_ptr": 8}, "page_block_size is 0; it is at least 1"),
        ({}, {"has_packed_pages": True}, "block_table_ptr is null"),
        (
            {"hdim_q": 20},
            {"hdim_q": 20, "block_table_ptr": 8, "page_block_size": 16, "has_packed_pages": True},
            "hdim_q is 20; packed pages are in pieces of 16 bytes, which is 8",
        ),
        (
            {"cache_type": 2},
            {"block_table_ptr": 8, "page_block_size": 32, "has_packed_pages": True},
            "--kv-dtype int8 --hdims 64x40 --features append,packed_pages has it",
        ),
        ({}, {"block_table_ptr": 8, "cache_batch_idx": 8}, "cache_batch_idx is given with block_"),
        ({}, {"k_descale": Descale(8, 0, 0)}, "k_descale is given, and caches are of data_type"),
        ({"cache_type": 1}, {"v_descale": Descale(8, 1, 0)}, "v_descale.batch is 1; caches have"),
        (
            {"cache_type": 1},
            {},
            "no kernel that appends keys of bf16, hdim 64x40, was exported for gfx942: python -m",
        ),
        ({"data_type": 6}, {}, "--dtype bf8 --hdims 64x40 --features append has it"),
        ({"cache_type": 1}, {}, "--dtype bf16 --kv-dtype fp8 --hdims 64x40 --features append has"),
        ({"hdim_q": 8}, {"hdim_q": 8}, "--dtype bf16 --hdims 8x40 --features append has it"),
    ],
)
def test_what_is_refused(traits, arguments, text, calls):
    assert text in refused(calls, traits, arguments)


def test_the_flag_that_brings_them():
    def names(*features: str, **chosen: Any) -> set[str]:
        chosen["features"] = tuple(map(features_named, features))
        selection = selection_of(("gfx942",), chosen.pop("profile", None), chosen)
        assert ("append",) not in (selection.features or ())
        return {x.kernel.name for x in append_passes(selection)}

    assert names("plain") == set()
    default = names("append")
    assert any("bf16_64x64x0x8" in name for name in default)
    assert any("fp16_interleaved_128x128xanyx1" in name for name in default)
    assert names("append", "bias+alibi") == default
    assert all(
        "_fp8_e4m3fnuzcache_" in x for x in names("append", kv_dtype="fp8", dtypes=("bf16",))
    )
    of_profile = names("append", profile="training", hdims=((96, 96),))
    assert any("bf16_96x96x0x8" in name for name in of_profile)
    with pytest.raises(ValueError, match="append"):
        features_named("append+bias")


def test_a_folder_without_attention_kernels(tmp_path: Path) -> None:
    """What is exported for appending alone compiles with no warning."""
    folder = tmp_path / "alone"
    write_library(folder, NOTHING, EXPORTED[2:], keeps=lambda _: False)
    build_shared(folder)
