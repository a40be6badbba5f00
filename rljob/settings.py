"""What a component is told when it starts: one environment, the same from both drivers.

The drivers write these variables; every component reads them through `Settings.from_env`. Nothing
else in rljob reads the
environment for its wiring. URLs have no trailing slash.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rljob.api.rljob_types import RLJob
from rljob.errors import MachineError

PREFIX = "RLJOB_"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The environment of one component. Field `x_y` is variable `RLJOB_X_Y`."""

    component: str
    """Name of this process in the plan: store, prepare, sandbox-pool, engine-0, gateway-0, worker-0, trainer."""
    job_file: str
    """The resolved manifest as JSON."""
    artifacts: str
    """Directory of the artifact store: prepared/, weights/, batches/, checkpoints/, completions/, metrics/."""
    work_dir: str
    """Scratch of this component; a local driver empties it before each start, in a pod it lives as long as the pod."""
    redis_url: str = ""
    metrics_port: int = 0
    """Where this component serves /metrics and /healthz on loopback (a pod: on all addresses); 0: nowhere."""
    bind_host: str = "127.0.0.1"
    engine_url: str = ""
    gateway_url: str = ""
    """Data port of the gateway (sessions' chat completions)."""
    gateway_control_url: str = ""
    """Control port of the gateway (open and close sessions), for the worker alone."""
    broker_url: str = ""
    token: str = ""
    """Bearer token of the job: broker, gateway control, engine control."""
    pool_key: str = ""
    """Key of the sandbox pool manager; no other component gets it."""
    stay: bool = False
    """When the job is over, wait for SIGTERM: whoever started this process would start it again."""
    cache_dir: str = ""
    """Content-addressed cache shared between runs (prepared models and rows)."""
    manifest_dir: str = ""
    """Folder that relative file:// sources are relative to; also the first place where import-path
    plugins are looked up."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Read the environment.

        Raises:
            MachineError: a variable is missing or malformed.
        """
        env = os.environ if env is None else env
        fields = {
            name: env[PREFIX + name.upper()]
            for name in cls.__struct_fields__
            if PREFIX + name.upper() in env
        }
        try:
            return msgspec.convert(fields, cls, strict=False)
        except msgspec.ValidationError as error:
            raise MachineError(
                "environment", str(error), "start components through a driver (rljob run)"
            ) from None

    def make_folders(self) -> None:
        """Make the scratch folder, and the HOME that libraries keep their caches in: a pod's volume begins empty.

        Raises:
            MachineError: one of them cannot be made.
        """
        for name, folder in (("RLJOB_WORK_DIR", self.work_dir), ("HOME", os.environ.get("HOME"))):
            try:
                if folder:
                    Path(folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                fix = "mount a writable volume there"
                raise MachineError(
                    name, f"{folder} cannot be made ({error.strerror})", fix
                ) from None

    def to_env(self) -> dict[str, str]:
        """The variables that `from_env` reads back."""
        return {PREFIX + name.upper(): str(getattr(self, name)) for name in self.__struct_fields__}

    def job(self) -> RLJob:
        """The resolved manifest."""
        return RLJob.model_validate(json.loads(Path(self.job_file).read_text()))
