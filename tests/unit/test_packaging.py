"""The scripts behind `make wheel`, `make compat` and `make cuda-build` find what they are there to find."""

import email
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import check_compat, check_symbols
from scripts.build_wheel import minor_version, variant_name
from scripts.check_cuda_binary import ARCHS, code_problems, cuda_sources
from scripts.check_cuda_spills import Function, read_log
from scripts.check_wheel import content_problems, metadata_problems, runpath_problems, tag_problems
from torchddp.cli import checks

ROOT = Path(__file__).resolve().parents[2]


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


def test_a_whole_wheel_has_no_problems() -> None:
    assert [variant_name(cuda) for cuda in ("", "12.6")] == ["cpu", "cu126"] and minor_version("2.13.0+cpu") == "2.13"
    assert content_problems(NAMES) == []
    assert metadata_problems(email.message_from_string(METADATA), "cpu", "2.13") == []
    assert runpath_problems(DYNAMIC, "cpu") == []
    assert tag_problems("torchddp-0.1.0+cpu.torch2.13-cp311-cp311-manylinux_2_28_aarch64.whl", PLATFORM_OF_ARM) == []


def test_wrong_metadata_tags_files_and_library_paths_are_found() -> None:
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
        assert problem == "the name must end in -manylinux_2_28_aarch64.whl"
    for missing in ("torchddp/py.typed", "torchddp/_C.pyi", "LICENSE"):
        assert len(content_problems([name for name in NAMES if not name.endswith(missing)])) == 1
    for extra in ("tests/__init__.py", "torchddp_install.pth", "torchddp.libs/libgomp-a34b3233.so.1"):
        assert content_problems([*NAMES, extra]) == [f"{extra} does not belong there"]


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


def test_a_symbol_must_be_there_in_its_version() -> None:
    needed = check_symbols.symbols("U cudaMalloc@libcudart.so.13\nU cudaNew@libcudart.so.13\nU plain\n")
    older = set(check_symbols.symbols("1 T cudaMalloc@@libcudart.so.13\n2 T cudaNew@libcudart.so.12\n3 T plain@@V\n"))
    assert check_symbols.missing_symbols(needed, older) == ["cudaNew@libcudart.so.13"]
    assert check_symbols.missing_symbols(needed, {"cudaMalloc", "cudaNew", "plain"}) == []


@pytest.mark.parametrize(
    ("nvcc", "torch_cuda", "fits"),
    [("12.8.61", "12.9", True), ("13.9.1", "13.10", True), ("13.2.51", "13.0", False), ("12.9.86", "13.0", False)],
)
def test_nvcc_is_not_newer_than_torchs_cuda(tmp_path: Path, nvcc: str, torch_cuda: str, fits: bool) -> None:
    script = tmp_path / "check.cmake"
    call = f"torchddp_check_cuda_version({nvcc} {torch_cuda} 2.13.0)"
    script.write_text(f"include({ROOT}/cmake/cuda_version.cmake)\n{call}\n")
    cmake = Path(sys.executable).parent / "cmake"
    done = subprocess.run([str(cmake), "-P", str(script)], capture_output=True, text=True)
    told = f"nvcc is CUDA {nvcc}, torch 2.13.0 was built with CUDA {torch_cuda}."
    assert (done.returncode == 0) is fits and (told in " ".join(done.stderr.split())) is not fits


def elf_list(*archs: str) -> str:
    return "".join(f"ELF file    {i}: pack_cuda.{i}.{arch}.cubin\n" for i, arch in enumerate(archs, 1))


PTX_LIST = "PTX file    1: pack_cuda.1.sm_100.ptx\n"


def test_missing_code_is_found() -> None:
    for archs, ptx, words in (
        (ARCHS[:-1], PTX_LIST, "machine code for sm_100: 0 files"),
        ((*ARCHS, "sm_75", "sm_80", "sm_100"), PTX_LIST * 2, "machine code for sm_90: 1 files"),
        (ARCHS, "", "PTX of sm_100"),
        (ARCHS, PTX_LIST.replace("sm_100", "sm_80"), "PTX of sm_100"),
    ):
        (problem,) = code_problems(elf_list(*archs), ptx)
        assert words in problem
    assert code_problems(elf_list(*ARCHS * 2), PTX_LIST * 2) == []


PTXAS_LOG = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5scalePfif' for 'sm_80'
ptxas info    : Function properties for _Z5scalePfif
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers, 368 bytes cmem[0]
ptxas info    : Compiling entry function '_Z5heavyPKfPfi' for 'sm_90'
ptxas info    : Function properties for _Z5heavyPKfPfi
    2376 bytes stack frame, 4252 bytes spill stores, 5508 bytes spill loads
