"""One process runs many test files, in an order that the load decides: none may leave it unfit for the next."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from placement_audit.report import NO_TERMINAL


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports wrap at the terminal's width: what a test reads must not depend on where the suite runs."""
    monkeypatch.setenv("COLUMNS", str(NO_TERMINAL[0]))
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def torchtitan_sees_the_cpu() -> Iterator[None]:
    """Fails the test that imports torchtitan for another device, not whichever one comes after it."""
    before = _device_type()
    yield
    now = _device_type()
    assert now in (None, before, "cpu"), (
        f"this test imported torchtitan for {now!r}, where no other test can use it any more: claim the device "
        "before (titan02_device.claim_device), or run it in a process of its own (tests.gloo.ranks.apart)."
    )


def _device_type() -> str | None:
    utils = sys.modules.get("torchtitan.tools.utils")
    return None if utils is None else utils.device_type
