"""What a sandbox promises, whatever runs it: one suite over every runtime, through broker, client and guest."""

import asyncio
from pathlib import Path

import pytest

from rljob import sandbox_archive
from rljob.claimed_sandbox import ClaimedSandbox
from rljob.errors import DeadlineError, ManifestError, SandboxError
from rljob.http1 import HttpClient
from rljob.sandbox_client import SandboxClient
from rljob_sandbox_pool.runtimes.base import Runtime


@pytest.fixture
async def box(client: SandboxClient):
    async with client.claim("default", env={"FROM_CLAIM": "yes"}) as box:
        yield box


async def test_a_command_gives_its_output_and_exit_code(box: ClaimedSandbox) -> None:
    result = await box.exec("echo hello; exit 3")
    assert (result.stdout, result.stderr, result.exit_code) == ("hello\n", "", 3)
    assert not result.timed_out
    assert not result.truncated


async def test_argv_runs_without_a_shell(box: ClaimedSandbox) -> None:
    assert (await box.exec(["echo", "a b", "$HOME;"])).stdout == "a b $HOME;\n"


async def test_a_command_that_does_not_exist_is_127(box: ClaimedSandbox) -> None:
    result = await box.exec(["no-such-command"])
    assert result.exit_code == 127
    assert "no-such-command" in result.stderr


async def test_stdin_reaches_the_command(box: ClaimedSandbox) -> None:
    assert (await box.exec(["cat"], stdin=b"by stdin")).stdout == "by stdin"


async def test_the_claims_environment_and_the_calls_reach_the_command(box: ClaimedSandbox) -> None:
    lines = (await box.exec(["env"], env={"FROM_CALL": "too"})).stdout.splitlines()
    assert {"FROM_CLAIM=yes", "FROM_CALL=too"} <= set(lines)


async def test_a_timeout_is_a_result_and_the_sandbox_lives(box: ClaimedSandbox) -> None:
    result = await box.exec("echo begun; sleep 60", timeout=0.3)
    assert (result.timed_out, result.exit_code, result.stdout) == (True, 124, "begun\n")
    assert (await box.exec("true")).exit_code == 0


async def test_output_past_the_limit_is_dropped(box: ClaimedSandbox) -> None:
    await box.write_file("long", b"x" * 50_000)
    result = await box.exec("cat long", max_output_bytes=1000)
    assert (len(result.stdout), result.truncated, result.exit_code) == (1000, True, 0)


async def test_output_that_is_not_text_is_replaced_not_refused(box: ClaimedSandbox) -> None:
    await box.write_file("garbage", bytes(range(256)) * 4)
    result = await box.exec("cat garbage")
    assert result.exit_code == 0
    assert "\ufffd" in result.stdout


async def test_output_that_is_not_text_can_be_had_as_it_is(box: ClaimedSandbox) -> None:
    await box.write_file("garbage", data := bytes(range(256)) * 4)
    assert (await box.exec_bytes("cat garbage")).stdout == data


async def test_output_can_be_read_as_it_comes(box: ClaimedSandbox) -> None:
    await box.write_file("garbage", data := bytes(range(256)) * 1000)
    async with box.exec_stream("cat garbage; exit 3") as output:
        assert b"".join([piece async for _, piece in output]) == data
    assert (output.result.exit_code, output.result.truncated) == (3, False)


async def test_commands_run_at_once(box: ClaimedSandbox) -> None:
    began = asyncio.get_running_loop().time()
    results = await asyncio.gather(*(box.exec(f"sleep 0.5; echo {n}") for n in range(6)))
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(6)]
    assert asyncio.get_running_loop().time() - began < 6 * 0.5 * 5


async def test_a_file_written_is_read_back_byte_for_byte(box: ClaimedSandbox) -> None:
    data = bytes(range(256)) * 1000
    await box.write_file("deep/down/file.bin", data)
    assert await box.read_file("deep/down/file.bin") == data
    assert await box.read_file("/workspace/deep/down/file.bin") == data


async def test_files_written_together_are_all_there(box: ClaimedSandbox) -> None:
    files = {f"data/{n}.conf": f"key={n}\n".encode() for n in range(5)} | {"empty": b""}
    await box.write_files(files)
    assert {path: await box.read_file(path) for path in files} == files


