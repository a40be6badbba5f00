"""Runs in the pod of `helm test`: each URL must answer 200 within a minute."""

import sys
import time
import urllib.error
import urllib.request

DEADLINE = time.monotonic() + 60


def ask(url: str) -> str:
    """What is wrong with the answer; empty: nothing."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return "" if answer.status == 200 else f"HTTP {answer.status}"
    except (urllib.error.URLError, OSError) as error:
        return str(error)


for url in sys.argv[1:]:
    while problem := ask(url):
        if time.monotonic() > DEADLINE:
            sys.exit(f"{url}: {problem}")
        time.sleep(1)
    sys.stdout.write(f"{url}: ready\n")
