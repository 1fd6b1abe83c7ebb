"""pytorch-ignite, mmengine, timm and PyTorch Geometric with our engine: the programs of docs/integrations.md, bitwise
equal to torch's class.
"""

import importlib.util
from pathlib import Path

import pytest

from tests.clients.page_programs import WITHOUT, Run, assert_same_as_torch

# Not pytest.importorskip: timm can't be imported here, only in page_rank.py.
MISSING = [name for name in ("ignite", "mmengine", "timm", "torch_geometric") if importlib.util.find_spec(name) is None]
if MISSING:
    pytest.skip(f"{', '.join(MISSING)}: not installed: make test-clients", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.beyond_torch("is not tested here")]


IGNITE_ACCUMULATES = ("functional.cross_entropy)", "functional.cross_entropy, gradient_accumulation_steps=2)")
MM_ACCUMULATES = ('"momentum": 0.9}}', '"momentum": 0.9}, "accumulative_counts": 2}')


@pytest.mark.parametrize(
    ("heading", "replaced", "steps"),
    [
        ("pytorch-ignite", [], 16),
        ("pytorch-ignite", [IGNITE_ACCUMULATES], 16),  # reduces every microbatch
        ("mmengine", [], 16),
        ("mmengine", [MM_ACCUMULATES], 8),
        ("timm", [], 4),
        ("PyTorch Geometric", [], 8),
    ],
)
def test_the_pages_programs(heading: str, replaced: list[tuple[str, str]], steps: int, tmp_path: Path) -> None:
    assert_same_as_torch(heading, tmp_path, *replaced, steps=steps)


IGNITE_OPTION = ("nn.Linear(32, 3)))", 'nn.Linear(32, 3)), transport="c10d")')
MM_OPTION = ('"device_ids": None', '"device_ids": None, "transport": "c10d"')


@pytest.mark.parametrize(("heading", "option"), [("pytorch-ignite", IGNITE_OPTION), ("mmengine", MM_OPTION)])
def test_our_options_are_passed_on(heading: str, option: tuple[str, str], tmp_path: Path) -> None:
    """And without install(), the program's run by torchddp.run. mmengine's class is then derived from ours."""
    run = Run(heading, tmp_path / "ours", WITHOUT, option, under=("-m", "torchddp.run"))
    run.assert_trained("torchddp", steps=16)
    assert [rank["transport"] for rank in run.ranks] == ["c10d"] * 2
    assert heading != "mmengine" or {rank["made"] for rank in run.ranks} == {"MMDistributedDataParallel"}


def test_mmengine_imported_before_install_keeps_torchs_reducer(tmp_path: Path) -> None:
    late = ("torchddp.install()", "import mmengine.model\n\ntorchddp.install()")
    run = Run("mmengine", tmp_path / "late", late)
    run.assert_trained("torch")
    assert "mmengine.model.wrappers.distributed.MMDistributedDataParallel" in run.said
