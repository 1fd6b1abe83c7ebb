"""Facts about this Python and its torch: NAME=value lines for torch.cmake, a dict for setup.py.

Does not import torch, which takes seconds and needs dependencies that compiling does not.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
import sysconfig
from pathlib import Path


def facts() -> dict[str, str]:
    """The facts. SystemExit if there is no usable torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit(
            f"torchddp: this build sees no torch in {sys.prefix}: install torch, then build with "
            "`pip install --no-build-isolation .`, since pip hides installed packages without that option"
        )
    torch_dir = Path(spec.origin).parent
    text = (torch_dir / "version.py").read_text()
    version = re.search(r"^__version__ = '([^']+)'", text, re.M)
    cuda = re.search(r"^cuda\b[^=]*= '([^']+)'", text, re.M)
    if version is None:
        sys.exit(f"torchddp: {torch_dir / 'version.py'} does not contain torch's version")
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
