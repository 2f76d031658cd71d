"""The flags of all commands. Nothing here needs torch, for which ``--help`` would wait."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from ..ahead.ck_architectures import ck_architectures
from ..ahead.profile_names import PROFILE_NAMES, receipt_name
from ..amd.chips import Arch
from ..bench import SUITES
from ..version import __version__
from .launch_description import LaunchDescription, LaunchDescriptionError
from .lines import folded

_EXIT_CODES = (
    "exit codes: 0 done, 1 failed (also: a verification failed or a bar was missed), "
    "2 usage error, 130 interrupted"
)
_ARCHS = get_args(Arch)
_CVTS = ("rtne", "rtna", "rtz")
_MODES = ("gm0", "gm1")
_EIGHT_BITS = ("fp8", "bf8", "int8")
_OUT_DTYPES = ("bf16", "fp16", "fp32")
_DIRECTIONS = ("forward", "backward")
CALLS = ("attention", "softmax", "rms_norm", "layer_norm", "matmul")
_DEVICE = "cpu or cuda; or a GPU that is not here, as gfx950 or MI308X (default: cpu)"
_SHAPES = (
    "as seqlen=4096,heads=16,kv_heads=4,hdim=64,dtype=fp16,mask=causal,direction=backward "
    "(batch, seqlen_k and hdim_v, too; what is left out has a default); or the name of a set: "
    "seqlens, causal, training, decode; or @FILE, with a shape on each line"
)
_JOBS = "how many are compiled at a time (default: as many as there are processors)"
_HDIMS = "head dimensions, as 128, or as 192x128 where v has another one (default: "


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="jitfmha",
        description="Fused attention for AMD Instinct GPUs and the CPU, compiled on first use.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"jitfmha {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for add in (
        *(_add_demo, _add_doctor, _add_explain, _add_kernels, _add_hsa, _add_build, _add_export),
        *(_add_cache, _add_tune, _add_bench, _add_hip, _add_profile, _add_run_kernel),
        *(_add_run_program, _add_replay),
    ):
        add(commands)
    return parser


def _command(commands: Any, name: str, text: str, description: str = "", **more: Any) -> Any:
    """The parser of a command or of an action, and its ``--json``."""
    parser = commands.add_parser(name, help=text, description=description or text, **more)
    parser.add_argument("--json", action="store_true", help="print JSON on stdout and nothing else")
    return parser


def _mask(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _hdims(text: str) -> tuple[int, int]:
    """Read the head dimensions of q and k and of v from a text such as 128 or 192x128."""
    hdim_q, separator, hdim_v = text.partition("x")
    try:
        return int(hdim_q), int(hdim_v if separator else hdim_q)
    except ValueError:
        text = f"{text} is not a number, nor two with an x between"
        raise argparse.ArgumentTypeError(text) from None


def _several(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Read values that have commas between."""
    return lambda text: [read(each) for each in text.split(",")]


def _dtypes(text: str) -> str | tuple[str, str]:
    """Read the data type of all inputs, or that of q and that of k and v with a comma between."""
    of_q, separator, of_kv = text.partition(",")
    return (of_q, of_kv) if separator else text


def _from(least: int, bits: int) -> Callable[[str], int]:
    """What takes a number from ``least`` to ``2**bits - 1``."""

    def number(text: str) -> int:
        if not least <= int(text) < 2**bits:
            raise argparse.ArgumentTypeError(f"{text}: not from {least} to 2**{bits} - 1")
        return int(text)

    return number


def _file(text: str) -> Path:
    """A file that is there: nobody should wait for torch to read that it is not."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, where a file is expected")
    if not path.exists():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return path


def _launch(text: str) -> LaunchDescription:
    """A launch whose fields are right."""
    path = _file(text)
    try:
        return LaunchDescription.read(path)
    except LaunchDescriptionError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from error
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _profile(text: str) -> str:
    """The name of a profile or a receipt, or a receipt's number."""
    try:
        return text if text in PROFILE_NAMES else receipt_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _shape(text: str) -> str:
    """A shape, the name of a set, or a file of shapes that is there."""
    if text.startswith("@"):
        _file(text[1:])
    return text


