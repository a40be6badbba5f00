"""The job's own Valkey: every acknowledged write is on disk before it is acknowledged."""

from __future__ import annotations

from rljob.api.rljob_types import RLJob
from rljob_operator.render.component import Component, Kind, Port, Probe, Resources

# `everysec` lost hundreds of acknowledged writes on kill -9 when the disk was busy; `always` lost none
_CONFIG = """\
bind ${{addr:bind}}
port ${{port:store/redis}}
requirepass ${{secret:redis}}
dir "${{path:store}}"
appendonly yes
appendfsync always
save ""
maxmemory {max_memory_mib}mb
maxmemory-policy noeviction
"""


def store(job: RLJob) -> Component:
    """The store, with its settings in a file, so that the password is in no command line."""
    redis = job.spec.store.redis
    return Component(
        role="store",
        name="store",
        kind=Kind.SERVICE,
        command=("${bin:valkey-server}", "${path:work}/valkey.conf"),
        files={"valkey.conf": _CONFIG.format(max_memory_mib=redis.max_memory_mib)},
        ports=(Port("redis", redis.port),),
        resources=Resources(cpu=0.2, memory_mib=64 + redis.max_memory_mib // 4),
        probe=Probe("redis", "redis", deadline_seconds=60),
    )
