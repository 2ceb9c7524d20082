"""The full stack, once for all tests that ask for it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deploy" / "local"))
from stack import STATE, Stack  # noqa: E402


@pytest.fixture(scope="session")
def full_stack():
    """Every part, the real ones where there are real ones. Its folder, with all logs, stays afterwards."""
    # A busy machine takes up to two seconds from Open WebUI's stop to the message that follows it.
    stack = Stack(STATE / "e2e", fresh=True, collect_spans=True, stop_grace_ms=5000)
    stack.start()
    yield stack
    stack.stop()
