"""One claimed sandbox: commands and files in it, and its end. `rljob.sandbox_client` claims it.

Nothing a sandbox sends is believed: sizes are bounded, types are checked, and what does not fit is a `SandboxError`.
Mutating calls carry a request id, so that one whose answer was lost is sent again and answered from the guest's memory.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NoReturn, Protocol, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from rljob import telemetry
from rljob.errors import SandboxError
from rljob.http1 import Answer, HttpClient, HttpError, Transport
from rljob.sandbox import BytesResult, ClaimAnswer, ExecResult
from rljob.sandbox_shells import Shell, shell
from rljob.sandbox_stream import GRACE_SECONDS, OutputStream, command_fields, exec_stream
from rljob.sandbox_wire import BAD_REQUESTS, FILE_ERRORS, encode, refusal_of

CALL_SECONDS = 20.0
"""Deadline of every call that runs no command."""
AGAIN_SECONDS = 30.0
"""For how long a call is repeated that a broker did not pass on."""
AGAIN_PAUSE_SECONDS = 0.5
IDLE_SECONDS = 20.0
"""How long an idle connection is trusted; the guest closes its own after 60 s."""
MAX_OUTPUT_BYTES = 4_000_000
"""Upper bound of `max_output_bytes`."""

_T = TypeVar("_T")
_Result = TypeVar("_Result", ExecResult, BytesResult)


class Releases(Protocol):
    """Takes claims back."""

    async def release_claim(self, claim_id: str, *, broken: bool = False) -> bool:
        """See `rljob.sandbox_client.SandboxClient.release_claim`."""
        ...


class ClaimedSandbox:
    """One claimed sandbox; implements `rljob.sandbox.Sandbox`.

    The first failure of the connection or the protocol marks it `lost`: its broker then replaces instead of reusing it.

    Args:
        client: Takes the claim back.
        claim: What the broker answered.
        relay: Reaches the broker, which passes on what is for the guest; without it the sandbox is reached directly.

    Attributes:
        url: Address of the guest, for connections of other kinds; empty where it is relayed.
        headers: What opens it to the claim.
    """

    def __init__(
        self, client: Releases, claim: ClaimAnswer, relay: Transport | None = None
    ) -> None:
        self.id = claim.sandbox_id
        self.claim_id = claim.claim_id
        self.claim = claim
        self.lost = False
        self.url, self._prefix = claim.url, ""
        self.headers = {
            "authorization": f"Bearer {claim.token}",
            "x-rljob-claim": claim.claim_id,
            "x-rljob-boot": claim.boot_nonce,
        }
        self._client, self._relay = client, relay
        self._released = False
        if relay is not None:
            self.url, self.headers = "", {}
            self._prefix = f"/v1/claims/{quote(claim.claim_id, safe='')}/guest"
            self._http: Transport = relay
            return
        try:
            self._http = HttpClient(claim.url, idle_seconds=IDLE_SECONDS)
        except HttpError as error:
            raise SandboxError(str(error)) from None

    async def exec(
        self,
        command: Sequence[str] | str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float = 60.0,
        max_output_bytes: int = 1_000_000,
    ) -> ExecResult:
        """See `rljob.sandbox.Sandbox.exec`. `max_output_bytes` holds for stdout and stderr each."""
        answer = await self._exec(
            command_fields(command, cwd, env, stdin, timeout), timeout, max_output_bytes
        )
        return self._checked(self._decode(answer, ExecResult))

    async def exec_bytes(
        self,
        command: Sequence[str] | str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float = 60.0,
        max_output_bytes: int = 1_000_000,
    ) -> BytesResult:
        """`exec` for output that is no text: stdout and stderr are the bytes that the command wrote."""
        fields = command_fields(command, cwd, env, stdin, timeout) | {"encoding": "base64"}
        answer = await self._exec(fields, timeout, max_output_bytes)
        return self._checked(self._decode(answer, BytesResult))

    def exec_stream(
        self,
        command: Sequence[str] | str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float = 60.0,
        max_output_bytes: int = 100_000_000,
    ) -> AbstractAsyncContextManager[OutputStream]:
        """`exec` whose output is read as it comes, see `rljob.sandbox_stream`; leaving it early ends the command.

        Who reads slowly slows the command down. `max_output_bytes` is at most 1 GiB here.
        """
        fields = command_fields(command, cwd, env, stdin, timeout)
        return exec_stream(self, fields, timeout, max_output_bytes)

    def shell(
        self,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        pty: bool = False,
        rows: int = 24,
        columns: int = 80,
    ) -> AbstractAsyncContextManager[Shell]:
        """A shell that keeps its state from command to command; closed on exit. See `rljob.sandbox_shells`.

        Args:
            cwd: Where it begins; without it the workspace.
            env: Beside the claim's.
            pty: On a terminal without echo, for programs that want one; TERM is `dumb` unless `env` says otherwise.
            rows: Of the terminal.
            columns: Of the terminal.

        Raises:
            ChildProcessError: it does not start.
            BlockingIOError: too many shells are open.
        """
        return shell(self, cwd=cwd, env=env, pty=pty, rows=rows, columns=columns)

    async def _exec(self, fields: dict[str, Any], timeout: float, max_output_bytes: int) -> Answer:
        begin = asyncio.get_running_loop().time()
        # A byte of output is at most six bytes of JSON.
        answer = await self.call(
            "POST",
            "/exec",
            encode({**fields, "max_output_bytes": min(max_output_bytes, MAX_OUTPUT_BYTES)}),
            timeout=timeout + GRACE_SECONDS,
            max_body_bytes=12 * max_output_bytes + 65_536,
        )
        telemetry.SANDBOX_EXEC_SECONDS.observe(asyncio.get_running_loop().time() - begin)
        return answer

    def _checked(self, result: _Result) -> _Result:
        if not 0 <= result.exit_code <= 255:
            self.lose(f"nonsense: exit code {result.exit_code}")
        return result

    async def read_file(self, path: str, *, max_bytes: int = 10_000_000) -> bytes:
        """See `rljob.sandbox.Sandbox.read_file`."""
        target = "/files?" + urlencode(
            {"path": path, "max_bytes": max_bytes}, errors="surrogateescape"
        )
        answer = await self.call("GET", target, max_body_bytes=max_bytes + 65_536)
        if len(answer.body) > max_bytes:
            self.lose(f"sent {len(answer.body)} bytes where at most {max_bytes} were asked for")
        return answer.body

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See `rljob.sandbox.Sandbox.write_file`."""
        await self.write_files({path: data}, mode=mode)

    async def write_files(self, files: Mapping[str, bytes], *, mode: int = 0o644) -> None:
        """See `rljob.sandbox.Sandbox.write_files`."""
        head = {
            "request_id": secrets.token_hex(8),
            "files": [
                {"path": path, "bytes": len(data), "mode": mode} for path, data in files.items()
            ],
        }
        await self.call("PUT", "/files", b"".join([encode(head), b"\n", *files.values()]))

    async def reset(self) -> None:
        """Kill everything that runs, empty the writable folders, verify. The claim stays. Raises SandboxError."""
        await self.call("POST", "/reset", encode({"request_id": secrets.token_hex(8)}))

    async def healthy(self) -> bool:
        """Whether the sandbox still answers for this claim."""
        try:
            await self.call("GET", "/healthz")
        except SandboxError:
            return False
        return True

    async def release(self) -> None:
        """Give the sandbox back; never raises. A second call does nothing."""
        if self._released:
            return
        self._released = True
        await self.aclose()
        await self._client.release_claim(self.claim_id, broken=self.lost)

    async def aclose(self) -> None:
        """Close the connections; the claim stays."""
        if self._relay is None:
            await self._http.aclose()

    async def call(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        *,
        timeout: float = CALL_SECONDS,
        max_body_bytes: int = 65_536,
    ) -> Answer:
        """One call to the guest in the name of the claim; what is no 200 is raised.

        Raises:
            OSError, ValueError: what the guest refuses (`sandbox_wire.FILE_ERRORS`).
            SandboxError: everything else, which makes the sandbox `lost`.
        """
        self._check_held()
        again_until = asyncio.get_running_loop().time() + AGAIN_SECONDS
        while True:
            try:
                answer = await self._http.request(
                    method,
                    self._prefix + target,
                    body,
                    headers=self.headers,
                    timeout_seconds=timeout,
                    max_body_bytes=max_body_bytes,
                )
            except TimeoutError:
                self._lose_silent(method, target, timeout)
            except HttpError as error:
                self.lose(str(error))
            if answer.status == 200:
                return answer
            if not self._is_relay_away(answer) or asyncio.get_running_loop().time() > again_until:
                self._raise(answer)
            await asyncio.sleep(AGAIN_PAUSE_SECONDS)

    def _is_relay_away(self, answer: Answer) -> bool:
        """The broker did not pass it on, and will: another one takes over, or it holds too many large bodies."""
        if self._relay is None or answer.status not in (429, 503):
            return False
        return refusal_of(answer).error in ("standby", "busy", "kubernetes")

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        *,
        timeout: float = CALL_SECONDS,
        max_body_bytes: int = 65_536,
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """One call whose answer is read as it comes; leaving it hangs up, which ends what the guest does for it.

        Args:
            method: HTTP method.
            target: Path and query.
            body: Request body.
            timeout: Until the answer begins. Who waits for its pieces may raise TimeoutError inside.
            max_body_bytes: Of the whole answer.

        Raises:
            OSError, ValueError, SandboxError: see `call`.
        """
        self._check_held()
        try:
            async with self._http.stream(
                method,
                self._prefix + target,
                body,
                headers=self.headers,
                timeout_seconds=timeout,
                max_body_bytes=max_body_bytes,
            ) as streamed:
                if streamed.status != 200:
                    refusal = b"".join([piece async for piece in streamed.pieces])
                    self._raise(Answer(streamed.status, streamed.headers, refusal))
                yield streamed.pieces
        except TimeoutError:
            self._lose_silent(method, target, timeout)
        except HttpError as error:
            self.lose(str(error))

    def _check_held(self) -> None:
        if self._released:
            raise SandboxError(f"sandbox {self.id}: already released")

    def _decode(self, answer: Answer, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(answer.body, type=kind)
        except msgspec.MsgspecError as error:
            self.lose(f"nonsense: {error}")

    def _raise(self, answer: Answer) -> NoReturn:
        refusal = refusal_of(answer)
        if refusal.error in FILE_ERRORS:
            kind, number = FILE_ERRORS[refusal.error]
            raise kind(number, refusal.message)
        if refusal.error in BAD_REQUESTS:
            raise ValueError(refusal.message)
        self.lose(f"{refusal.error}: {refusal.message} ({answer.status})")

    def _lose_silent(self, method: str, target: str, seconds: float) -> NoReturn:
        self.lose(f"no answer to {method} {target.partition('?')[0]} within {seconds:g} s")

    def lose(self, reason: str) -> NoReturn:
        """The sandbox has broken the protocol: raise that it is lost."""
        self.lost = True
        raise SandboxError(f"sandbox {self.id}: {reason}") from None
