"""The checks behind Makefile targets: stubs, conformance, wheels, symbols, CUDA code, and compatibility."""

import ast
import email
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from scripts import check_compat, check_symbols
from scripts.build_wheel import minor_version, variant_name
from scripts.check_conformance import WORLD_SIZES, expected_tests, read_outcome
from scripts.check_cuda_binary import ARCHS, code_problems
from scripts.check_stubs import built_names, compare, stub_names
from scripts.check_wheel import content_problems, metadata_problems, runpath_problems, tag_problems
from tests.programs import ROOT

STUB = """
import torch
version: str
class Reducer:
    def __init__(self) -> None: ...
    class State: ...
def add(x: torch.Tensor) -> torch.Tensor: ...
"""


def test_stub_check_covers_both_directions_and_members() -> None:
    module = ModuleType("_C")
    state = type("State", (), {"__qualname__": "Reducer.State"})
    module.Reducer = type("Reducer", (), {"__init__": lambda self: None, "State": state})
    module.version, module.add = "1", lambda x: x

    def problems() -> list[str]:
        return compare(stub_names(ast.parse(STUB).body), built_names(module))

    assert problems() == []
    del module.add
    module.extra = 1
    module.Reducer.State.more = 2
    assert problems() == [
        "in the stub, not in the extension: add",
        "in the extension, not in the stub: Reducer.State.more",
        "in the extension, not in the stub: extra",
    ]


def test_missed_conformance_tests_are_found(tmp_path: Path) -> None:
    path, statuses = tmp_path / "results.json", {"a": "pass", "b": "fail", "d": "pass"}
    path.write_text(json.dumps({"results": {name: {"status": status} for name, status in statuses.items()}}))
    outcome = read_outcome(path, expected=frozenset({"a", "b", "gone"}))
    assert outcome.missed == ["b", "gone"]
    assert outcome.passed == {"a", "d"} and outcome.reasons["b"].startswith("fail")
    for world_size in WORLD_SIZES:
        wanted = expected_tests(world_size)
        assert len(wanted) > 90 and all(name.startswith("WheelDistTest.test_") for name in wanted), world_size


FILES = ("__init__.py", "py.typed", "_C.pyi", "_C.cpython-311-x86_64-linux-gnu.so", "cli/__init__.py")
INFO = "torchddp-0.1.0+cpu.torch2.13.dist-info"
NAMES = [*(f"torchddp/{name}" for name in FILES), f"{INFO}/METADATA", f"{INFO}/licenses/LICENSE"]
METADATA = """Metadata-Version: 2.4
Name: torchddp
Version: 0.1.0+cpu.torch2.13
Requires-Dist: torch==2.13.*
Provides-Extra: cli
Requires-Dist: rich; extra == "cli"
"""
PLATFORM_OF_ARM = "manylinux_2_28_aarch64"
DYNAMIC = """
 0x0000000000000001 (NEEDED)             Shared library: [libc10.so]
 0x0000000000000001 (NEEDED)             Shared library: [libgomp.so.1]
 0x000000000000001d (RUNPATH)            Library runpath: [$ORIGIN/../torch/lib]
"""


def test_a_valid_wheel_passes_and_wrong_metadata_tags_files_and_library_paths_are_found() -> None:
    assert [variant_name(cuda) for cuda in ("", "12.6")] == ["cpu", "cu126"] and minor_version("2.13.0+cpu") == "2.13"
    assert content_problems(NAMES) == []
    assert metadata_problems(email.message_from_string(METADATA), "cpu", "2.13") == []
    assert runpath_problems(DYNAMIC, "cpu") == []
    assert tag_problems("torchddp-0.1.0+cpu.torch2.13-cp311-cp311-manylinux_2_28_aarch64.whl", PLATFORM_OF_ARM) == []

    for old, new, words in (
        ("torch==2.13.*", "torch>=2.11,<2.16", "the only requirement must be torch==2.13.*"),
        ("0.1.0+cpu.torch2.13", "0.1.0", "the version must end in +cpu.torch2.13"),
        ("Provides-Extra: cli\n", "", "extra 'cli'"),
    ):
        (problem,) = metadata_problems(email.message_from_string(METADATA.replace(old, new)), "cpu", "2.13")
        assert words in problem
    assert "the library path must be" in runpath_problems(DYNAMIC.replace("RUNPATH", "SONAME"), "cpu")[0]
    assert "nvidia/cu13/lib" in runpath_problems(DYNAMIC, "cu130")[0]
    assert "nvidia/cuda_runtime/lib" in runpath_problems(DYNAMIC, "cu126")[0]
    bundled = DYNAMIC.replace("libgomp.so.1", "libgomp-a34b3233.so.1.0.0")
    assert runpath_problems(bundled, "cpu") == ["libgomp-a34b3233.so.1.0.0 is bundled"]
    for tag in ("linux_aarch64", "manylinux_2_28_x86_64", "manylinux_2_34_aarch64"):
        (problem,) = tag_problems(f"torchddp-0.1.0+cpu.torch2.13-cp311-cp311-{tag}.whl", PLATFORM_OF_ARM)
        assert problem == "the name must end in -manylinux_2_28_aarch64.whl", tag
    for missing in ("torchddp/py.typed", "torchddp/_C.pyi", "LICENSE"):
        assert len(content_problems([name for name in NAMES if not name.endswith(missing)])) == 1, missing
    for extra in ("tests/__init__.py", "torchddp_install.pth", "torchddp.libs/libgomp-a34b3233.so.1"):
        assert content_problems([*NAMES, extra]) == [f"{extra} does not belong in the wheel"]


