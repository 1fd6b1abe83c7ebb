"""What the simulated GPU says about each thing that CUDA refuses while a graph is captured. Prints one JSON object."""

import json
from collections.abc import Callable

from tests.simgpu.device import NAME, simulated  # first: it takes the place of torchddp._C

# isort: split
import torch


def allowed(here: torch.Stream, other: torch.Stream) -> None:
    other.wait_stream(here)
    with other:
        values = torch.ones(3, device=NAME) * 2
    here.wait_stream(other)
    values.add_(1)


def other_work(here: torch.Stream, other: torch.Stream) -> None:
    here.wait_stream(other)


def no_join(here: torch.Stream, other: torch.Stream) -> None:
    other.wait_stream(here)
    with other:
        torch.ones(3, device=NAME).mul_(2)


def default_stream(here: torch.Stream, other: torch.Stream) -> None:
    torch.Stream(stream_id=0, device_index=0, device_type=other.device_type).wait_stream(here)


def query(here: torch.Stream, other: torch.Stream) -> None:
    here.record_event().query()


def event_wait(here: torch.Stream, other: torch.Stream) -> None:
    here.record_event().synchronize()


def item(here: torch.Stream, other: torch.Stream) -> None:
    torch.ones(1, device=NAME).item()


def to_host(here: torch.Stream, other: torch.Stream) -> None:
    torch.ones(1, device=NAME).cpu()


def stream_wait(here: torch.Stream, other: torch.Stream) -> None:
    here.synchronize()


def device_wait(here: torch.Stream, other: torch.Stream) -> None:
    simulated.synchronize()


CASES: tuple[Callable[[torch.Stream, torch.Stream], None], ...] = (
    *(allowed, other_work, no_join, default_stream, query),
    *(event_wait, item, to_host, stream_wait, device_wait),
)


def said_about(case: Callable[[torch.Stream, torch.Stream], None]) -> list[str]:
    simulated.start_over(0, 0)
    here, other = torch.Stream(device=NAME), torch.Stream(device=NAME)
    with other:
        torch.ones(3, device=NAME).mul_(3)
    with here:
        simulated.begin_capture()
        case(here, other)
        simulated.end_capture()
    found: list[str] = simulated.races()
    return found


if __name__ == "__main__":
    print(json.dumps({case.__name__: said_about(case) for case in CASES}))
