"""Commands whose output is read as it comes, and shells that keep their state: through broker, client and guest."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from rljob.claimed_sandbox import ClaimedSandbox
from rljob.errors import SandboxError
from rljob.http1 import HttpClient
from rljob.sandbox_client import SandboxClient
from rljob.sandbox_shells import Shell
from rljob_sandbox_pool.runtimes.bubblewrap import BubblewrapRuntime

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
NUM_COMMANDS = int(os.environ.get("RLJOB_TEST_COMMANDS", "200"))
"""Ten thousand where there is time."""


@pytest.fixture
def runtime(tmp_path: Path) -> BubblewrapRuntime:
    """The one that runs something; commands and guest are of one user where this test says so."""
    return BubblewrapRuntime(tmp_path / "sandboxes")


@pytest.fixture
async def box(client: SandboxClient):
    async with client.claim("default", env={"FROM_CLAIM": "yes"}) as box:
        yield box


@pytest.fixture(params=[False, True], ids=["pipes", "pty"])
async def shell(box: ClaimedSandbox, request: pytest.FixtureRequest):
    async with box.shell(pty=request.param) as shell:
        yield shell


async def _left(box: ClaimedSandbox, name: str) -> int:
    """How many processes of that name there are, once those that were killed have gone."""
    for _ in range(50):
        if not int((await box.exec(f"pgrep -xc {name}")).stdout):
            return 0
        await asyncio.sleep(0.02)
    return int((await box.exec(f"pgrep -xc {name}")).stdout)


async def test_output_comes_while_the_command_runs(box: ClaimedSandbox) -> None:
    await box.exec("mkfifo gate")
    seen = []
    async with box.exec_stream("echo one; echo two >&2; read x < gate; echo $x; exit 3") as output:
        async for name, data in output:
            seen.append((name, data))
            if len(seen) == 2:
                await box.exec("echo go > gate")
    assert sorted(seen[:2]) == [("stderr", b"two\n"), ("stdout", b"one\n")]
    assert seen[2:] == [("stdout", b"go\n")]
    assert output.result.exit_code == 3


async def test_a_stream_is_whole_bytes_and_all_of_them(box: ClaimedSandbox) -> None:
    await box.write_file("data", data := bytes(range(256)) * 8000)
    async with box.exec_stream(["cat", "data"]) as output:
        assert b"".join([piece async for _, piece in output]) == data
    assert not output.result.truncated


async def test_a_stream_ends_at_its_limit_and_at_its_timeout(box: ClaimedSandbox) -> None:
    async with box.exec_stream("yes", timeout=0.5, max_output_bytes=100_000) as output:
        assert sum([len(piece) async for _, piece in output]) == 100_000
    assert (output.result.timed_out, output.result.truncated) == (True, True)


async def test_a_slow_reader_slows_the_command_down(box: ClaimedSandbox) -> None:
    command = "head -c 30000000 /dev/zero; touch done"
    async with box.exec_stream(command, timeout=30) as output:
        await anext(output)
        await asyncio.sleep(0.3)
        with pytest.raises(FileNotFoundError):
            await box.read_file("done")
        assert sum([len(piece) async for _, piece in output]) > 20_000_000
    assert await box.read_file("done") == b""


async def test_who_hangs_up_ends_the_command_and_what_it_started(box: ClaimedSandbox) -> None:
    async with box.exec_stream("sleep 100 & setsid sleep 100 & echo begun; sleep 100") as output:
        assert await anext(output) == ("stdout", b"begun\n")
    assert await _left(box, "sleep") == 0
    with pytest.raises(ValueError, match="not been read"):
        _ = output.result


async def test_the_readers_own_timeout_is_not_the_sandboxs_fault(box: ClaimedSandbox) -> None:
    with pytest.raises(TimeoutError):
        async with box.exec_stream("sleep 100") as output, asyncio.timeout(0.1):
            await anext(output)
    assert not box.lost
    assert await _left(box, "sleep") == 0


async def test_output_that_is_no_text_comes_as_it_is(box: ClaimedSandbox) -> None:
    result = await box.exec_bytes(r"printf '\377\0a'; printf '\376' >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code) == (b"\xff\0a", b"\xfe", 3)


async def test_a_shell_keeps_folder_variables_functions_and_the_last_exit_code(
    shell: Shell,
) -> None:
    await shell.run("mkdir -p deep && cd deep; X=1; export Y=2; f() { echo f$1; }; false")
    result = await shell.run('echo $? ${PWD##*/} $X $FROM_CLAIM; sh -c "echo \\$X\\$Y"; f 3')
    assert result.output == "1 deep 1 yes\n2\nf3\n"
    assert (result.exit_code, result.alive, result.running) == (0, True, False)


async def test_a_shells_environment_is_the_claims_and_its_own(box: ClaimedSandbox) -> None:
    async with box.shell(cwd="/usr", env={"OWN": "1"}) as shell:
        assert (await shell.run("echo $FROM_CLAIM $OWN; pwd")).output == "yes 1\n/usr\n"


async def test_stdout_and_stderr_are_in_order(shell: Shell) -> None:
    result = await shell.run("for n in 1 2 3; do echo out; echo err >&2; done")
    assert result.output == "out\nerr\n" * 3


async def test_only_a_shell_with_a_terminal_has_one(box: ClaimedSandbox) -> None:
    question = "test -t 0 && test -t 1 && echo yes; (: < /dev/tty) 2>&- && stty size"
    async with box.shell() as plain, box.shell(pty=True, rows=50, columns=120) as pty:
        assert (await plain.run(question)).output == ""
        assert (await pty.run(question)).output == "yes\n50 120\n"


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ("echo 'unbalanced", "EOF"),
        ("if true; then", "syntax error"),
        ("echo $((1/0))", "division"),
        ("echo ${nope:?is missing}", "is missing"),
        ("no-such-command", "not found"),
        ("cd /nowhere", "No such file"),
    ],
)
async def test_a_mistake_is_an_error_of_the_command_not_of_the_shell(
    shell: Shell, wrong: str, word: str
) -> None:
    result = await shell.run(wrong)
    assert word in result.output
    assert result.exit_code not in (0, None)
    assert (await shell.run("echo fine")).output == "fine\n"


async def test_background_jobs_go_on_and_what_they_say_comes_with_the_next_answer(
    shell: Shell,
) -> None:
    await shell.run("mkfifo gate; { read x < gate; echo $x; } & sleep 100 &")
    assert (await shell.run("echo said > gate; wait %1; jobs -r")).output.splitlines()[:1] == [
        "said"
    ]
    assert "sleep 100" in (await shell.run("jobs -r")).output


@pytest.mark.parametrize(
    "command",
    [
        "sleep 100",
        "while :; do :; done",
        "while :; do sleep 0.01; done",
        "f() { while :; do sleep 0.01; done; }; while :; do f; done; echo never",
        "cat",
        "read x",
        "sleep 100 | cat; echo never",
        "(sleep 100; echo never)",
    ],
)
async def test_a_timeout_interrupts_the_command_and_the_shell_lives_on(
    shell: Shell, command: str
) -> None:
    await shell.run("X=kept; sleep 77 &")
    result = await shell.run(f"echo begun; {command}", timeout=0.3)
    assert (result.timed_out, result.exit_code, result.alive) == (True, 124, True)
    assert result.output.startswith("begun\n")
    assert "never" not in result.output
    after = await shell.run("echo $X; jobs -r")
    assert after.output.startswith("kept\n")
    assert "sleep 77" in after.output


async def test_what_ignores_the_interrupt_is_killed(box: ClaimedSandbox, shell: Shell) -> None:
    await box.write_file("stubborn", b"trap '' INT TERM; setsid sleep 88 & sleep 99")
    await shell.run("sleep 77 &")
    result = await shell.run("sh stubborn", timeout=0.2)
    assert (result.timed_out, result.alive) == (True, True)
    assert "Stopped" not in result.output
    assert (await shell.run("jobs -r")).output.count("sleep 77") == 1
    assert (await box.exec("pgrep -xc sleep")).stdout == "1\n"


async def test_a_shell_that_cannot_be_interrupted_is_ended(shell: Shell) -> None:
    result = await shell.run("trap 'echo no' INT; while :; do :; done", timeout=0.2)
    assert (result.timed_out, result.alive) == (True, False)
    with pytest.raises(BrokenPipeError):
        await shell.run("true")


async def test_a_command_may_be_left_running_and_waited_for(shell: Shell) -> None:
    await shell.run("mkfifo gate")
    left = await shell.run("echo one; read x < gate; echo $x", timeout=0.2, on_timeout="leave")
    assert (left.output, left.exit_code, left.running, left.timed_out) == (
        "one\n",
        None,
        True,
        False,
    )
    with pytest.raises(BlockingIOError):
        await shell.run("echo meanwhile")
    await shell._box.exec("echo two > gate")
    end = await shell.wait(timeout=10)
    assert (end.output, end.exit_code, end.running) == ("two\n", 0, False)
    assert (await shell.wait()).exit_code == 0


async def test_a_program_that_asks_is_answered(shell: Shell) -> None:
    asks = await shell.run("python3 -i", timeout=20, on_timeout="leave", quiet=0.3)
    assert asks.running
    assert ">>>" in asks.output
    await shell.input("print(6 * 7)\n")
    assert (await shell.wait(timeout=20, quiet=0.3)).output.startswith("42\n")
    await shell.input("raise SystemExit(9)\n")
    assert (await shell.wait(timeout=20)).exit_code == 9


async def test_what_was_said_before_one_waits_is_not_waited_for(shell: Shell) -> None:
    await shell.run("read x; echo got $x; sleep 77", timeout=0, on_timeout="leave")
    await shell.input("it\n")
    await asyncio.sleep(0.3)
    assert (await shell.wait(timeout=60, quiet=0.1)).output == "got it\n"


async def test_the_end_of_a_shell_that_nobody_waited_for_is_told_once(
    box: ClaimedSandbox, shell: Shell
) -> None:
    await shell.run("read x; echo $x; exit 4", timeout=0, on_timeout="leave")
    await shell.input("last words\n")
    await box.exec(f"while kill -0 {shell.pid}; do sleep 0.01; done", timeout=20)
    result = await shell.wait()
    assert (result.exit_code, result.alive) == (4, False)
    assert result.output.startswith("last words\n")
    with pytest.raises(BrokenPipeError):
        await shell.wait()


async def test_input_ends_where_its_sender_says_so(shell: Shell) -> None:
    await shell.run("cat; echo end", timeout=0, on_timeout="leave")
    await shell.input("line\n", eof=True)
    end = await shell.wait(timeout=10)
    assert end.output.endswith("line\nend\n")


async def test_a_signal_reaches_the_command_and_not_the_shell(shell: Shell) -> None:
    catch = "import signal,time; signal.signal(15, lambda *_: exit(5)); print('up', flush=True); time.sleep(99)"
    await shell.run(f'python3 -c "{catch}"', timeout=20, on_timeout="leave", quiet=0.05)
    await shell.signal(15)
    result = await shell.wait(timeout=10)
    assert (result.exit_code, result.alive) == (5, True)
    await shell.signal(9)
    assert (await shell.run("echo here")).output == "here\n"


async def test_on_a_terminal_keys_interrupt_and_stop_the_command(box: ClaimedSandbox) -> None:
    async with box.shell(pty=True) as shell:
        await shell.run("sleep 77", timeout=0.2, on_timeout="leave")
        await shell.input(b"\x03")
        assert (await shell.wait(timeout=20)).exit_code == 130
        await shell.run("sleep 88", timeout=0.2, on_timeout="leave")
        await shell.input(b"\x1a")
        assert (await shell.wait(timeout=20)).exit_code == 148
        assert "Stopped" in (await shell.run("jobs; kill %1; fg", timeout=20)).output


async def test_a_command_that_crashes_says_nothing_of_the_shell(shell: Shell) -> None:
    result = await shell.run("echo out; sh -c 'kill -SEGV $$'")
    assert result.exit_code == 139
    assert "tcsetattr" not in result.output


async def test_exit_ends_the_shell(shell: Shell) -> None:
    result = await shell.run("exit 3")
    assert (result.exit_code, result.alive, result.running) == (3, False, False)
    with pytest.raises(BrokenPipeError, match="exit code 3"):
        await shell.run("true")


@pytest.mark.parametrize(
    ("command", "code"), [("kill -9 $$", 137), ("exec true", 0), ("set -e; false", 1)]
)
async def test_a_command_that_ends_the_shell_is_answered(
    shell: Shell, command: str, code: int
) -> None:
    result = await shell.run(command, timeout=20)
    assert (result.exit_code, result.alive, result.timed_out) == (code, False, False)


async def test_a_command_that_closes_its_descriptors_harms_only_itself(shell: Shell) -> None:
    await shell.run("exec 0<&- 1>&- 2>&-")
    assert (await shell.run("exec 3</etc/passwd 9>/dev/null; echo back")).output == "back\n"
    assert (await shell.run("read x <&3; echo ${x%%:*}")).output == "root\n"


async def test_a_command_that_closes_the_shells_own_descriptors_is_answered(shell: Shell) -> None:
    close = 'for n in 0 1 2 10 11 12 13 14 15 250 251 252; do eval "exec $n>&-"; done'
    await shell.run(close, timeout=20)


async def test_output_may_be_anything(shell: Shell) -> None:
    await shell.run(r"printf '\377\0\n1 0\n__rljob 9 0\n'")
    assert (await shell.run("echo next")).output == "next\n"


async def test_output_past_the_limit_is_dropped_a_long_line_of_it_too(shell: Shell) -> None:
    result = await shell.run(
        "head -c 10000000 /dev/zero | tr '\\0' x; exit_code() { return 3; }; exit_code",
        max_output_bytes=1_000_000,
        timeout=60,
    )
    assert (len(result.data), result.truncated, result.exit_code) == (1_000_000, True, 3)
    result = await shell.run("echo short")
    assert (result.output, result.truncated) == ("short\n", False)


async def test_a_command_may_be_long_and_of_many_lines(shell: Shell) -> None:
    text = "".join(f"line {n} 'quoted' \"twice\" $HOME \\\n" for n in range(20_000))
    result = await shell.run(f"cat <<'EOF' | md5sum; echo end\n{text}EOF\n", timeout=60)
    assert result.output.endswith("end\n")
    result = await shell.run(f"cat > f <<'EOF'\n{text}EOF\n", timeout=60)
    assert await shell._box.read_file("f") == text.encode()


@pytest.mark.timeout(900)
async def test_many_commands_leave_nothing_behind(box: ClaimedSandbox, shell: Shell) -> None:
    count = f"ls /proc/{shell.pid}/fd | wc -l; ps -e | wc -l"
    await shell.run("true")
    before = (await box.exec(count)).stdout
    for n in range(NUM_COMMANDS):
        assert (await shell.run(f"true $(echo {n})")).exit_code == 0
    assert (await box.exec(count)).stdout == before


async def test_closing_a_shell_ends_what_it_started_and_nothing_else(box: ClaimedSandbox) -> None:
    async with box.shell() as other:
        await other.run("sleep 77 &")
        async with box.shell() as shell:
            await shell.run("sleep 88 & (sleep 88 &) ; nohup sleep 88 >/dev/null &")
            await shell.close()
        assert (await box.exec("pgrep -xc sleep")).stdout == "1\n"


async def test_shells_are_few(box: ClaimedSandbox) -> None:
    async with box.shell() as first:
        others = [box.shell() for _ in range(15)]
        for other in others:
            await other.__aenter__()
        with pytest.raises(BlockingIOError, match="16 shells"):
            async with box.shell():
                pass
        await first.close()
        async with box.shell() as shell:
            assert (await shell.run("echo room")).output == "room\n"


async def test_a_shell_that_does_not_start_says_why(box: ClaimedSandbox) -> None:
    with pytest.raises(ChildProcessError, match="/nowhere"):
        async with box.shell(cwd="/nowhere"):
            pass


async def test_a_reset_ends_every_shell(box: ClaimedSandbox) -> None:
    async with box.shell() as shell:
        await shell.run("sleep 77 &")
        await box.reset()
        with pytest.raises(ProcessLookupError):
            await shell.run("true")


async def test_a_timeout_of_a_command_spares_shells_and_what_they_started(
    box: ClaimedSandbox,
) -> None:
    async with box.shell() as shell:
        await shell.run("sleep 77 & (sleep 78 &)")
        assert (await box.exec("sleep 99", timeout=0.2)).timed_out
        assert (await box.exec("pgrep -xc sleep")).stdout == "2\n"
        assert (await shell.run("echo here")).output == "here\n"


async def test_after_the_release_a_shell_is_lost(client: SandboxClient) -> None:
    async with client.claim("default") as box, box.shell() as shell:
        await box.release()
        with pytest.raises(SandboxError):
            await shell.run("true")


async def _connect(box: ClaimedSandbox, head: str, body: bytes = b"") -> Connection:
    host, port = box.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    owner = "".join(f"{name}: {value}\r\n" for name, value in box.headers.items())
    writer.write(f"{head} HTTP/1.1\r\n{owner}".encode() + body)
    return reader, writer


def _order(**fields: object) -> bytes:
    body = json.dumps({"request_id": os.urandom(8).hex(), **fields}).encode()
    return b"content-length: %d\r\n\r\n%b" % (len(body), body)


async def test_a_connection_that_is_cut_in_a_stream_ends_the_command(box: ClaimedSandbox) -> None:
    order = _order(command="echo begun; sleep 99", stream=True)
    reader, writer = await _connect(box, "POST /exec", order)
    await reader.readuntil(b"data")
    writer.transport.abort()
    assert await _left(box, "sleep") == 0


async def test_a_shells_command_whose_connection_is_cut_goes_on_and_answers_who_asks_again(
    box: ClaimedSandbox,
) -> None:
    async with box.shell() as shell:
        order = _order(command="sleep 0.3; echo done >> f; cat f")
        for cut in (True, False):
            reader, writer = await _connect(box, f"POST /shells/{shell.id}/run", order)
            if cut:
                await asyncio.sleep(0.1)
                writer.transport.abort()
        assert b'"output": "done\\n"' in await reader.readuntil(b"}")
        writer.close()


async def test_half_a_request_and_one_that_drips_in_hold_up_nobody(box: ClaimedSandbox) -> None:
    order = _order(command="echo late")
    reader, writer = await _connect(box, "POST /exec", order[:-5])
    for byte in order[-5:]:
        assert (await box.exec("echo prompt")).stdout == "prompt\n"
        writer.write(bytes([byte]))
        await asyncio.sleep(0.02)
    assert b"late" in await reader.readuntil(b"}")
    writer.close()


@pytest.mark.parametrize("route", ["POST /exec", "POST /shells", "POST /shells/s1/input"])
async def test_a_body_past_the_limit_is_413_before_it_is_sent(
    box: ClaimedSandbox, route: str
) -> None:
    reader, writer = await _connect(box, route, b"content-length: 40000000\r\n\r\n")
    assert (await reader.read(12)) == b"HTTP/1.1 413"
    assert await reader.read() != b""
    writer.close()
    assert (await box.exec("echo alive")).stdout == "alive\n"


async def test_input_that_nobody_reads_is_bounded(shell: Shell) -> None:
    async def send() -> None:
        for _ in range(20):
            await shell.input(b"x" * 1_000_000)

    with pytest.raises(BlockingIOError, match="nobody reads"):
        await send()


async def _usage(box: ClaimedSandbox) -> dict[str, float]:
    """What the guest holds once the last commands' processes have gone."""
    http = HttpClient(box.url)
    for _ in range(100):
        lines = (await http.request("GET", "/metrics")).body.decode().splitlines()
        usage = {name: float(value) for name, value in (line.split() for line in lines)}
        if not usage["rljob_guest_processes"]:
            break
        await asyncio.sleep(0.02)
    await http.aclose()
    return usage


@pytest.mark.timeout(900)
async def test_many_commands_leave_the_guest_as_it_was(box: ClaimedSandbox) -> None:
    async def some(count: int) -> None:
        for n in range(count):
            await box.exec(f"(sleep 0 &); echo {n}", stdin=b"x" * 100)
            if n % 10 == 0:
                async with box.exec_stream("echo x") as output:
                    await anext(output)
            if n % 50 == 0:
                async with box.shell(pty=n % 100 == 0) as shell:
                    await shell.run("sleep 99 &")

    await some(100)
    before = await _usage(box)
    await some(NUM_COMMANDS)
    after = await _usage(box)
    assert after["rljob_guest_processes"] == 0
    assert after["rljob_guest_descriptors"] <= before["rljob_guest_descriptors"] + 1
    assert after["rljob_guest_memory_bytes"] < before["rljob_guest_memory_bytes"] + 4_000_000
