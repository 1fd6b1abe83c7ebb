"""What this Python and its torch are: NAME=value lines for torch.cmake, a dict for setup.py.

Does not import torch: that takes seconds, and needs more of torch's dependencies than a compiler does.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
import sysconfig
from pathlib import Path


def facts() -> dict[str, str]:
    """SystemExit if there is no torch, or none that can be used."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit(
            f"torchddp: this build sees no torch in {sys.prefix}: install torch, then build with "
            "`pip install --no-build-isolation .`, since pip hides what is installed without that option"
        )
    torch_dir = Path(spec.origin).parent
    text = (torch_dir / "version.py").read_text()
    version = re.search(r"^__version__ = '([^']+)'", text, re.M)
    cuda = re.search(r"^cuda\b[^=]*= '([^']+)'", text, re.M)
    if version is None:
        sys.exit(f"torchddp: {torch_dir / 'version.py'} names no version of torch")
    return {
        "TORCH_DIR": str(torch_dir),
        "TORCH_SITE_DIR": str(torch_dir.parent),
        "TORCH_VERSION": version.group(1),
        "TORCH_CUDA": cuda.group(1) if cuda else "",
        "PYTHON_VERSION": sysconfig.get_python_version(),
        "PYTHON_FULL_VERSION": platform.python_version(),
        "PYTHON_INCLUDE_DIR": sysconfig.get_paths()["include"],
        "PYTHON_EXT_SUFFIX": str(sysconfig.get_config_var("EXT_SUFFIX")),
    }


if __name__ == "__main__":
    for name, value in facts().items():
        print(f"{name}={value}")
