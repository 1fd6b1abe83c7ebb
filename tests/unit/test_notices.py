"""Notices reach who listens, and a listener that fails disturbs nobody."""

import logging

import pytest

from torchddp.notices import Notice, listen, tell


def test_listeners_get_notices_until_they_leave(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Notice] = []

    def fails(notice: Notice) -> None:
        raise ValueError(notice.kind)

    leave_failing, leave = listen(fails), listen(heard.append)
    with caplog.at_level(logging.ERROR):
        tell("straggler", rank=3)
    leave_failing(), leave(), leave()
    tell("retry")
    assert heard == [Notice("straggler", {"rank": 3})]
    assert "ValueError: straggler" in caplog.text
