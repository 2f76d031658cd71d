"""`JITFMHA_RECORD` and `python -m jitfmha replay`: which side of a wrong result is at fault."""

import dataclasses
import hashlib
import itertools
import json
import os
import re
import shutil
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from amd_problems import AmdProblem
from backward_calls import BackwardCall
from descaled_calls import scales_of_tokens
from packed_pages import packed_keys, packed_values
from page_lists import PageLists
from plain_backward_tree import PlainGradients, PlainOther, write_backward_tree
from plain_tree import PLAIN_NAME, PlainKernel, UseTree, plain_listing, write_manifest, write_tree
from rigs.modelled_call import take_only
from untyped import fmha_bwd, fmha_fwd

from jitfmha import HipError, emulate
from jitfmha.amd import recording_runtime
from jitfmha.amd.assembly_listing import renamed
from jitfmha.amd.recording_runtime import RecordingRuntime, Started
from jitfmha.amd.tree import AITER_ASM_DIR, HSA_DIR
from jitfmha.call import recording
from jitfmha.call.dispatch import plan_for
from jitfmha.call.record import FILE, INTERFACES, RecordError
from jitfmha.cli import main
from jitfmha.emulator import emulation
from jitfmha.emulator.runtime import Emulator
from jitfmha.emulator.session import Emulation, emulated_name
from jitfmha.jit.toolchain.device_compiler import assemble
from jitfmha.planning.target import TARGET_HERE
from jitfmha.problem.arguments import Arguments
from jitfmha.problem.problem import make_problem
from jitfmha.replay.expected_arguments import expectations
from jitfmha.replay.machines import EmulatedMachine, GpuMachine, RerunError
from jitfmha.replay.reading import read_record
from jitfmha.replay.rerun import diagnose

GROUP_KERNEL = PlainKernel("fp16", 64, 64, mask=2, mode=1)
LENGTHS = ((7, 9), (0, 3), (1, 1), (3, 0), (2, 5))


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[Path]]]:
    """Launches are recorded; gives the folders, in the order of the launches."""
    folder = tmp_path / "launches"
    monkeypatch.setenv("JITFMHA_RECORD", str(folder))
    for variable in (HSA_DIR, AITER_ASM_DIR):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(recording_runtime, "_written_bytes", 0)
    yield lambda: sorted(folder.iterdir(), key=lambda path: path.name.split("-")[3:])
    assert not list(folder.glob(".*")), "something is half written"


Recorded = Callable[[], list[Path]]


def group_call(rng: torch.Generator) -> None:
    """One call of packed sequences on an emulated MI300X, with a poisoned out."""
    problem = AmdProblem(rng, torch.float16, (64, 64), (3, 1), lengths=LENGTHS, mask=2)
    out = torch.full((sum(x for x, _ in LENGTHS), 3, 64), torch.nan, dtype=torch.float16)
    with emulate("gfx942"):
        problem.options["out"] = out
        problem.run()


@pytest.fixture(scope="module")
def first_group_launch() -> list[Path]:
    """The folder of the one that was recorded, if any was."""
    return []


@pytest.fixture
def group_launch(
    rng: torch.Generator,
    recorded: Recorded,
    use_tree: UseTree,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    first_group_launch: list[Path],
) -> Path:
    """A recorded launch of a kernel of AITER's interface: a copy of its own for each test."""
    if not first_group_launch:
        write_tree(tmp_path / "tree", "gfx942", [GROUP_KERNEL])
        use_tree(tmp_path / "tree")
        group_call(rng)
        (folder,) = recorded()
        kept = tmp_path_factory.mktemp("launch") / folder.name
        first_group_launch.append(folder.rename(kept))
    folder = tmp_path / "launches" / first_group_launch[0].name
    return shutil.copytree(first_group_launch[0], folder)


def diagnosis_of(folder: Path, **options: Any) -> Any:
    record = read_record(folder)
    arch = emulated_name(record.chip, record.arch)
    emulation = Emulation(arch, **options, prints_findings=False)
    return diagnose(record, lambda: EmulatedMachine(emulation))


