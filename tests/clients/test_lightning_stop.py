"""Lightning's ranks stop together: the program of docs/fault_tolerance.md."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning", reason="Lightning is not installed: make test-clients")

from tests.clients.common import launch
from tests.pages import code_of, common_last_step, signalled

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("strategy", ["torchddp", "ddp"])
def test_all_ranks_stop_after_the_same_batch_and_the_run_resumes(strategy: str, tmp_path: Path) -> None:
    page = code_of("fault_tolerance.md", "Lightning").replace('strategy="torchddp"', f'strategy="{strategy}"')
    prelude = f"import os\nos.chdir({str(tmp_path)!r})\n"
    program = tmp_path / "program.py"
    code = signalled(page)
    if strategy == "ddp":  # whose steps torchddp does not see
        line = "    def training_step(self, x, index):\n"
        code = code.replace("while torchddp.finished_steps() < 20", "while len(steps) < 20")
        code = "steps = []\n" + code.replace(line, f"{line}        steps.append(index)\n")
    program.write_text(prelude + code)
    step = common_last_step(launch(program).stdout)
    saved = torch.load(tmp_path / "stopped.ckpt", weights_only=False)
    assert saved["global_step"] == step >= 20

    program.write_text(
        prelude
        + page.replace("fit(Model(), data)", 'fit(Model(), data, ckpt_path="stopped.ckpt")').replace(
            "max_epochs=1", f"max_epochs=1, max_steps={step + 7}"
        )
        + "\nprint('ended at', trainer.global_step)\n"
    )
    assert launch(program).stdout.count(f"ended at {step + 7}") == 2