async def test_a_command_sees_files_and_leaves_files(box: ClaimedSandbox) -> None:
    await box.write_file("in", b"from outside\n")
    assert (await box.exec("cat in > out && cat out")).stdout == "from outside\n"
    assert await box.read_file("out") == b"from outside\n"


async def test_file_names_may_be_odd(box: ClaimedSandbox) -> None:
    names = ["with space", "ünïcode 漢字", "per%cent&and?=#", "-dash"]
    await box.write_files({name: name.encode() for name in names})
    assert [await box.read_file(name) for name in names] == [name.encode() for name in names]


@pytest.mark.parametrize("path", ["missing", "no/such/folder/file"])
async def test_a_missing_file_is_FileNotFoundError(box: ClaimedSandbox, path: str) -> None:
    with pytest.raises(FileNotFoundError):
        await box.read_file(path)


async def test_a_folder_is_no_file(box: ClaimedSandbox) -> None:
    await box.write_file("folder/file", b"")
    with pytest.raises(IsADirectoryError):
        await box.read_file("folder")
    with pytest.raises(IsADirectoryError):
        await box.write_file("folder", b"")


async def test_a_file_is_no_folder(box: ClaimedSandbox) -> None:
    await box.write_file("file", b"")
    with pytest.raises(NotADirectoryError):
        await box.write_file("file/inside", b"")


async def test_a_file_larger_than_asked_for_is_ValueError(box: ClaimedSandbox) -> None:
    await box.write_file("large", b"x" * 100)
    with pytest.raises(ValueError, match="100 bytes"):
        await box.read_file("large", max_bytes=99)
    assert len(await box.read_file("large", max_bytes=100)) == 100


async def test_outside_of_the_writable_folders_nothing_is_written(box: ClaimedSandbox) -> None:
    with pytest.raises(PermissionError):
        await box.write_file("/usr/bin/evil", b"")


async def test_a_full_disk_is_OSError_and_the_sandbox_lives(pool_of) -> None:
    client = await pool_of(limits={"diskMib": 1})
    async with client.claim("default") as box:
        with pytest.raises(OSError, match="No space left"):
            await box.write_file("big", b"x" * 2_000_000)
        await box.write_file("small", b"fits")
        assert await box.read_file("small") == b"fits"


@pytest.mark.parametrize(
    "command",
    ["nul\0", [], ["ok", "nul\0"], "x" * 1_100_000],
    ids=["nul", "empty", "nul argument", "too long"],
)
async def test_a_malformed_command_is_ValueError(box: ClaimedSandbox, command: object) -> None:
    with pytest.raises(ValueError):
        await box.exec(command)
    assert (await box.exec("true")).exit_code == 0


async def test_a_reset_keeps_the_claim_and_nothing_else(box: ClaimedSandbox) -> None:
    await box.write_files({"file": b"1", "/tmp/file": b"2"})
    await box.reset()
    for path in ("file", "/tmp/file"):
        with pytest.raises(FileNotFoundError):
            await box.read_file(path)
    assert "FROM_CLAIM=yes" in (await box.exec(["env"])).stdout


async def test_a_released_sandbox_comes_back_clean(pool_of) -> None:
    client = await pool_of(warm=1, max=1)
    async with client.claim("default", env={"SECRET": "of the first"}) as first:
        await first.write_files({"left/behind": b"1", "/tmp/left": b"2"})
    async with client.claim("default") as second:
        assert second.id == first.id
        assert "SECRET" not in (await second.exec(["env"])).stdout
        for path in ("left/behind", "/tmp/left"):
            with pytest.raises(FileNotFoundError):
                await second.read_file(path)


async def test_the_token_of_an_old_claim_opens_nothing(pool_of) -> None:
    client = await pool_of(warm=1, max=1)
    first = await client.acquire("default")
    await client.release_claim(first.claim_id)
    with pytest.raises(SandboxError):
        await first.exec("true")
    async with client.claim("default") as second:
        assert second.id == first.id
        with pytest.raises(SandboxError, match="wrong_claim"):
            await first.exec("true")
        assert (await second.exec("true")).exit_code == 0
    await first.release()


async def test_replace_gives_every_claim_a_new_sandbox(pool_of) -> None:
    client = await pool_of(warm=1, max=1, recycle={"strategy": "recreate"})
    async with client.claim("default") as first:
        pass
    async with client.claim("default") as second:
        assert second.id != first.id


