"""The scripts behind `make wheel`, `make compat` and `make cuda-build` find what they are there to find."""

import email
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import check_compat, check_symbols
from scripts.build_wheel import NOT_IN_THE_WHEEL, minor_version, variant_name
from scripts.check_cuda_binary import ARCHS, code_problems, cuda_sources
from scripts.check_cuda_spills import Function, read_log
from scripts.check_wheel import content_problems, metadata_problems, runpath_problems, tag_problems
from torchddp.cli import checks

ROOT = Path(__file__).resolve().parents[2]

# --- wheels ---

NAMES = [
    "torchddp/__init__.py",
    "torchddp/py.typed",
    "torchddp/_C.pyi",
    "torchddp/_C.cpython-311-x86_64-linux-gnu.so",
    "torchddp/cli/__init__.py",
    "torchddp-0.1.0+cpu.torch2.13.dist-info/METADATA",
    "torchddp-0.1.0+cpu.torch2.13.dist-info/licenses/LICENSE",
]
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


def test_names_of_variants_and_versions() -> None:
    assert [variant_name(cuda) for cuda in ("", "12.6", "13.0")] == ["cpu", "cu126", "cu130"]
    assert [minor_version(torch) for torch in ("2.13.0+cpu", "2.11.0", "2.15.1+cu132")] == ["2.13", "2.11", "2.15"]


def test_nothing_that_torch_brings_is_bundled() -> None:
    for name in ("libc10", "libtorch", "libgomp", "libcudart", "libnccl"):
        assert any(pattern.startswith(name) for pattern in NOT_IN_THE_WHEEL)


def test_a_whole_wheel_has_no_problems() -> None:
    assert content_problems(NAMES) == []
    assert metadata_problems(email.message_from_string(METADATA), "cpu", "2.13") == []
    assert runpath_problems(DYNAMIC, "cpu") == []
    assert tag_problems("torchddp-0.1.0+cpu.torch2.13-cp311-cp311-manylinux_2_28_aarch64.whl", PLATFORM_OF_ARM) == []


@pytest.mark.parametrize("tag", ["linux_aarch64", "manylinux_2_28_x86_64", "manylinux_2_34_aarch64"])
def test_a_wheel_for_another_machine_or_system_is_found(tag: str) -> None:
    assert tag_problems(f"torchddp-0.1.0+cpu.torch2.13-cp311-cp311-{tag}.whl", PLATFORM_OF_ARM) == [
        "the name must end in -manylinux_2_28_aarch64.whl"
    ]


@pytest.mark.parametrize("missing", ["torchddp/py.typed", "torchddp/_C.pyi", "LICENSE"])
def test_what_a_wheel_lacks_is_found(missing: str) -> None:
    assert len(content_problems([name for name in NAMES if not name.endswith(missing)])) == 1


@pytest.mark.parametrize("extra", ["tests/__init__.py", "torchddp_install.pth", "torchddp.libs/libgomp-a34b3233.so.1"])
def test_what_does_not_belong_into_a_wheel_is_found(extra: str) -> None:
    assert content_problems([*NAMES, extra]) == [f"{extra} does not belong there"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("torch==2.13.*", "torch>=2.11,<2.16", "the only requirement must be torch==2.13.*"),
        ("0.1.0+cpu.torch2.13", "0.1.0", "the version must end in +cpu.torch2.13"),
        ("Provides-Extra: cli\n", "", "extra 'cli'"),
    ],
)
def test_wrong_metadata_is_found(old: str, new: str, words: str) -> None:
    (problem,) = metadata_problems(email.message_from_string(METADATA.replace(old, new)), "cpu", "2.13")
    assert words in problem