def ready(rng: torch.Generator) -> None:
    """Kernels that come ready, forward and backward, the latter deterministic, too."""
    q, k, v, dout = tensors(rng, (2, 5, 3, 128), *[(2, 140, 1, 128)] * 2, (2, 5, 3, 128))
    out, lse = fmha_fwd(q, k, v, mask=2, return_lse=True)
    for deterministic in (False, True):
        fmha_bwd(dout, q, k, v, out, lse, mask=2, deterministic=deterministic)


def split(rng: torch.Generator) -> None:
    """Many keys for few queries: they are split, and a second kernel combines the results."""
    q, k, v = tensors(rng, (1, 1, 1, 64), *[(1, 6000, 1, 64)] * 2)
    fmha_fwd(q, k, v, return_lse=True)


def compiled(rng: torch.Generator) -> None:
    """Everything that is at hand, on views of one tensor, and the backward pass."""
    packed = torch.randn(2, 19, 9, 40, generator=rng).to(torch.bfloat16)
    q, k, v = packed[:, :17, :6], packed[:, :, 6:8], packed[:, :, 7:9]
    slopes = torch.rand(2, 6, generator=rng)
    bias = torch.randn(1, 6, 17, 19, generator=rng).to(torch.bfloat16)
    options = {"mask": "b:7,2", "softmax_scale": 0.3, "alibi_slopes": slopes, "bias": bias}
    out, lse = fmha_fwd(q, k, v, return_lse=True, **options)
    dout = torch.randn(out.shape, generator=rng).to(out.dtype)
    fmha_bwd(dout, q, k, v, out, lse, **options)


def scaled(rng: torch.Generator) -> None:
    """Keys and values of 8 bits, whose tokens have scales of their own."""
    q, k, v = tensors(rng, (2, 1, 6, 64), *[(2, 70, 2, 64)] * 2)
    k, v = (x.mul(9).to(torch.int8) for x in (k, v))
    scales = {f"{name}_descale": scales_of_tokens(rng, x) for name, x in (("k", k), ("v", v))}
    fmha_fwd(q, k, v, **scales)


def packed(rng: torch.Generator) -> None:
    """Packed pages, whose strides are not those of rows."""
    q, k, v = tensors(rng, (2, 6, 64), (9, 16, 2, 64), (9, 16, 2, 40))
    k, v = packed_keys(k), packed_values(v)
    sums_q, sums_k = (torch.tensor(sums, dtype=torch.int32) for sums in ([0, 1, 2], [0, 40, 73]))
    table = torch.randperm(9, generator=rng).int()[:8].view(2, 4)
    fmha_fwd(q, k, v, cu_seqlens_q=sums_q, cu_seqlens_k=sums_k, block_table=table)


def listed(rng: torch.Generator) -> None:
    """Pages that lists name in place of a table."""
    it = PageLists(rng, [1, 1, 1], [40, 0, 33], 16, (6, 2), 64, dtype=torch.bfloat16)
    pages = (x.nan_to_num() for x in (it.k, it.v))  # a diagnosis has no tensors with NaN in them
    fmha_fwd(it.q, *pages, **it.groups)


def tensors(rng: torch.Generator, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, generator=rng).to(torch.bfloat16) for shape in shapes]


@pytest.mark.parametrize(
    ("call", "kernels"),
    [
        *((ready, [1, 3, 3]), (split, [2]), (compiled, [1, 2]), (scaled, [1]), (packed, [1])),
        (listed, [1]),
    ],
    ids=lambda x: str(x)[:16],
)
def test_what_is_right_is_found_to_be(rng, recorded, call, kernels):
    with emulate("gfx950", check=True) as run:
        if call is ready:
            take_only("ready")
        call(rng)
    assert run.findings() == ()
    folders = recorded()
    assert [len(read_record(folder).kernels) for folder in folders] == kernels
    for folder in folders:
        found = diagnosis_of(folder, variant="check")
        assert (found.fault, found.mismatches, found.findings) == ("none", (), ())
        assert found.recorded.judged == found.replayed.judged


