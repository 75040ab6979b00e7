"""Shared by all tests: Hypothesis profiles, and what to do where a real service is not installed."""

import os
import shutil

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("dev", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("IBSHELL_HYPOTHESIS", "dev"))


@pytest.fixture
def need():
    """Ask for a program: skipped with the reason where it is missing, failed where services are required."""

    def check(program: str, package: str) -> str:
        found = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")
        if found is None:
            reason = f"{program} is not installed: apt-get install {package}"
            if os.environ.get("IBSHELL_REQUIRE_SERVICES") == "1":
                pytest.fail(reason)
            pytest.skip(reason)
        return found

    return check
