import pytest

from fedpool.errors import UsageError
from fedpool.units import format_duration, format_memory, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("4h", 14400), ("2d", 172800), ("1h30m", 5400), ("1.5h", 5400)]
)
def test_durations_are_read(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "h", "-1h", "1h 30m", "0s", "1w", "1hx"])
def test_what_is_no_duration_is_refused_with_an_example(text):
    with pytest.raises(UsageError) as refused:
        parse_duration(text)
    assert "30m" in refused.value.hint


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.25, "4.2s"), (42, "42s"), (185, "3m 5s"), (3600, "1h"), (360000, "4d 4h")]
)
def test_durations_are_printed_in_two_units(seconds, text):
    assert format_duration(seconds) == text


def test_sizes():
    assert parse_size("80GiB") == 80 * 2**30
    assert parse_size("500MB") == 500_000_000
    assert format_memory(80 * 2**30) == "80 GiB"
    assert format_size(1_250_000) == "1.25 MB"
    with pytest.raises(UsageError):
        parse_size("80 bananas")