async def test_a_sandbox_is_replaced_after_its_reuses(pool_of) -> None:
    client = await pool_of(warm=1, max=1, recycle={"strategy": "reset", "maxReuses": 1})
    ids = []
    for _ in range(4):
        async with client.claim("default") as box:
            ids.append(box.id)
    assert ids[0] == ids[1] != ids[2] == ids[3]


async def test_no_two_claims_share_a_sandbox(pool_of) -> None:
    client = await pool_of(warm=2, max=4)
    live: set[str] = set()

    async def episode() -> None:
        async with client.claim("default", timeout=60) as box:
            assert box.id not in live
            live.add(box.id)
            await box.write_file("mine", box.claim_id.encode())
            await box.exec("sleep 0.01")
            assert await box.read_file("mine") == box.claim_id.encode()
            live.remove(box.id)

    await asyncio.gather(*(episode() for _ in range(24)))
    (status,) = await client.pools()
    assert (status.claimed, status.failed_total) == (0, 0)
    assert status.started_total <= 4


async def test_a_full_pool_makes_a_claim_wait_and_a_release_serves_it(pool_of) -> None:
    client = await pool_of(warm=1, max=1)
    first = await client.acquire("default")
    second = asyncio.create_task(client.acquire("default"))
    await asyncio.sleep(0.2)
    assert not second.done()
    await first.release()
    await (await second).release()


async def test_no_sandbox_in_time_is_a_DeadlineError_that_says_why(pool_of) -> None:
    client = await pool_of(warm=1, max=1)
    async with client.claim("default"):
        with pytest.raises(DeadlineError, match="all 1 sandboxes of pool default are taken"):
            await client.acquire("default", timeout=0.5)