def _folder(text: str) -> Path:
    """A folder that is there."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return path


def _actions(commands: Any, name: str, text: str, description: str, **more: Any) -> Any:
    parser = commands.add_parser(name, help=text, description=description, **more)
    return parser.add_subparsers(dest="action", required=True, metavar="action")


# ---- The machine, and one call -------------------------------------------------------------------


def _add_demo(commands: Any) -> None:
    parser = _command(
        commands,
        "demo",
        "build, run, verify and time two problems of real size",
        "Detect the target, build what is missing, run a batch and a ragged causal problem, "
        "compare with torch's scaled_dot_product_attention, and print what both take. The exit "
        "code is 1 when a result is wrong: when its error is over twice SDPA's.",
    )
    parser.add_argument("--dtype", default="bf16", choices=["fp32", "bf16", "fp16"])


def _add_doctor(commands: Any) -> None:
    parser = _command(
        commands,
        "doctor",
        "check this machine, and name a remedy for what is wrong; for bug reports, too",
        "Check compilers, torch, GPUs, driver, HIP runtime, cache and code objects, then run and "
        "verify a small call on every target that is there: the CPU, what JITFMHA_EMULATE names, "
        "and every GPU. With the versions and the environment that are printed, too, this is what "
        "a bug report needs. The exit code is 1 when a check failed; warnings do not count.",
    )
    parser.add_argument(
        "--gpu-report",
        type=Path,
        metavar="FILE.json",
        help="with an AMD GPU: also run the tests for GPUs, from a checkout for ten minutes at "
        "most, time calls beside what they are estimated to take, and write all of it to one file",
    )


def _add_sizes(flag: Any, *, batch: int | None = None, seqlen: int | None = None) -> None:
    """How large a call is that is not made; None where a flag may be missing."""
    flag("--batch", type=int, default=batch, help="sequences (default: 1)")
    flag("--heads", type=int, default=8, help="heads of q (default: 8)")
    flag("--heads-k", type=int, help="heads of k and v (default: as q)")
    flag("--seqlen", type=int, default=seqlen, help="seqlen of q (default: 1024)")
    flag("--seqlen-k", type=int, help="seqlen of k and v (default: as q)")
    flag("--hdim", type=int, default=128, help="hdim of q and k (default: 128)")
    flag("--hdim-v", type=int, help="hdim of v (default: as q)")
    flag("--mask", type=_mask, default="none", help="as in fmha_fwd, e.g. causal or b:128,0")


def _add_features(flag: Any) -> None:
    """What else such a call has."""
    features = "what else the call has, such as alibi, bias, dropout or column_major_v"
    flag("--features", nargs="*", default=[], metavar="FEATURE", help=features)
    flag("--page-size", type=int, help="keys of a page (default: no pages)")
    flag("--num-splits", type=int, default=0, help="of the keys (default: 0, any)")


def _add_explain(commands: Any) -> None:
    parser = _command(
        commands,
        "explain",
        "say which kernel a call would take, and why no other",
        "Print the plan for a problem: the target, the kernel, and for every kernel family that "
        "is not taken the reasons. Nothing is allocated, built or launched. The exit code is 1 "
        "when no kernel serves the problem.",
    )
    flag = parser.add_argument
    dtypes = [
        "fp32",
        "bf16",
        "fp16",
        "fp8_e4m3fnuz",
        "fp8_e4m3fn",
        "bf8_e5m2fnuz",
        "bf8_e5m2",
        "int8",
    ]
    layouts = ["bshd", "bhsd", "sbhd", "qkvpacked"]
    flag("--device", default="cpu", help=f"where the tensors are, as {_DEVICE}")
    named = f"of q: {', '.join(dtypes)} (default: bf16)"
    flag("--dtype", default="bf16", choices=dtypes, metavar="DTYPE", help=named)
    of_kv = "of k and v (default: as q)"
    flag("--kv-dtype", choices=dtypes, metavar="DTYPE", help=of_kv)
    rounding = "how probabilities become bf16 on gfx942 (default: rtne)"
    flag("--bf16-cvt", default="rtne", choices=_CVTS, help=rounding)
    _add_sizes(flag)
    flag("--window", default="-1,-1", metavar="LEFT,RIGHT", help="window_size (default: -1,-1)")
    flag("--layout", default="bshd", choices=layouts, help="of q, k and v in memory")
    lengths = "lengths of packed sequences (gm1), in place of --batch and --seqlen"
    flag("--varlen", metavar="N,N,...", help=lengths)
    flag("--varlen-k", metavar="N,N,...", help="their lengths in k and v (default: as --varlen)")
    flag("--lse", action="store_true", help="with return_lse=True")
    flag("--direction", default="forward", choices=("forward", "backward"))
    flag("--deterministic", action="store_true", help="of backward: the same bits in every run")
    _add_features(flag)
    of = "attention (default), or what stands around it, whose sizes are -M, -N and -K"
    flag("--of", default=CALLS[0], choices=CALLS, help=of)
    for name, what_it_is in (("M", "rows"), ("N", "columns"), ("K", "what matmul sums over")):
        flag(f"-{name}", type=_from(0, 31), help=f"{what_it_is}, of other calls than attention")
    of_out = "of the result (default: as the inputs, with 8 bits bf16)"
    flag("--out-dtype", choices=dtypes, metavar="DTYPE", help=of_out)
    flag("--residual", action="store_true", help="one is added to rows first")


# ---- Kernels and code objects --------------------------------------------------------------------


def _add_kernels(commands: Any) -> None:
    actions = _actions(
        commands,
        "kernels",
        "list what AMD GPUs are served, or say which rules a combination breaks",
        "What AMD GPUs are served at all, and which rules a combination breaks, each with its "
        "source. Which kernel one call takes, and why no other, is what `explain` says.",
    )
    _command(
        actions,
        "rules",
        "List every rule with its source: of calls, of tiles, and of configurations of CK's "
        "dispatcher, with what there is of these for kernels of this package.",
    )
    lister = _command(
        actions,
        "list",
        "List the kernels for each architecture: the tiles of those that are compiled for a call, "
        "and those that come ready.",
    )
    validator = _command(
        actions,
        "validate",
        "Say which rules a combination breaks; the exit code is 1 when it breaks any, and is not "
        "served.",
    )
    known = tuple(ck_architectures())
    lister.add_argument("--arch", choices=known, help="one of them (default: all)")
    served = f"one of them, or {', '.join(x for x in known if x not in _ARCHS)} (default: both)"
    validator.add_argument("--arch", choices=known, metavar="|".join(_ARCHS), help=served)
    flag = validator.add_argument
    config = "a configuration of CK's dispatcher, in place of all flags below: signature, algorithm"
    flag("--config", type=_file, metavar="FILE.json", help=f"{config} and arch")
    flag("--dtype", default="bf16", help="of q, as bf16 (default) or fp8_e4m3fn")
    flag("--kv-dtype", help="of k and v (default: as q)")
    flag("--out-dtype", help="of the output (default: as q, with 8 bits bf16)")
    _add_sizes(flag, batch=1, seqlen=1024)
    flag("--mode", default="gm0", help="gm0 (default) or gm1")
    flag("--direction", default="forward", help="forward (default) or backward")
    flag("--layout", default="bshd", help="bshd (default), bhsd or sbhd")
    _add_features(flag)


def _add_hsa(commands: Any) -> None:
    actions = _actions(
        commands,
        "hsa",
        "import, list, show, disassemble and verify code objects",
        "Import, list, show, disassemble and verify code objects.",
        epilog="docs/code_objects.md goes through all of it on an example.",
    )
    _add_import(actions)
    lister = _command(actions, "list", "List the kernels of a tree, or of all that calls use.")
    lister.add_argument("tree", type=_folder, nargs="?", metavar="TREE", help="a folder")
    lister.add_argument("--arch", choices=_ARCHS, help="one of them (default: both)")
    shower = _command(
        actions, "show", "Show what a code object says: registers, LDS, symbols, arguments."
    )
    decoder = _command(actions, "disasm", "Disassemble a kernel with the emulator's decoder.")
    for parser in (shower, decoder):
        parser.add_argument("code_object", type=_file, metavar="FILE.co")
    decoder.add_argument("--kernel", metavar="NAME", help="its symbol, where there are several")
    verifier = _command(
        actions,
        "verify",
        "Check whole trees: manifests, files, symbols, metadata, architecture. The exit code is 1 "
        "where there is a problem.",
    )
    trees = "folders (default: those that calls use)"
    verifier.add_argument("trees", type=_folder, nargs="*", metavar="TREE", help=trees)
    waits = _command(
        actions,
        "waits",
        "Look for instructions that come too early after another one on some path, without running "
        "them. The exit code is 1 where there are any.",
    )
    files = "(default: what was compiled into the cache)"
    waits.add_argument("code_objects", type=_file, nargs="*", metavar="FILE.co", help=files)


def _add_import(actions: Any) -> None:
    text = "Add a forward kernel of AITER's interface to a tree, from its assembly listing."
    parser = _command(
        actions,
        "import",
        text,
        f"{text} It is assembled, linked, checked, and run on the emulator against a float64 "
        "reference. Without --into it goes to the tree that JITFMHA_HSA_DIR names, else to "
        "jitfmha/hsa in your folder for data, which calls look into before the package's own.",
    )
    flag = parser.add_argument
    flag("listing", type=_file, metavar="FILE.s")
    flag("--arch", choices=_ARCHS, required=True)
    variants = "of gfx942: MI300, MI308 or both"
    flag("--variant", nargs="+", default=[], metavar="MI308", help=variants)
    dtypes = ("bf16", "fp16", "fp8bf16")
    flag("--dtype", choices=dtypes, required=True, help="fp8bf16: bf16 out")
    hdims = "of q and k, and of v"
    flag("--hdim", type=int, nargs=2, required=True, metavar="N", help=hdims)
    flag("--mask", type=int, choices=(0, 1, 2), required=True)
    flag("--mode", choices=_MODES, required=True)
    flag("--bf16-cvt", choices=_CVTS, default="rtne", help="(default: rtne)")
    flag("--tile", type=int, nargs=2, required=True, metavar="N", help="rows of q, and of k")
    threads = "of a workgroup (default: 512; 256 for 192 128)"
    flag("--threads", type=int, metavar="N", help=threads)
    flag("--kernel", metavar="NAME", help="its symbol, where there are several")
    flag("--name", help="of the kernel in the tree (default: as in the listing)")
    flag("--into", type=Path, metavar="DIR", help="another tree")
    replaced = "a kernel that serves the same, or has the same file"
    flag("--replace", action="store_true", help=replaced)
    flag("--sanitize", action="store_true", help="run it with the emulator's sanitizer")
    flag("--seed", type=_from(0, 63), help="of the inputs of its run (default: a fresh one)")


# ---- Builds --------------------------------------------------------------------------------------


def _add_build(commands: Any) -> None:
    parser = _command(
        commands,
        "build",
        "build launchers ahead of the first call",
        "Build the launcher of every combination of the flags into the cache, so that no call has "
        "to. A launcher that is in the cache already is not built again.",
    )
    flag = parser.add_argument
    flag(
        "--profile",
        type=_profile,
        metavar="NAME",
        help="a named set of combinations: inference, training, flash-attn, aiter or pytorch; or a "
        "receipt of CK's by name or number, as flash_fwd or 2; the flags below take the place of "
        "what it has of the same",
    )
    declared = "JSON or TOML that declares what is built, in place of the profile and its flags"
    flag("--set", type=_file, metavar="FILE", help=declared)
    dtypes = (
        "as bf16, or of q and of k and v as bf16,fp8_e4m3fn (default: those of fp32, bf16 and fp16 "
        "that the device serves)"
    )
    flag("--dtype", nargs="+", type=_dtypes, metavar="DTYPE", help=dtypes)
    hdims = f"{_HDIMS}those of 64 and 128 that the device serves)"
    flag("--hdim", nargs="+", type=_hdims, metavar="HDIM", help=hdims)
    masks = "as in fmha_fwd (default: none causal)"
    flag("--mask", nargs="+", type=_mask, metavar="MASK", help=masks)
    flag("--mode", nargs="+", choices=_MODES, help="batch, packed (default: both)")
    directions = "training needs both (default: forward)"
    flag("--direction", nargs="+", choices=_DIRECTIONS, help=directions)
    features = "what calls have beside that, as plain, alibi or bias+dropout (default: plain)"
    flag("--features", nargs="+", metavar="FEATURES", help=features)
    of_out = "of the outputs of calls with 8 bits (default: bf16)"
    flag("--out-dtype", nargs="+", choices=_OUT_DTYPES, help=of_out)
    flag("--device", default="cpu", help=f"where the calls will run, as {_DEVICE}")
    flag(
        "--isa",
        help="the instruction set of the CPU that the calls will run on, such as amx, avx512_bf16, "
        "avx512 or avx2 (default: what this one takes)",
    )
    flag("--jobs", type=_from(1, 16), metavar="N", help=_JOBS)
    listed = "build nothing; list what would be built, and what it took before, where that is known"
    flag("--dry-run", action="store_true", help=listed)


def _add_export(commands: Any) -> None:
    parser = _command(
        commands,
        "export",
        "write a C++ library with the AMD kernels, which needs no torch",
        "Write the sources of a C++17 library with the kernels embedded, a header, CMake and "
        "pkg-config files. Kernels are those that come ready; beside these, what the flags name "
        "is compiled now. The folder is complete, or it is not there.",
    )
    flag = parser.add_argument
    flag("--arch", action="append", required=True, choices=_ARCHS, help="may be given twice")
    folder = "absent, empty, or an earlier export"
    flag("-o", "--output", type=Path, required=True, metavar="DIR", help=folder)
    profile = (
        "also compile what a profile or a receipt of `build` has, the flags below in place of its "
        "parts"
    )
    flag("--profile", type=_profile, metavar="NAME", help=profile)
    declared = "also compile what a file declares, as `build --set` takes it"
    flag("--set", type=_file, metavar="FILE", help=declared)
    flag("--direction", nargs="+", choices=_DIRECTIONS, help="(default: both)")
    dtypes = ["bf16", "fp16", *_EIGHT_BITS, "fp32"]
    named = f"of {', '.join(dtypes)} (default: bf16 fp16 fp8); backward has none of 8 bits"
    flag("--dtype", nargs="+", choices=dtypes, metavar="DTYPE", help=named)
    kept = "of k and v beside a q of more bits, of kernels that are compiled (default: as q)"
    flag("--kv-dtype", choices=_EIGHT_BITS, help=kept)
    of_out = "of the outputs of calls with 8 bits, of kernels that are compiled (default: bf16)"
    flag("--out-dtype", nargs="+", choices=_OUT_DTYPES, help=of_out)
    hdims = f"{_HDIMS}all that come ready, and of compiled kernels 64 and 128)"
    many = {"nargs": "+", "type": _several(_hdims), "help": hdims}
    flag("--hdim", "--hdims", metavar="HDIM", **many)
    features = (
        "compile kernels for calls with these, as bias,dropout for each of two, bias+dropout for "
        "both, plain also for what comes ready, or append for those that append keys to caches "
        "(default: plain for what does not come ready)"
    )
    flag("--features", nargs="+", type=_several(str), metavar="FEATURES", help=features)
    bias = "of a bias that is added (default: as q, beside 8 bits bf16)"
    flag("--bias-dtype", choices=["bf16", "fp16", "fp32"], help=bias)
    few = "also compile the forward kernels of few queries, as decoding and GQA have them"
    flag("--few-queries", action="store_true", help=few)
    lists = "also compile those with persistent workgroups: of uneven sequences, and under masks"
    flag("--persistent", action="store_true", help=lists)
    far = "also compile those for rows that are 16 MiB or more apart"
    flag("--far-rows", action="store_true", help=far)
    flag("--mask", nargs="+", choices=["none", "causal"], help="(default: both)")
    flag("--mode", nargs="+", choices=_MODES, help="batch, packed (default: both)")
    rounding = "how gfx942 rounds to bf16 (default: all three, and of compiled kernels rtne)"
    flag("--bf16-cvt", nargs="+", choices=_CVTS, help=rounding)
    flag("--jobs", type=_from(1, 16), metavar="N", help=_JOBS)


def _add_cache(commands: Any) -> None:
    text = "list, clear or locate the build cache"
    actions = _actions(commands, "cache", text, "Look at the build cache, or clear it.")
    _command(actions, "list", "List the entries; the exit code is 1 when one is damaged.")
    _command(actions, "clear", "Remove every entry and build log. Running processes keep theirs.")
    _command(actions, "path", "Print where the cache is. It need not exist yet.")


def _add_tune(commands: Any) -> None:
    parser = _command(
        commands,
        "tune",
        "time what can serve calls on this machine, and choose by that from then on",
        "Time every kernel that can serve the calls, with its tiles, key splits and, on the CPU, "
        "numbers of threads, and keep the times beside the cache. Calls of the same kinds are then "
        "chosen by them, also with lengths near these. Ctrl-C keeps what is measured so far. "
        "Nothing can be measured on the emulator.",
    )
    flag = parser.add_argument
    shapes = f"as `bench --shapes` has them: {_SHAPES} (default: seqlens causal decode)"
    flag("--shapes", type=_shape, nargs="+", metavar="SHAPE", help=shapes)
    profile = "the kinds of calls of a profile of `build`, each with lengths of a prompt and of a "
    flag(
        "--profile",
        choices=PROFILE_NAMES,
        metavar="NAME",
        help=f"{profile}decode step; keys in pages are left out",
    )
    flag("--device", help="as cpu or cuda:1 (default: cuda, else cpu)")
    seconds = "how long a call is timed, all candidates together (default: 1)"
    flag("--seconds", type=float, default=1.0, help=seconds)
    moved = parser.add_mutually_exclusive_group()
    exported = "write all that is kept there, as JSON, and measure nothing"
    moved.add_argument("--export", type=Path, metavar="FILE", help=exported)
    imported = "add what was exported; of other machines it is kept, and looked up there alone"
    moved.add_argument("--import", dest="import_", type=_file, metavar="FILE", help=imported)
    forgotten = "remove all that is kept"
    moved.add_argument("--forget", action="store_true", help=forgotten)


# ---- Figures -------------------------------------------------------------------------------------


def _add_bench(commands: Any) -> None:
    parser = _command(
        commands,
        "bench",
        "measure a suite and hold it against its bars, or shapes beside other packages",
        folded(
            "Without --shapes, run a benchmark suite; the exit code is 1 when a bar is missed. "
            "With --shapes, time our attention beside that of every other package that is here, in "
            "interleaved runs; the exit code is 1 when a result is another one than ours.",
            hang=0,
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=folded(_suites_in_words()),
    )
    what = parser.add_mutually_exclusive_group()
    suites = "one of the list below (default: cpu)"
    what.add_argument("--suite", default="cpu", choices=SUITES, metavar="SUITE", help=suites)
    what.add_argument(
        "--shapes",
        type=_shape,
        nargs="+",
        metavar="SHAPE",
        help=f"{_SHAPES}; or rows or gemm, softmax and norms or products of the sizes below",
    )
    flag = parser.add_argument
    flag("--quick", action="store_true", help="only a part of the suite, for a first impression")
    threads = "of both sides in the suites cpu (default: 2) and models (default: torch's)"
    flag("--threads", type=int, metavar="N", help=threads)
    for name, what_it_is in (("M", "rows"), ("N", "columns"), ("K", "what products sum over")):
        of = f"with --shapes rows or gemm: {what_it_is}, such as 4096, 512,1000 or 256..8192"
        flag(f"-{name}", type=_sweep, metavar="SIZES", help=of)
    dtypes = ("fp32", "bf16", "fp16", "fp8", "bf8", "int8", "int32")
    named = f"with --shapes rows (the first three) or gemm: of {', '.join(dtypes)}"
    flag("--dtype", nargs="+", choices=dtypes, metavar="DTYPE", help=named)
    layouts = "with --shapes gemm: of a and b, n or t each, where nt has b as weights (default: nt)"
    flag("--layout", nargs="+", choices=("nn", "nt", "tn", "tt"), metavar="LAYOUT", help=layouts)
    compiled = "with --shapes rows or gemm: also beside torch's functions by torch.compile"
    flag("--compiled", action="store_true", help=compiled)
    flag(
        "--peers",
        nargs="*",
        metavar="PEER",
        help="with --shapes: who else is timed, of sdpa, sdpa-math, sdpa-flash, sdpa-efficient, "
        "sdpa-cudnn, flex, flash-attn, aiter and xformers (default: all that are installed)",
    )
    where = (
        "with --shapes: as cpu or cuda (default: cuda, else cpu); of rows and gemm cpu, or a chip "
        "such as MI355X, whose times are the cost model's (default: cpu)"
    )
    flag("--device", help=where)
    seconds = "with --shapes: how long a shape is timed, all peers together (default: 2)"
    flag("--seconds", type=float, help=seconds)
    flag("--csv", metavar="FILE", help="with --shapes: write the figures there")
    flag(
        "--plot",
        metavar="FILE",
        help="with --shapes: draw time and speed over the sequence length there, as .png, .svg or "
        ".pdf; this needs matplotlib (the extra plot)",
    )
    flag(
        "--roofline",
        metavar="FILE",
        help="with --shapes: draw speed over operations per byte there, below what the device's "
        "memory and torch.mm give, which are measured first",
    )


def _sweep(text: str) -> tuple[int, ...]:
    """Sizes with commas between them; ``a..b`` doubles from a up to b."""
    sizes: list[int] = []
    for part in text.split(","):
        ends = [int(end) if end.isascii() and end.isdecimal() else 0 for end in part.split("..")]
        if len(ends) > 2 or not 0 < ends[0] <= ends[-1] < 1 << 31:
            raise argparse.ArgumentTypeError(
                f"{part!r} of {text!r} is no size, nor two as 256..8192"
            )
        size = ends[0]
        while size <= ends[-1]:
            sizes.append(size)
            size *= 2
    return tuple(sizes)


def _suites_in_words() -> str:
    names = [
        f"{name:16} {suite.what}{' (from a checkout)' if suite.from_checkout else ''}"
        for name, suite in SUITES.items()
    ]
    times = [
        f"{name:16} {_minutes(suite.minutes)}, --quick {_minutes(suite.quick_minutes)}"
        for name, suite in SUITES.items()
    ]
    return "\n".join(("suites:", *names, "", "on two cores they take about:", *times))


def _minutes(minutes: float) -> str:
    return f"{60 * minutes:.0f} s" if minutes < 1 else f"{minutes:.0f} min"


# ---- On the emulator -----------------------------------------------------------------------------


def _add_launch(flag: Any) -> None:
    code = "an AMDGPU ELF file, or HIP C++ (FILE.hip), which is compiled first, as `hip` does it"
    flag("code_object", type=_file, metavar="FILE", help=code)
    launch = "the launch, as data: docs/emulator.md describes it, on an example"
    flag("--args", type=_launch, required=True, metavar="ARGS.json", help=launch)


def _add_hip(commands: Any) -> None:
    parser = _command(
        commands,
        "hip",
        "compile a HIP C++ file to a code object, without ROCm",
        "Compile the kernels of a HIP C++ file, with the compiler for AMD GPUs that calls would "
        "take, and a small header in place of ROCm's: threadIdx and the like, __syncthreads, "
        "shuffles, atomics, mathematics, 16-bit types. docs/emulator.md runs what comes of it.",
    )
    flag = parser.add_argument
    flag("source", type=_file, metavar="FILE.hip")
    flag("--arch", choices=_ARCHS, required=True)
    flag("-o", "--output", type=Path, required=True, metavar="FILE.co")
    flag("-D", "--define", action="append", default=[], metavar="NAME[=VALUE]", help="a macro")
    include = "where its own headers are"
    flag("-I", "--include", action="append", default=[], type=_folder, metavar="DIR", help=include)


def _add_emulation(flag: Any) -> None:
    order = (
        "waves and workgroups run in random order, on one thread, which shakes out races "
        "(default: in a fixed order)"
    )
    flag("--random-order", type=_from(0, 64), metavar="SEED", help=order)
    budget = "stop a wave that has executed N instructions (default: only Ctrl-C stops it)"
    flag("--instruction-budget", type=_from(1, 64), metavar="N", help=budget)
    threads = "of the emulator, each with workgroups of its own (default: as many as the CPU has)"
    flag("--threads", type=_from(1, 31), metavar="N", help=threads)


def _add_profile(commands: Any) -> None:
    parser = _command(
        commands,
        "profile",
        "run a kernel on the emulator and print what it costs",
        "Run one kernel of a code object or of a HIP C++ source on the emulator, and print exact "
        "counts, registers, LDS, occupancy and a modelled time of the launch, with the model's "
        "assumptions.",
    )
    flag = parser.add_argument
    _add_launch(flag)
    looked_at = "the workgroup to look at wave by wave, by linear number (default: 0)"
    flag("--workgroup", type=_from(0, 31), default=0, metavar="N", help=looked_at)
    sample = "run and time only N workgroups of a large launch, and predict the others"
    flag("--sample", type=_from(1, 31), metavar="N", help=sample)
    assumed = "estimate the time of a launch of N workgroups (default: as launched)"
    flag("--assume-workgroups", type=_from(0, 31), default=0, metavar="N", help=assumed)


def _add_run_program(commands: Any) -> None:
    text = "run a program that uses the HIP runtime on the emulator"
    parser = commands.add_parser(
        "run-program",
        help=text,
        description="Run a program that finds the HIP runtime as libamdhip64.so, with the emulator "
        "in its place. Its HIP events have the times of launches by the cost model. The exit code "
        "is the program's.",
    )
    parser.add_argument("program", metavar="PROGRAM")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its own")


def _add_run_kernel(commands: Any) -> None:
    parser = _command(
        commands,
        "run-kernel",
        "run a code object's kernel on the emulator and look for faults",
        "Run one kernel of a code object on the emulator with its sanitizer, with arguments that "
        "a JSON file describes, and print what was found and what the kernel computed. The exit "
        "code is 1 where the kernel has a fault.",
    )
    flag = parser.add_argument
    _add_launch(flag)
    flag("--out", type=Path, metavar="DIR", help="write each output's raw bytes to DIR/NAME.bin")
    profile = "also print what the launch costs, by the cost model"
    flag("--profile", action="store_true", help=profile)
    _add_emulation(flag)


def _add_replay(commands: Any) -> None:
    parser = _command(
        commands,
        "replay",
        "run a recorded launch again: are its arguments wrong, or is it the kernel?",
        "Run launches again that JITFMHA_RECORD=DIR has recorded. Each argument is held against "
        "what the problem implies, the result against a float64 reference, and the side at fault "
        "is named. The exit code is 1 where there is one.",
        epilog="docs/code_objects.md says what a recorded launch holds.",
    )
    flag = parser.add_argument
    folders = "a launch's folder, or that of several"
    flag("folders", type=_folder, nargs="+", metavar="DIR", help=folders)
    flag("--device", metavar="cuda:0", help="a GPU of torch's (default: the emulator)")
    sanitizer = "with the emulator's sanitizer; findings are faults"
    flag("--sanitize", action="store_true", help=sanitizer)
    _add_emulation(flag)
    seed = "of tensors that were not recorded (default: 0)"
    flag("--seed", type=_from(0, 63), default=0, help=seed)
    arguments = "print every argument of every kernel, too"
    flag("--arguments", action="store_true", help=arguments)