@pytest.mark.usefixtures("ready_first")
@pytest.mark.parametrize("with_data", [True, False])
def test_backward_kernels_of_a_tree_are_replayed(
    rng, recorded, use_tree, tmp_path, monkeypatch, with_data
):
    """Three kernels with tensors between them; dk and dv of each query head are summed by torch."""
    others = [PlainOther(kind, "fp16", mode=1) for kind in ("odo", "dq_convert")]
    write_backward_tree(tmp_path / "tree", "gfx950", [PlainGradients("fp16", mode=1)], others)
    use_tree(tmp_path / "tree")
    monkeypatch.setenv("JITFMHA_RECORD_DATA", str(int(with_data)))
    lengths = ((5, 35), (0, 3), (4, 0), (1, 1))
    longest = {"max_seqlen_q": 5, "max_seqlen_k": 35}
    call = BackwardCall(
        *(rng, torch.float16), hdims=(8, 8), heads=(4, 2), lengths=lengths, options=longest
    )
    # The launch copies an lse that is not contiguous.
    call.lse = call.lse.repeat_interleave(2, dim=-1)[..., ::2]
    with emulate("gfx950"):
        call.run()
    (folder,) = recorded()
    record = read_record(folder)
    assert [kernel.interface for kernel in record.kernels] == [
        "AiterRowSumArguments",
        "AiterGradientArguments",
        "AiterDqArguments",
    ]
    found = diagnosis_of(folder)
    assert (found.fault, found.mismatches) == ("none", ())
    assert found.replayed.judged.keys() == {"dq", "dk", "dv"}
    assert found.inputs.is_right
    tamper(folder, {"s_dq_acc_Hs": 4 * 8}, kernel=2)
    found = diagnosis_of(folder)
    assert found.fault == "arguments"
    assert not found.replayed.is_right
    assert [each.argument for each in found.mismatches] == ["s_dq_acc_Hs"]


def test_a_window_of_a_tree(rng, recorded, use_tree, tmp_path):
    """Both its sides are expected as the launcher passes them on."""
    hdims = (128, 128)
    others = [PlainOther("odo", hdims=hdims), PlainOther("dq_convert", hdims=hdims, bf16_cvt=0)]
    gradients = [PlainGradients(hdims=hdims, mask=3, bf16_cvt=0)]
    write_backward_tree(tmp_path / "tree", "gfx942", gradients, others)
    use_tree(tmp_path / "tree")
    with emulate("gfx942"):
        BackwardCall(rng, hdims=(72, 72), lengths=((5, 9),), batch=1, mask="b:3,2").run()
    (folder,) = recorded()
    found = diagnosis_of(folder)
    assert (found.fault, found.mismatches) == ("none", ())


def test_an_lse_of_another_call_is_the_inputs_fault(rng, recorded):
    with emulate("gfx950"):
        compiled(rng)
    *_, folder = recorded()
    record = read_record(folder)
    place = record.tensors["lse"]
    with edited(folder) as document:
        region = document["regions"][place.region]
        content = bytearray((folder / region["file"]).read_bytes())
        lse = torch.frombuffer(content, dtype=torch.float32, offset=place.offset, count=2 * 6 * 17)
        lse += 1
        replace_content(folder, region, bytes(content))
    assert diagnosis_of(folder).fault == "inputs"


# ---- Wrong arguments, wrong kernels --------------------------------------------------------------


@contextmanager
def edited(folder: Path) -> Iterator[dict[str, Any]]:
    """What was recorded, written again with its changes."""
    document = json.loads((folder / FILE).read_text())
    yield document
    (folder / FILE).write_text(json.dumps(document))


def replace_content(folder: Path, place: dict[str, Any], content: bytes) -> None:
    """Of a file that a recording names, with its hash."""
    (folder / place["file"]).write_bytes(content)
    place["sha256"] = hashlib.sha256(content).hexdigest()


