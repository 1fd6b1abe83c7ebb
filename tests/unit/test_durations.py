"""Durations in public arguments: seconds or a timedelta."""

import datetime
import math

import pytest

from torchddp.durations import seconds, timedelta_of


@pytest.mark.parametrize(("value", "length"), [(0, 0.0), (2, 2.0), (0.5, 0.5), (datetime.timedelta(minutes=1), 60.0)])
def test_seconds_and_timedeltas_are_the_same(value: float | datetime.timedelta, length: float) -> None:
    assert seconds(value, "timeout") == length
    assert timedelta_of(value, "timeout") == datetime.timedelta(seconds=length)


def test_none_stays_none_and_forever_is_the_longest() -> None:
    assert seconds(None, "timeout") is None
    assert timedelta_of(None, "timeout") is None
    assert seconds(math.inf, "timeout") == math.inf
    assert timedelta_of(math.inf, "timeout") == datetime.timedelta.max


@pytest.mark.parametrize("value", [-1, -0.1, math.nan, datetime.timedelta(seconds=-1)])
def test_negative_durations_and_nan_are_refused(value: float | datetime.timedelta) -> None:
    for convert in (seconds, timedelta_of):
        with pytest.raises(ValueError, match=r"^timeout must be at least 0 seconds; got "):
            convert(value, "timeout")


@pytest.mark.parametrize("value", [True, "30", [1]])
def test_what_is_no_duration_is_refused(value: object) -> None:
    for convert in (seconds, timedelta_of):
        with pytest.raises(TypeError, match=r"^grace_s must be a number of seconds, .* got .*\((bool|str|list)\)"):
            convert(value, "grace_s")  # type: ignore[arg-type]