def test_a_lost_library_path_and_a_bundled_library_are_found() -> None:
    assert "the library path must be" in runpath_problems(DYNAMIC.replace("RUNPATH", "SONAME"), "cpu")[0]
    assert "nvidia/cu13/lib" in runpath_problems(DYNAMIC, "cu130")[0]
    assert "nvidia/cuda_runtime/lib" in runpath_problems(DYNAMIC, "cu126")[0]
    assert runpath_problems(DYNAMIC.replace("libgomp.so.1", "libgomp-a34b3233.so.1.0.0"), "cpu") == [
        "libgomp-a34b3233.so.1.0.0 is bundled"
    ]


# --- symbols ---


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
    [
        ("13.0.88", "13.0", True),
        ("12.8.61", "12.9", True),
        ("13.9.1", "13.10", True),
        ("13.2.51", "13.0", False),
        ("12.9.86", "13.0", False),
        ("13.0.88", "12.6", False),
    ],
)
def test_nvcc_is_not_newer_than_torchs_cuda(tmp_path: Path, nvcc: str, torch_cuda: str, fits: bool) -> None:
    script = tmp_path / "check.cmake"
    script.write_text(
        f"include({ROOT}/cmake/cuda_version.cmake)\ntorchddp_check_cuda_version({nvcc} {torch_cuda} 2.13.0)\n"
    )
    cmake = Path(sys.executable).parent / "cmake"
    done = subprocess.run([str(cmake), "-P", str(script)], capture_output=True, text=True)
    told = f"nvcc is CUDA {nvcc}, torch 2.13.0 was built with CUDA {torch_cuda}."
    assert (done.returncode == 0) is fits and (told in " ".join(done.stderr.split())) is not fits


# --- CUDA binaries ---


def elf_list(*archs: str) -> str:
    return "".join(f"ELF file    {i}: pack_cuda.{i}.{arch}.cubin\n" for i, arch in enumerate(archs, 1))


PTX_LIST = "PTX file    1: pack_cuda.1.sm_100.ptx\n"


def test_code_for_all_architectures_has_no_problems() -> None:
    assert code_problems(elf_list(*ARCHS), PTX_LIST) == []
    twice = ARCHS * 2
    assert code_problems(elf_list(*twice), PTX_LIST + PTX_LIST) == []


@pytest.mark.parametrize(
    ("archs", "ptx", "words"),
    [
        (ARCHS[:-1], PTX_LIST, "machine code for sm_100: 0 files"),
        ((*ARCHS, "sm_75", "sm_80", "sm_100"), PTX_LIST * 2, "machine code for sm_90: 1 files"),
        (ARCHS, "", "PTX of sm_100"),
        (ARCHS, PTX_LIST.replace("sm_100", "sm_80"), "PTX of sm_100"),
    ],
)
def test_missing_code_is_found(archs: tuple[str, ...], ptx: str, words: str) -> None:
    problems = code_problems(elf_list(*archs), ptx)
    assert len(problems) == 1 and words in problems[0]


def test_a_binary_without_gpu_code_has_a_problem_with_each() -> None:
    assert len(code_problems("", "")) == len(ARCHS) + 1


def test_cuda_sources_are_those_of_the_build(tmp_path: Path) -> None:
    entries = [{"file": "/csrc/a.cpp", "command": "c++"}, {"file": "/csrc/b.cu", "command": "nvcc"}]
    (tmp_path / "compile_commands.json").write_text(json.dumps(entries))
    assert [entry["file"] for entry in cuda_sources(tmp_path)] == ["/csrc/b.cu"]


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


# --- other versions of torch ---

COMMAND = (
    "/usr/bin/c++ -DA=1 -I/src/csrc -isystem /venv/torch/include -isystem /venv/torch/include/torch/csrc/api/include "
    "-isystem /venv/nvidia/nccl/include -O3 -std=c++20 -Wall -o CMakeFiles/a.o -c /src/csrc/a.cpp"
)


