"""Prints NAME=value lines about this Python and its torch, for torch.cmake.

Does not import torch: that takes seconds, and needs more of torch's dependencies than a compiler does.
"""

import importlib.util
import platform
import re
import sys
import sysconfig
from pathlib import Path


def main() -> None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit(f"{sys.executable} has no torch; install it first, for instance with: pip install torch==2.13.0")
    torch_dir = Path(spec.origin).parent
    text = (torch_dir / "version.py").read_text()
    version = re.search(r"^__version__ = '([^']+)'", text, re.M)
    cuda = re.search(r"^cuda\b[^=]*= '([^']+)'", text, re.M)
    if version is None:
        sys.exit(f"no version in {torch_dir / 'version.py'}")
    facts = {
        "TORCH_DIR": torch_dir,
        "TORCH_SITE_DIR": torch_dir.parent,
        "TORCH_VERSION": version.group(1),
        "TORCH_CUDA": cuda.group(1) if cuda else "",
        "PYTHON_VERSION": sysconfig.get_python_version(),
        "PYTHON_FULL_VERSION": platform.python_version(),
        "PYTHON_INCLUDE_DIR": sysconfig.get_paths()["include"],
        "PYTHON_EXT_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX"),
    }
    for name, value in facts.items():
        print(f"{name}={value}")


if __name__ == "__main__":
    main()
