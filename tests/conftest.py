"""Fixtures every test file may use, and the closing summary of what was covered and what was skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import npattn
import pytest
from hypothesis import HealthCheck, settings

# The same examples on every run: a red build can be repeated anywhere. The ISA that our fixture chooses holds
# for all examples of a test, so a function-scoped fixture is safe.
settings.register_profile(
    "npattn",
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("npattn")


@pytest.fixture(params=npattn.isa.available())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once for every instruction set of this machine; the one in use before is restored."""
    before = npattn.isa.active()
    npattn.isa.use(request.param)
    yield request.param
    npattn.isa.use(before)


def skip_reasons(reports: list[pytest.TestReport]) -> Counter[str]:
    """How many tests were skipped for each reason."""
    reasons: Counter[str] = Counter()
    for report in reports:
        _, _, reason = report.longrepr  # a skip carries (file, line, "Skipped: reason")
        reasons[reason.removeprefix("Skipped: ")] += 1
    return reasons


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("coverage of this machine")
    terminalreporter.write_line(f"instruction sets tested: {', '.join(npattn.isa.available())}")
    for reason, count in skip_reasons(terminalreporter.getreports("skipped")).most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")