def tamper(folder: Path, values: dict[str, float], *, kernel: int = 0, **fields: Any) -> None:
    """Change arguments of a recorded kernel, and other fields of it."""
    with edited(folder) as document:
        described = document["kernels"][kernel]
        described.update(fields)
        places = INTERFACES[described["interface"]].leaves
        for argument in described["arguments"]:
            if argument["name"] in values:
                form = f"={places[argument['name']][1]}"
                content = struct.pack(form, values[argument["name"]])
                argument["bytes"] = content.hex()
                (argument["value"],) = struct.unpack(form, content)


@pytest.mark.usefixtures("ready_first")
def test_a_wrong_argument_is_the_arguments_fault(group_launch):
    record = read_record(group_launch)
    (kernel,) = record.kernels
    values = kernel.values()
    whole = (group_launch / FILE).read_text()
    wrong: dict[str, float] = {
        "ptr_q": values["ptr_k"],
        "ptr_qseq": values["ptr_kseq"],
        "scalar": 2 * values["scalar"],
        "s_Hs": values["s_Hs"] * 2,
        "s_v_Seqs": 0,
        "s_o_Hs": values["s_o_Hs"] + 8,
        "s_lse_Hs": values["s_lse_Hs"] - 4,
        "s_gqa": 2,
        "s_opt": 5 if values["s_opt"] == 3 else 3,
    }
    harmless = {"s_opt"}  # of how the kernel orders its work, which this one does not read
    for name, value in wrong.items():
        tamper(group_launch, {name: value})
        found = diagnosis_of(group_launch)
        assert found.fault == "arguments", name
        assert [each.argument for each in found.mismatches] == [name]
        assert found.replayed.is_right == (name in harmless), name
        assert found.corrected.is_right
        (group_launch / FILE).write_text(whole)
    tamper(group_launch, {"ptr_o": values["ptr_o"] + 2}, grid=[3, 1, 1])
    found = diagnosis_of(group_launch)
    address, grid = map(str, found.mismatches)
    assert found.fault == "arguments"
    assert " is out + 2, expected out: " in address
    assert "(3, 1, 1), expected (3, 5, 1)" in grid


def test_a_stride_of_a_compiled_kernel(rng, recorded):
    with emulate("gfx950"):
        compiled(rng)
    forward, backward = recorded()
    for folder, name, divisor in (
        (forward, "modifiers.bias_head", "attention.gqa.divisor"),
        (backward, "gradients.dk_strides.seq", "line_heads.divisor"),
    ):
        values = read_record(folder).kernels[-1].values()
        last = len(read_record(folder).kernels) - 1
        tamper(folder, {name: values[name] + 2, divisor: values[divisor] + 1}, kernel=last)
        found = diagnosis_of(folder)
        assert found.fault == "arguments", folder
        named = {each.argument for each in found.mismatches}
        reciprocal = divisor.replace("divisor", "reciprocal")
        assert {name, divisor, reciprocal} <= named | {"tiles"}, named


def test_every_address_and_stride_of_a_call_is_looked_at(rng, recorded):
    """What is expected follows from names: none may be missed because it is called otherwise."""
    with emulate("gfx950"):
        compiled(rng)
    tensors = r"(\w+\.)?(q|k|v|out|dout|dq|dk|dv)(_strides)?([._](seq|head|batch))?"
    for folder in recorded():
        record = read_record(folder)
        for kernel in record.kernels:
            named = {name for name in kernel.values() if re.fullmatch(tensors, name)}
            assert len(named) >= 16
            assert named <= {each.argument for each in expectations(record, kernel)}


def test_scales_of_tokens_are_looked_at(rng, recorded):
    with emulate("gfx950"):
        scaled(rng)
    (folder,) = recorded()
    record = read_record(folder)
    (kernel,) = record.kernels
    named = {name for name in kernel.values() if "_token_" in name}
    assert len(named) == 8
    assert named <= {each.argument for each in expectations(record, kernel)}


def test_the_grid_of_every_kernel_of_splits_is_looked_at(rng, recorded):
    with emulate("gfx950"):
        split(rng)
    (folder,) = recorded()
    record = read_record(folder)
    for kernel in record.kernels:
        assert "grid" in {each.argument for each in expectations(record, kernel)}