async def test_whoever_stops_waiting_takes_nothing(pool_of) -> None:
    client = await pool_of(warm=1, max=1)
    first = await client.acquire("default")
    waiting = asyncio.create_task(client.acquire("default"))
    await asyncio.sleep(0.1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await first.release()
    async with client.claim("default", timeout=20):
        pass


async def test_an_unknown_pool_is_named(client: SandboxClient) -> None:
    with pytest.raises(ManifestError, match="no pool 'other'; there are default"):
        await client.acquire("other")


async def test_an_unknown_image_is_refused(pool_of) -> None:
    client = await pool_of(images=[{"image": "known"}])
    with pytest.raises(ManifestError, match="no image 'unknown'"):
        await client.acquire("default", image="unknown")
    async with client.claim("default", image="known"):
        pass


async def test_a_wrong_broker_token_is_refused(client: SandboxClient) -> None:
    stranger = SandboxClient(client.url, "wrong")
    with pytest.raises(SandboxError, match="401"):
        await stranger.acquire("default", timeout=5)
    await stranger.aclose()


async def test_a_claim_past_its_time_to_live_is_over_and_its_place_is_free(pool_of) -> None:
    client = await pool_of(warm=1, max=1)
    box = await client.acquire("default", ttl_seconds=1)
    async with client.claim("default", timeout=30) as other:
        assert other.id != box.id
        with pytest.raises(SandboxError):
            await box.exec("true")
    await box.release()


async def test_a_claim_that_nobody_uses_is_over_and_its_place_is_free(pool_of) -> None:
    client = await pool_of(warm=1, max=1)
    box = await client.acquire("default", ttl_seconds=600, idle_seconds=1)
    for _ in range(4):
        await asyncio.sleep(0.4)
        assert (await box.exec("true")).exit_code == 0
    running = await box.exec("sleep 1.6; echo done")
    assert running.stdout == "done\n"
    async with client.claim("default", timeout=30) as other:
        assert other.id != box.id
        with pytest.raises(SandboxError):
            await box.exec("true")
    await box.release()


async def test_a_large_file_goes_in_by_parts(
    box: ClaimedSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_archive, "PART_BYTES", 100_000)
    data = bytes(range(256)) * 2000
    (tmp_path / "file").write_bytes(data)
    await sandbox_archive.upload(box, tmp_path / "file", "deep/down/file")
    assert await box.read_file("deep/down/file") == data
    assert (await box.exec("ls", cwd="deep/down")).stdout == "file\n"


async def test_a_folder_goes_in_and_comes_out(box: ClaimedSandbox, tmp_path: Path) -> None:
    (tmp_path / "in/deep").mkdir(parents=True)
    (tmp_path / "in/deep/file").write_bytes(b"content")
    if (await box.exec("uname")).exit_code != 0:
        with pytest.raises(ValueError, match="no archives"):
            await sandbox_archive.upload(box, tmp_path / "in", "in")
        return
    await sandbox_archive.upload(box, tmp_path / "in", "in")
    came = await sandbox_archive.download(box, "in", tmp_path / "out")
    assert (came.num_files, came.num_bytes, came.left_out) == (1, 7, [])
    assert (tmp_path / "out/deep/file").read_bytes() == b"content"


async def test_a_released_box_refuses_calls_here_already(client: SandboxClient) -> None:
    box = await client.acquire("default")
    await box.release()
    await box.release()
    with pytest.raises(SandboxError, match="already released"):
        await box.exec("true")


async def test_health_is_about_this_claim(client: SandboxClient) -> None:
    box = await client.acquire("default")
    assert await box.healthy()
    await client.release_claim(box.claim_id)
    assert not await box.healthy()
    await box.release()


async def test_a_dead_sandbox_is_a_SandboxError_and_is_replaced(pool_of) -> None:
    client = await pool_of(warm=1, max=1)
    async with client.claim("default") as box:
        running = asyncio.create_task(box.exec("sleep 60"))
        await asyncio.sleep(0.3)
        client.manager.pools["default"].kill(box.id)
        with pytest.raises(SandboxError):
            await running
        assert not await box.healthy()
    async with client.claim("default", timeout=30) as other:
        assert other.id != box.id
        assert (await other.exec("true")).exit_code == 0


async def test_a_repeated_request_is_run_once_and_answered_alike(box: ClaimedSandbox) -> None:
    body = b'{"request_id": "the-same", "command": "echo once >> log"}'
    http = HttpClient(box.url)
    first = await http.request("POST", "/exec", body, headers=box.headers)
    second = await http.request("POST", "/exec", body, headers=box.headers)
    await http.aclose()
    assert (first.status, first.body) == (second.status, second.body) == (200, first.body)
    assert await box.read_file("log") == b"once\n"


async def test_a_request_repeated_while_it_runs_joins_it(box: ClaimedSandbox) -> None:
    body = b'{"request_id": "slow", "command": "sleep 0.3; echo once >> log"}'
    clients = [HttpClient(box.url) for _ in range(3)]
    answers = await asyncio.gather(
        *(c.request("POST", "/exec", body, headers=box.headers) for c in clients)
    )
    for http in clients:
        await http.aclose()
    assert len({answer.body for answer in answers}) == 1
    assert await box.read_file("log") == b"once\n"


async def test_another_boot_nonce_is_refused(box: ClaimedSandbox) -> None:
    http = HttpClient(box.url)
    answer = await http.request(
        "GET", "/files?path=x", headers={**box.headers, "x-rljob-boot": "0" * 16}
    )
    await http.aclose()
    assert answer.status == 409
    assert b"other_boot" in answer.body


@pytest.mark.parametrize("path", ["/claim", "/reset", "/release", "/exec", "/tunnel"])
async def test_without_a_key_or_a_token_nothing_opens(box: ClaimedSandbox, path: str) -> None:
    http = HttpClient(box.url)
    answer = await http.request("POST", path, b"{}", headers={"x-rljob-pool": "guess"})
    await http.aclose()
    assert answer.status in (401, 409)


async def test_a_body_past_the_limit_is_413(box: ClaimedSandbox) -> None:
    http = HttpClient(box.url)
    answer = await http.request(
        "PUT", "/files", headers={**box.headers, "content-length": "99999999999"}
    )
    await http.aclose()
    assert answer.status in (400, 413)


async def test_a_sandbox_without_shells_says_so_and_is_not_lost(
    box: ClaimedSandbox, runtime: Runtime
) -> None:
    if runtime.name != "simulated":
        async with box.shell() as shell:
            assert (await shell.run("echo alive")).output == "alive\n"
        return
    with pytest.raises(OSError, match="no shells"):
        await box.shell().__aenter__()
    assert (await box.exec("echo alive")).stdout == "alive\n"