"""


def test_spills_are_read_from_what_ptxas_says() -> None:
    assert read_log(PTXAS_LOG) == [
        Function("_Z5scalePfif", "sm_80", stack_bytes=0, spilled_bytes=0),
        Function("_Z5heavyPKfPfi", "sm_90", stack_bytes=2376, spilled_bytes=9760),
    ]
    assert read_log("ninja: no work to do.") == []


COMMAND = (
    "/usr/bin/c++ -DA=1 -I/src/csrc -isystem /venv/torch/include -isystem /venv/torch/include/torch/csrc/api/include "
    "-isystem /venv/nvidia/nccl/include -O3 -std=c++20 -Wall -o CMakeFiles/a.o -c /src/csrc/a.cpp"
)


def test_the_builds_command_is_pointed_at_other_headers() -> None:
    words = check_compat.against(COMMAND, Path("/compat/torch-2.11.0"))
    found = [words[i + 1] for i, word in enumerate(words) if word == "-isystem"]
    torchs = "/compat/torch-2.11.0/torch/include"
    assert found == [torchs, f"{torchs}/torch/csrc/api/include", "/compat/torch-2.11.0/nvidia/nccl/include"]
    assert "-Werror" in words and "-o" not in words and "/src/csrc/a.cpp" not in words


def write_sources(folder: Path, **texts: str) -> dict[Path, str]:
    commands = {}
    for name, text in texts.items():
        path = folder / f"{name}.cpp"
        path.write_text(text)
        commands[path] = f"c++ -std=c++20 -Wall -isystem /x/torch/include -o a.o -c {path}"
    return commands


CLASHES = "namespace { struct Own { int value; }; }\nint %s() { return Own{1}.value; }"
BROKEN = "template <class T> int h(T t) { return t.gone; }\nint g() { return h(2); }"


@pytest.mark.parametrize(
    ("texts", "failing", "words"),
    [
        ({"a": CLASHES % "f", "b": CLASHES % "g"}, [], ""),  # names that clash only in one unit
        ({"a": "int f() { return 1; }", "b": BROKEN}, ["b.cpp"], "gone"),
        ({"a": "void f() { int unused = 1; }"}, ["a.cpp"], "unused"),  # a warning
    ],
)
def test_the_source_that_does_not_compile_is_named(tmp_path, texts, failing, words):
    (check,) = check_compat.grouped(write_sources(tmp_path, **texts), "2.11.0", tmp_path)
    found = check_compat.failures(check)
    assert [path.name for path in found] == failing and all(words in text for text in found.values())


def test_sources_that_the_build_compiles_as_one_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "CMakeFiles" / "_C.dir" / "Unity"
    folder.mkdir(parents=True)
    together, alone = folder / "unity_plan_cxx.cxx", tmp_path / "module.cpp"
    together.write_text('/* generated by CMake */\n\n#include "/src/csrc/a.cpp"\n\n#include "/src/csrc/b.cpp"\n')
    entries = [{"file": str(path), "command": COMMAND} for path in (together, alone)]
    entries.append({"file": "/src/csrc/c.cu", "command": "nvcc"})
    (tmp_path / "compile_commands.json").write_text(json.dumps(entries))
    assert list(check_compat.entries(tmp_path)) == [Path("/src/csrc/a.cpp"), Path("/src/csrc/b.cpp"), alone]
    assert [entry["file"] for entry in cuda_sources(tmp_path)] == ["/src/csrc/c.cu"]


def test_only_what_differs_in_the_cuda_build_is_checked_again(tmp_path: Path) -> None:
    cpu = write_sources(tmp_path, same="int f();", differs="#ifdef TORCHDDP_WITH_CUDA\n#endif")
    only = write_sources(tmp_path, fresh="#include <nccl.h>")
    kernel = {tmp_path / "kernel.cu": "nvcc"}
    assert [path.name for path in check_compat.cuda_only(cpu, cpu | only | kernel)] == ["differs.cpp", "fresh.cpp"]


def test_doctor_knows_every_variable_that_is_read() -> None:
    paths = [*(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "torchddp").rglob("*.py")]
    reading = r'(?:getenv\(|\b(?:[A-Z]+_)?ENV = )"(TORCHDDP_[A-Z_]+)"'
    read = {name for path in paths for name in re.findall(reading, path.read_text())}
    assert read == checks.READ_WHILE_TRAINING