def wrong_kernel(mnemonic: str, other: str) -> bytes:
    """The plain kernel with another instruction in the place of each of one kind."""
    listing = plain_listing(GROUP_KERNEL, "gfx942")
    assert f"\t{mnemonic} " in listing
    listing = listing.replace(f"\t{mnemonic} ", f"\t{other} ")
    return assemble(renamed(listing, PLAIN_NAME, GROUP_KERNEL.symbol), "gfx942")


@pytest.mark.usefixtures("ready_first")
def test_a_wrong_kernel_is_the_kernels_fault(rng, recorded, use_tree, tmp_path):
    """It rounds down what it should, and takes the wrong logarithm: the arguments are right."""
    write_tree(tmp_path / "tree", "gfx942", [GROUP_KERNEL])
    file = tmp_path / "tree" / "gfx942" / "fmha_v3_fwd" / "MI300" / GROUP_KERNEL.file
    file.write_bytes(wrong_kernel("v_log_f32_e32", "v_exp_f32_e32"))
    use_tree(tmp_path / "tree")
    group_call(rng)
    (folder,) = recorded()
    found = diagnosis_of(folder)
    assert (found.fault, found.mismatches, found.replaced) == ("kernel", (), ())
    assert found.replayed.judged["out"].is_right
    assert not found.replayed.judged["lse"].is_right
    values = read_record(folder).kernels[0].values()
    tamper(folder, {"s_o_Hs": values["s_o_Hs"] * 2})
    assert diagnosis_of(folder).fault == "arguments and kernel"


def test_regions_may_adjoin(group_launch):
    """The address of the end of one is that of the next one's beginning."""
    record = read_record(group_launch)
    document = json.loads((group_launch / FILE).read_text())
    end, moved = 1 << 20, {}
    # Those that others may follow without losing the alignment that kernels ask for come first.
    for i, region in sorted(enumerate(record.regions), key=lambda each: each[1].size % 16):
        moved[i] = document["regions"][i]["address"] = end
        end += region.size
    (group_launch / FILE).write_text(json.dumps(document))
    (kernel,) = record.kernels
    pointers = {}
    for name, (_, letter) in INTERFACES[kernel.interface].leaves.items():
        address = int(kernel.values()[name])
        for i, region in enumerate(record.regions):
            if letter == "Q" and region.address <= address < region.address + region.size:
                pointers[name] = moved[i] + address - region.address
    tamper(group_launch, pointers)
    found = diagnosis_of(group_launch)
    assert (found.fault, found.mismatches) == ("none", ())


def test_a_code_object_that_was_replaced_is_told(group_launch):
    (kernel,) = read_record(group_launch).kernels
    file = group_launch / kernel.code_object
    file.write_bytes(wrong_kernel("v_log_f32_e32", "v_exp_f32_e32"))
    found = diagnosis_of(group_launch)
    assert (found.fault, found.replaced) == ("kernel", (kernel.code_object,))
    file.write_bytes(file.read_bytes()[:-100])
    assert "hipErrorInvalidImage" in diagnosis_of(group_launch).replayed.failure


def test_a_result_that_cannot_be_repeated_is_nobodys_fault(group_launch):
    with edited(group_launch) as document:
        result = document["results"]["out"]
        content = bytearray((group_launch / result["file"]).read_bytes())
        torch.frombuffer(content, dtype=torch.float16)[5] = 77
        replace_content(group_launch, result, bytes(content))
    assert diagnosis_of(group_launch).fault == "neither"


# ---- What is recorded ----------------------------------------------------------------------------


@pytest.mark.usefixtures("ready_first")
def test_a_recorded_launch_tells_its_arguments_by_name(group_launch):
    document = json.loads((group_launch / FILE).read_text())
    (kernel,) = document["kernels"]
    assert kernel["symbol"] == GROUP_KERNEL.symbol
    assert kernel["grid"] == [3, 5, 1]
    arguments = {each["name"]: each for each in kernel["arguments"]}
    assert arguments["ptr_kseq"]["points to"] == "cu_seqlens_k"
    rows = sum(x for x, _ in LENGTHS)
    assert arguments["s_lse_Hs"]["value"] == 4 * rows
    assert arguments["s_lse_Hs"]["offset"] == 464
    assert bytes.fromhex(arguments["s_lse_Hs"]["bytes"]) == (4 * rows).to_bytes(4, "little")
    assert os.stat(group_launch).st_mode & 0o077 == 0, "others could read the tensors"


