"""The index pages that pip installs wheels from: their content, installation with pip, and invalid input."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.build_index import main
from scripts.build_wheel import PLATFORM, minor_version, variant_name
from torchddp._import_check import wheel_advice

TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
VERSIONS = ("0.1.0+cpu.torch2.13", "0.1.0+cu130.torch2.13", "0.1.0+cu126.torch2.12")


def write_wheel(folder: Path, version: str, tag: str = TAG, plat: str = PLATFORM, said_version: str = "") -> Path:
    """Write a wheel that pip can install, with a module that has its version."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"torchddp-{version}-{tag}-{tag}-{plat}.whl"
    info = f"torchddp-{version}.dist-info"
    metadata = f"Metadata-Version: 2.4\nName: torchddp\nVersion: {said_version or version}\nRequires-Python: >=3.10\n"
    files = {
        "torchddp/__init__.py": f"__version__ = '{version}'\n",
        f"{info}/METADATA": metadata + "Requires-Dist: torch==2.13.*\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}-{tag}-{plat}\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of wheels for several torch versions, this Python and another."""
    folder = tmp_path_factory.mktemp("index")
    for version in VERSIONS:
        write_wheel(folder / "dist" / version, version)
        write_wheel(folder / "dist" / "other", version, tag="cp310" if TAG != "cp310" else "cp311")
        write_wheel(folder / "dist" / "other", version, plat="manylinux_2_28_riscv64")
    main([str(folder / "dist"), "--out", str(folder / "site"), "--url", "https://example.org/wheels/"])
    return folder / "site"


def pip_install(index_url: str, target: Path, requirement: str) -> subprocess.CompletedProcess[str]:
    """Install from `index_url` only, whatever pip's configuration."""
    env = {name: value for name, value in os.environ.items() if not name.upper().startswith("PIP_")}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "no_proxy": "*", "PIP_RETRIES": "0"}
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-cache-dir", "--target", str(target)]
    command += ["--index-url", index_url, requirement]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def test_pip_installs_the_advised_wheel_and_refuses_a_changed_one(index: Path, tmp_path: Path) -> None:
    advice = wheel_advice("0.1.0+cpu.torch2.13", {"torch": "2.13.1+cu130", "cuda": "13.0"})
    named = re.search(r"--no-deps (\S+) --index-url INDEX/(\S+) ", advice)
    assert named is not None
    assert named[1].endswith(f"+{variant_name('13.0')}.torch{minor_version('2.13.1+cu130')}")  # as built
    site = tmp_path / "site"
    shutil.copytree(index, site)
    done = pip_install(f"{site.as_uri()}/{named[2]}", tmp_path / "target", requirement=named[1])
    assert done.returncode == 0, done.stderr
    assert VERSIONS[1] in (tmp_path / "target" / "torchddp" / "__init__.py").read_text()
    for wheel in (site / "wheels").iterdir():
        wheel.write_bytes(wheel.read_bytes() + b"\0")
    done = pip_install(f"{site.as_uri()}/{named[2]}", tmp_path / "other", requirement=named[1])
    assert done.returncode == 1 and "HASHES" in done.stderr


def test_pages_list_each_wheel_once_and_a_command_for_each_torch_and_cuda(index: Path) -> None:
    page = (index / "torch-2.13" / "cu130" / "torchddp" / "index.html").read_text()
    links = re.findall(r'<a href="([^"#]+)#sha256=[0-9a-f]{64}" data-requires-python="&gt;=3.10">([^<]+)</a>', page)
    assert len(links) == 3 == page.count("<a ")
    for href, name in links:
        assert "+cu130.torch2.13-" in name and "%2Bcu130" in href
        assert (index / "wheels" / name).is_file()
    page = (index / "index.html").read_text()
    commands = re.findall(r"<code>pip install --no-deps (\S+) --index-url (\S+)</code>", page)
    folders = "torch-2.13/cpu", "torch-2.13/cu130", "torch-2.12/cu126"
    urls = [f"https://example.org/wheels/{folder}/" for folder in folders]
    assert commands == [(f"torchddp=={version}", url) for version, url in zip(VERSIONS, urls, strict=True)]
    assert page.count("manylinux_2_28_riscv64") == len(VERSIONS) and page.count(PLATFORM) == len(VERSIONS)
    for href in re.findall(r'href="([^"]+)"', page):
        assert (index / href).is_file(), href


def test_invalid_wheels_and_folders_are_refused(tmp_path: Path) -> None:
    dist, out = tmp_path / "dist", tmp_path / "site"

    def refused(words: str) -> None:
        with pytest.raises(SystemExit) as stopped:
            main([str(dist), "--out", str(out)])
        assert words in str(stopped.value)

    refused("there are no wheels in")
    wheel = write_wheel(dist, VERSIONS[0])
    twin = write_wheel(dist / "again", VERSIONS[0])
    refused("have the same name")
    twin.unlink()
    other = dist / "torchddp-0.1.0-cp311-cp311-linux_x86_64.whl"
    other.write_bytes(wheel.read_bytes())
    refused(f"{other} is not a torchddp wheel")
    other.unlink()
    wheel.unlink()
    write_wheel(dist, VERSIONS[0], said_version="0.1.0")
    refused("says version 0.1.0")
    assert not out.exists()
    write_wheel(dist, VERSIONS[0])
    main([str(dist), "--out", str(out)])
    refused("must be an empty folder")
