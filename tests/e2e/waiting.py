"""Waiting for conditions."""

import time

# Far more than anything takes, also on a slow machine.
PATIENCE_S = 120


def until(what, condition, patience_s=PATIENCE_S):
    """What `condition` returns, once that is true; `what` says in the error what did not come."""
    deadline = time.monotonic() + patience_s
    while True:
        result = condition()
        if result:
            return result
        assert time.monotonic() < deadline, f"not within {patience_s} s: {what}"
        time.sleep(0.1)