def test_tensors_may_be_left_out(rng, recorded, monkeypatch):
    """Lengths stay; inputs are made up, and a wrong stride is found all the same."""
    monkeypatch.setenv("JITFMHA_RECORD_DATA", "0")
    with emulate("gfx950"):
        compiled(rng)
    forward, backward = recorded()
    for folder in (forward, backward):
        assert {path.suffix for path in folder.iterdir()} == {".json", ".co"}
        record = read_record(folder)
        assert all(region.sha256 for region in record.regions)
        assert all(len(result.sha256) == 64 for result in record.results.values())
        found = diagnosis_of(folder)
        assert (found.fault, found.recorded) == ("none", None)
    values = read_record(forward).kernels[0].values()
    tamper(forward, {"attention.lse_head": values["attention.lse_head"] - 4})
    found = diagnosis_of(forward)
    assert (found.fault, found.replayed.judged["lse"].is_right) == ("arguments", False)


def test_the_limits_of_what_is_recorded(rng, recorded, monkeypatch):
    q, k, v = tensors(rng, (1, 3, 1, 64), (1, 3, 1, 64), (1, 3, 1, 64))
    monkeypatch.setattr(recording_runtime, "MOST_BYTES", 3 * q.nbytes)
    monkeypatch.setattr(recording, "MOST_LAUNCHES", 2)
    monkeypatch.setattr(recording, "_numbers", itertools.count(1))
    monkeypatch.setattr(recording_runtime, "_warned", set())
    with emulate("gfx950"), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            fmha_fwd(q, k, v)
    texts = [str(each.message) for each in warned]
    assert sum("are not recorded" in text for text in texts) == 1
    assert sum("has no tensors" in text for text in texts) == 1
    first, second = recorded()
    written = [
        sum(path.stat().st_size for path in folder.glob("*.bin")) for folder in (first, second)
    ]
    assert written == [3 * q.nbytes, 0]
    assert diagnosis_of(second).fault == "none"


@pytest.mark.usefixtures("ready_first")
def test_a_launch_that_fails_is_recorded(rng, recorded, use_tree, tmp_path):
    """Its manifest promises larger tiles than the kernel has, so that it reads beyond q."""
    path = write_tree(tmp_path / "tree", "gfx942", [GROUP_KERNEL])
    write_manifest(path.parent, [dataclasses.replace(GROUP_KERNEL, ts_qo=1 << 15).row])
    use_tree(tmp_path / "tree")
    problem = AmdProblem(rng, torch.float16, (64, 64), (1, 1), lengths=((65, 66),) * 2, mask=2)
    with emulate("gfx942"), pytest.raises(HipError):
        problem.run()
    (folder,) = recorded()
    found = diagnosis_of(folder)
    assert found.fault == "kernel"
    assert "outside of all memory" in found.replayed.failure


def test_nothing_is_between_where_nothing_is_recorded(rng, monkeypatch):
    monkeypatch.delenv("JITFMHA_RECORD", raising=False)
    q, k, v = tensors(rng, (1, 3, 1, 64), (1, 3, 1, 64), (1, 3, 1, 64))
    problem = make_problem(Arguments(q, k, v))
    with emulate("gfx950") as run:
        target = TARGET_HERE.get()
        assert target.runtime is run.emulation
        assert plan_for(problem, target).__class__.__module__.startswith("jitfmha.kernels")
        monkeypatch.setenv("JITFMHA_RECORD", "/nowhere")  # read when the target was made
        assert plan_for(problem, target).__class__.__module__.startswith("jitfmha.kernels")
    with emulate("gfx950") as run:
        target = TARGET_HERE.get()
        assert isinstance(target.runtime, RecordingRuntime)
        assert target.runtime.recorded is run.emulation
        assert emulation() is run.emulation


