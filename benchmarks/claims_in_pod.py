"""The claimer of `cluster_claims`, in a pod: claims as a rollout worker would, and prints what it measured as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys

from benchmarks.claims import Size, claims
from benchmarks.exec_round_trip import in_sandbox
from rljob.sandbox_client import SandboxClient


async def _measure(pool: str, size: Size, execs: int) -> dict[str, list[float]]:
    client = SandboxClient(os.environ["RLJOB_SANDBOX_URL"], os.environ["RLJOB_SANDBOX_TOKEN"])
    try:
        measured = await claims(client, pool, size)
        async with client.claim(pool) as box:
            commands = await in_sandbox(box)(["true"], execs)
    finally:
        await client.aclose()
    return {**measured._asdict(), "execs": commands}


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    found = asyncio.run(_measure(asked["pool"], Size(*asked["size"]), asked["execs"]))
    sys.stdout.write(json.dumps(found) + "\n")