def test_the_builds_command_is_pointed_at_other_headers() -> None:
    words = check_compat.against(COMMAND, Path("/compat/torch-2.11.0"))
    assert words[:8] == [
        "/usr/bin/c++",
        "-DA=1",
        "-I/src/csrc",
        "-isystem",
        "/compat/torch-2.11.0/torch/include",
        "-isystem",
        "/compat/torch-2.11.0/torch/include/torch/csrc/api/include",
        "-isystem",
    ]
    assert words[8] == "/compat/torch-2.11.0/nvidia/nccl/include"
    assert "-Werror" in words and "-o" not in words and "/src/csrc/a.cpp" not in words


def write_sources(folder: Path, **texts: str) -> dict[Path, str]:
    commands = {}
    for name, text in texts.items():
        path = folder / f"{name}.cpp"
        path.write_text(text)
        commands[path] = f"c++ -std=c++20 -Wall -isystem /x/torch/include -o a.o -c {path}"
    return commands


def checked(folder: Path, **texts: str) -> tuple[int, dict[Path, str]]:
    checks = check_compat.grouped(write_sources(folder, **texts), "2.11.0", folder)
    found: dict[Path, str] = {}
    for check in checks:
        found |= check_compat.failures(check)
    return len(checks), found


def test_sources_that_compile_do_so_together(tmp_path: Path) -> None:
    assert checked(tmp_path, a="int f() { return 1; }", b="int g() { return 2; }") == (1, {})


def test_the_source_that_does_not_compile_is_named(tmp_path: Path) -> None:
    broken = "template <class T> int h(T t) { return t.gone; }\nint g() { return h(2); }"
    num_checks, found = checked(tmp_path, a="int f() { return 1; }", b=broken)
    assert num_checks == 1 and [path.name for path in found] == ["b.cpp"]
    assert "gone" in found[tmp_path / "b.cpp"]


def test_a_warning_is_an_error(tmp_path: Path) -> None:
    assert list(checked(tmp_path, a="void f() { int unused = 1; }")[1]) == [tmp_path / "a.cpp"]


def test_names_that_only_clash_together_are_no_error(tmp_path: Path) -> None:
    text = "namespace { struct Own { int value; }; }\nint %s() { return Own{1}.value; }"
    assert checked(tmp_path, a=text % "f", b=text % "g") == (1, {})


def test_sources_that_the_build_compiles_as_one_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "CMakeFiles" / "_C.dir" / "Unity"
    folder.mkdir(parents=True)
    together, alone = folder / "unity_plan_cxx.cxx", tmp_path / "module.cpp"
    together.write_text('/* generated by CMake */\n\n#include "/src/csrc/a.cpp"\n\n#include "/src/csrc/b.cpp"\n')
    entries = [{"file": str(path), "command": COMMAND} for path in (together, alone)]
    (tmp_path / "compile_commands.json").write_text(json.dumps(entries))
    assert list(check_compat.entries(tmp_path)) == [Path("/src/csrc/a.cpp"), Path("/src/csrc/b.cpp"), alone]


def test_only_what_differs_in_the_cuda_build_is_checked_again(tmp_path: Path) -> None:
    cpu = write_sources(tmp_path, same="int f();", differs="#ifdef TORCHDDP_WITH_CUDA\n#endif")
    only = write_sources(tmp_path, fresh="#include <nccl.h>")
    kernel = {tmp_path / "kernel.cu": "nvcc"}
    assert [path.name for path in check_compat.cuda_only(cpu, cpu | only | kernel)] == ["differs.cpp", "fresh.cpp"]


# --- the command ---


def test_doctor_knows_every_variable_that_is_read() -> None:
    texts = [path.read_text() for path in [*(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "torchddp").rglob("*.py")]]
    read = {
        name for text in texts for name in re.findall(r'(?:getenv\(|\b(?:[A-Z]+_)?ENV = )"(TORCHDDP_[A-Z_]+)"', text)
    }
    assert read == checks.KNOWN - checks.READ_BY_THE_BUILD