def test_data_is_one_or_zero(recorded, monkeypatch):
    monkeypatch.setenv("JITFMHA_RECORD_DATA", "some")
    with pytest.raises(ValueError, match="JITFMHA_RECORD_DATA is 'some'"), emulate("gfx950"):
        pass


# ---- The command, and what is damaged ------------------------------------------------------------


@pytest.mark.usefixtures("ready_first")
def test_the_command(group_launch, capsys):
    assert main(["replay", str(group_launch.parent), "--arguments"]) == 0
    shown = capsys.readouterr().out
    assert "Arguments and kernels are right." in shown
    assert "ptr_qseq_padding" in shown
    values = read_record(group_launch).kernels[0].values()
    (line,) = (x for x in shown.splitlines() if x.startswith("ptr_q "))
    assert line.split() == ["ptr_q", hex(int(values["ptr_q"]))]
    tamper(group_launch, {"s_lse_Hs": values["s_lse_Hs"] + 4})
    assert main(["replay", str(group_launch)]) == 1
    shown = capsys.readouterr().out
    assert "The arguments are at fault" in shown
    assert "s_lse_Hs of _ZN5aiter" in shown
    assert main(["replay", str(group_launch), "--json"]) == 1
    (document,) = json.loads(capsys.readouterr().out)
    assert (document["fault"], document["mismatches"][0]["argument"]) == ("arguments", "s_lse_Hs")


# What takes the place of a field; LEFT_OUT of the field itself.
LEFT_OUT = object()
DAMAGES = (LEFT_OUT, None, True, -1, 0, 1, 7.5, 2**31, 2**63, 2**70, "", "x", [], [1], {}, {"a": 1})


def places_of(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """The paths to all fields, and to what holds them."""
    below = value.items() if isinstance(value, dict) else enumerate(value)
    for name, each in below:
        yield (*path, name)
        if isinstance(each, (dict, list)):
            yield from places_of(each, *path, name)


def damage(document: Any, path: Sequence[Any], value: Any) -> None:
    *names, last = path
    for name in names:
        document = document[name]
    if value is LEFT_OUT:
        del document[last]
    else:
        document[last] = value


def link_out(folder: Path) -> None:
    """A region's file is a link to what is not in the folder."""
    path = folder / "region_0.bin"
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")


def put_a_pipe(folder: Path) -> None:
    """In the place of a region's file."""
    (folder / "region_0.bin").unlink()
    os.mkfifo(folder / "region_0.bin")


def spoil_region(folder: Path, change: Callable[[bytes], bytes]) -> None:
    path = folder / "region_0.bin"
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda folder: (folder / FILE).unlink(), "cannot be read: No such file"),
        (lambda folder: (folder / FILE).write_text("{"), "is not JSON"),
        (lambda folder: (folder / FILE).write_text('{"format": 2}'), "has format 2, expected 1"),
        (("problem", None), "is damaged"),
        (("problem", "heads_k", 9), "problem.heads_k is 9, and the tensors say"),
        (("chip", LEFT_OUT), "chip is missing"),
        (("kernels", 0, "interface", "other"), "'other'"),
        (("kernels", 0, "grid", [1, 2]), "kernels[0].grid is [1, 2], expected"),
        (("kernels", 0, "grid", [1 << 31, 1, 1]), "more than 4294967295 threads along an axis"),
        (("kernels", 0, "arguments", 5, "value", 1.5), "value 1.5"),
        (("kernels", 0, "arguments", 5, "bytes", "00"), "has 1 bytes"),
        (("kernels", 0, "code_object", "no.co"), "no.co cannot be read"),
        (("kernels", 0, "code_object", "../x"), "not in the folder"),
        (("kernels", 0, "code_object", ".."), "names '..' is not in"),
        (("kernels", 0, "code_object", 7), "code_object is 7, expected"),
        (("regions", 0, "file", "/dev/zero"), "'/dev/zero', which is"),
        (link_out, "which is not in"),
        (put_a_pipe, "region_0.bin cannot be read: it is not a regular"),
        (("tensors", "q", "region", 99), "region 99"),
        (("tensors", "q", "shape", [1 << 40, 1, 1]), "not lie in its"),
        (("tensors", "q", "offset", 2), "not lie in its"),
        (("tensors", "q", "dtype", "float12"), "'float12'"),
        (("tensors", "v", LEFT_OUT), "tensors has no v"),
        (lambda folder: spoil_region(folder, lambda x: x[:-1]), "bytes, and regions[0] says"),
        (lambda folder: spoil_region(folder, lambda x: x + bytes(20)), "bytes, and regions[0]"),
        (
            lambda folder: spoil_region(folder, lambda x: x[:-1] + bytes([x[-1] ^ 1])),
            "is damaged: its SHA-256 is not what regions[0] says",
        ),
    ],
)
def test_a_damaged_folder_is_refused(group_launch, capsys, spoil, complaint):
    if callable(spoil):
        spoil(group_launch)
    else:  # a field's path, and what takes its place
        *path, value = spoil
        with edited(group_launch) as document:
            damage(document, path, value)
    assert main(["replay", str(group_launch)]) == 2
    assert complaint in capsys.readouterr().err