def test_missing_symbols_are_found_in_a_real_library(tmp_path: Path) -> None:
    source, library = tmp_path / "a.c", tmp_path / "a.so"
    source.write_text(
        "int puts(const char*); int nowhere(void); void PyErr_Clear(void); __attribute__((weak)) int perhaps(void);\n"
        'int f(void) { PyErr_Clear(); return puts("a") + nowhere() + (perhaps ? perhaps() : 0); }\n'
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    libraries = check_symbols.needed_libraries(library)
    assert libraries == ["libc.so.6"]
    defined = check_symbols.nm(check_symbols.library_path("libc.so.6", []), "--defined-only")
    needed = check_symbols.nm(library, "--undefined-only")
    assert any(name.startswith("puts@GLIBC_") for name in needed) and "perhaps" in needed
    assert check_symbols.missing_symbols(needed, set(defined)) == ["nowhere"]
    # A symbol must exist with its version.
    needed = check_symbols.symbols("U cudaMalloc@libcudart.so.13\nU cudaNew@libcudart.so.13\nU plain\n")
    older = set(check_symbols.symbols("1 T cudaMalloc@@libcudart.so.13\n2 T cudaNew@libcudart.so.12\n3 T plain@@V\n"))
    assert check_symbols.missing_symbols(needed, older) == ["cudaNew@libcudart.so.13"]


def test_cmake_refuses_an_nvcc_newer_than_torchs_cuda(tmp_path: Path) -> None:
    script, cmake = tmp_path / "check.cmake", Path(sys.executable).parent / "cmake"
    for nvcc, torch_cuda, fits in (("13.9.1", "13.10", True), ("13.2.51", "13.0", False), ("12.9.86", "13.0", False)):
        call = f"torchddp_check_cuda_version({nvcc} {torch_cuda} 2.13.0)"
        script.write_text(f"include({ROOT}/cmake/cuda_version.cmake)\n{call}\n")
        done = subprocess.run([str(cmake), "-P", str(script)], capture_output=True, text=True)
        told = f"nvcc is CUDA {nvcc}, torch 2.13.0 was built with CUDA {torch_cuda}."
        assert (done.returncode == 0) is fits and (told in " ".join(done.stderr.split())) is not fits, call


def test_missing_machine_code_and_ptx_are_found() -> None:
    ptx = "PTX file    1: pack_cuda.1.sm_100.ptx\n"

    def problems(archs: tuple[str, ...], ptx: str) -> list[str]:
        elf = (f"ELF file    {i}: pack_cuda.{i}.{arch}.cubin\n" for i, arch in enumerate(archs, 1))
        return code_problems("".join(elf), ptx)

    for archs, found, words in (
        (ARCHS[:-1], ptx, "machine code for sm_100: 0 files"),
        ((*ARCHS, "sm_75", "sm_80", "sm_100"), ptx * 2, "machine code for sm_90: 1 files"),
        (ARCHS, "", "PTX of sm_100"),
        (ARCHS, ptx.replace("sm_100", "sm_80"), "PTX of sm_100"),
    ):
        (problem,) = problems(archs, found)
        assert words in problem
    assert problems(ARCHS * 2, ptx * 2) == []


CLASHES = "namespace { struct Own { int value; }; }\nint %s() { return Own{1}.value; }"
BROKEN = "template <class T> int h(T t) { return t.gone; }\nint g() { return h(2); }"


def test_the_source_that_does_not_compile_is_named(tmp_path: Path) -> None:
    for texts, failing, words in (
        ((CLASHES % "f", CLASHES % "g"), [], ""),  # names that clash only in a unity build
        (("int f() { return 1; }", BROKEN), ["1.cpp"], "gone"),
        (("void f() { int unused = 1; }",), ["0.cpp"], "unused"),  # a warning
    ):
        commands = {}
        for number, text in enumerate(texts):
            path = tmp_path / f"{number}.cpp"
            path.write_text(text)
            commands[path] = f"c++ -std=c++20 -Wall -isystem /x/torch/include -o a.o -c {path}"
        (check,) = check_compat.grouped(commands, "2.11.0", tmp_path)
        found = check_compat.failures(check)
        assert [path.name for path in found] == failing and all(words in text for text in found.values()), texts


def test_a_private_name_that_another_torch_lacks_is_found(tmp_path):
    (tmp_path / "torch/utils").mkdir(parents=True)
    (tmp_path / "torch/utils/tree.py").write_text("def _map(): ...\n")
    seam = tmp_path / "_torch.py"
    seam.write_text("from torch.utils.tree import _map, _gone\nfrom torch.moved import _there\n")
    assert check_compat.missing_names(tmp_path, seam) == ["torch.utils.tree._gone", "torch.moved._there"]