def refusal_of(folder: Path) -> str | None:
    try:
        read_record(folder)
    except RecordError as error:
        return str(error)
    return None


@pytest.fixture(params=[group_call, compiled])
def launch_to_damage(
    request: pytest.FixtureRequest, rng: torch.Generator, recorded: Recorded
) -> Path:
    """Of packed sequences, and of a backward pass with features."""
    with emulate("gfx950"):
        request.param(rng)
    return recorded()[-1]


def test_every_damaged_field_is_refused_or_harmless(launch_to_damage, rng, capsys):
    """What is refused names its place; what is not, such as an address, is compared as it is."""
    text = (launch_to_damage / FILE).read_text()
    whole = json.loads(text)
    cases = list(itertools.product(places_of(whole), DAMAGES))
    reruns = refused = 0
    for i in torch.randperm(len(cases), generator=rng)[:250].tolist():
        path, value = cases[i]
        document = json.loads(text)
        damage(document, path, value)
        if document == whole:
            continue
        (launch_to_damage / FILE).write_text(json.dumps(document))
        error = refusal_of(launch_to_damage)
        if error is None:
            if value == 2**31 and "grid" in path:
                continue  # that is run, workgroup by workgroup, for hours
            reruns += 1
            if reruns <= 5:
                assert main(["replay", str(launch_to_damage), "--instruction-budget", "999999"]) < 3
                capsys.readouterr()
            continue
        refused += 1
        assert error.startswith(str(launch_to_damage)), f"{path}: {value!r}"
        if refused % 20 == 0:
            assert main(["replay", str(launch_to_damage)]) == 2
            assert error in capsys.readouterr().err
    assert refused > 50


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--device", "cuda:99"), "no GPU that torch can use"),
        (("--device", "cuda:0", "--sanitize"), "--sanitize is for the emulator"),
        (("--random-order", "-1"), "--random-order: -1"),
        (("--instruction-budget", "0"), "--instruction-budget: 0"),
        (("--seed", "-1"), "--seed: -1"),
    ],
)
def test_flags_without_meaning_are_refused(group_launch, capsys, flags, complaint):
    assert main(["replay", str(group_launch), *flags]) == 2
    assert complaint in capsys.readouterr().err


def test_what_runs_on_a_gpu(group_launch):
    """The emulator's HIP functions stand in for the GPU's, as tensors of the CPU do."""
    record = read_record(group_launch)
    library = Emulator().library

    def machine() -> GpuMachine:
        return GpuMachine(torch.device("cpu"), library)

    assert diagnose(record, machine).fault == "none"
    (kernel,) = record.kernels
    nowhere = Started("nonsense", record.image(kernel), kernel.grid, kernel.block, 0, b"")
    with pytest.raises(RerunError, match="hipModuleGetFunction failed with HIP's error 500"):
        machine().run(nowhere, [])
