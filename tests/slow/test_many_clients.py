"""Two hundred streaming clients for three minutes, a tenth of which vanish; then SIGTERM and SIGKILL in mid-traffic.

``make test-load``.  LOAD_SECONDS sets another time.
"""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import pytest

from adaptive_spec.records.database import Database
from tests.process import call, environment_of, start, stop, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_CLIENTS = 200
SECONDS = float(os.environ.get("LOAD_SECONDS", "180"))
VANISHING = 0.1  # of the streams that began
MAX_TOKENS = 24
GROWTH = 1.03  # of resident memory, from one half of the time to the other
GRACE_SECONDS = 20
WANTED = {"DECODER__SLOTS": 8, "DECODER__QUEUE_LIMIT": 64, "DECODER__DRAIN_SECONDS": 5, "RECORDS__TRACE_QUOTA": 50}


@dataclass
class Crowd:
    """What the clients met.  ended: whole, told (of an error, in the stream), vanished, refused (429), away (not
    taken any more), or what should not be: cut, and any other status."""

    port: int
    ended: Counter[str] = field(default_factory=Counter)
    waits: list[int] = field(default_factory=list)  # of Retry-After
    first_seconds: list[float] = field(default_factory=list)  # to the first token
    over: bool = False

    async def client(self, seed: int) -> None:
        """Ask again and again, as told after a refusal."""
        rng = random.Random(seed)
        while not self.over:
            try:
                ended = await self._ask(rng)
            except ConnectionRefusedError:
                ended = "away"
            except (ConnectionError, asyncio.IncompleteReadError):
                ended = "cut"
            self.ended[ended] += 1
            if ended == "refused":
                await asyncio.sleep(self.waits[-1] * rng.uniform(0.8, 1.2))
            elif ended in ("away", "cut"):
                return

    async def _ask(self, rng: random.Random) -> str:
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(_request(rng))
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
            except (ConnectionError, asyncio.IncompleteReadError):
                return "away"  # it was on its way to a socket that no longer listens
            status = int(head.split()[1])
            if status == 429:
                found = re.search(r"(?im)^retry-after: (\d+)", head)
                self.waits.append(int(found[1]) if found else 0)
                return "refused"
            if status == 503 and "shutting down" in (await reader.read()).decode():
                return "told"
            if status != 200:
                return str(status)
            num_events, leaves_after = 0, rng.randrange(1, MAX_TOKENS // 2) if rng.random() < VANISHING else None
            while line := await reader.readline():
                if not line.startswith(b"data: "):
                    continue
                if num_events == 0:
                    self.first_seconds.append(time.monotonic() - began)
                num_events += 1
                if line.startswith(b"data: [DONE]"):
                    return "whole"
                if "error" in json.loads(line[6:]):
                    return "told"
                if num_events == leaves_after:
                    writer.transport.abort()
                    return "vanished"
            return "cut"
        finally:
            writer.close()


def _request(rng: random.Random) -> bytes:
    body = {
        "prompt": [rng.randrange(250) for _ in range(rng.choice([1, 8, 40]))],
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "temperature": rng.choice([0, 1]),
        "stream": True,
        "metadata": {"domain": rng.choice("abcd")},
    }
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data


def resident_bytes(process: "subprocess.Popen[bytes]") -> int:
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def gauge(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        (value,) = re.findall(rf"^adaptive_spec_{name} (\S+)$", reply.read().decode(), re.MULTILINE)
    return float(value)


async def crowded(crowd: Crowd, process: "subprocess.Popen[bytes]", seconds: float, end: int | None) -> list[int]:
    """Let the crowd ask for so long; then it ends by itself, or in mid-traffic with the process by this signal.

    Returns the resident bytes, once a second.
    """
    clients = [asyncio.create_task(crowd.client(seed)) for seed in range(NUM_CLIENTS)]
    sizes = []
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        await asyncio.sleep(1)
        sizes.append(resident_bytes(process))
        assert process.poll() is None
    if end is None:
        crowd.over = True
    else:
        process.send_signal(end)
    await asyncio.wait_for(asyncio.gather(*clients), 120)
    return sizes


def test_a_crowd_then_the_end(tmp_path: Path) -> None:
    environment, port = environment_of(tmp_path, SCHEDULE__RETRAIN_HOURS=0, SCHEDULE__CALIBRATE_HOURS=0, **WANTED)
    url, log = f"http://127.0.0.1:{port}", tmp_path / "log"

    process = start(environment, port, log)
    crowd = Crowd(port)
    sizes = asyncio.run(crowded(crowd, process, SECONDS, None))
    print(f"\n{SECONDS:.0f} s: {dict(crowd.ended)}, first token after {median(crowd.first_seconds):.2f} s (median)")
    assert set(crowd.ended) == {"whole", "vanished", "refused"}
    assert crowd.ended["whole"] > crowd.ended["vanished"] > 0
    assert min(crowd.waits) >= 1, "Retry-After is told with every 429"
    until(lambda: gauge(url, "num_requests_running") == 0 == gauge(url, "num_requests_waiting"), 10)
    early, late = median(sizes[len(sizes) // 3 : len(sizes) // 2]), median(sizes[-len(sizes) // 4 :])
    print(f"resident: {early / 2**20:.0f} MiB before half of the time, {late / 2**20:.0f} MiB at its end")
    assert late < GROWTH * early
    body = {"prompt": "abc", "max_tokens": 8, "ignore_eos": True}
    assert call(f"{url}/v1/completions", body)["usage"]["completion_tokens"] == 8

    crowd = Crowd(port)
    asyncio.run(crowded(crowd, process, 5, signal.SIGTERM))
    began = time.monotonic()
    assert process.wait(GRACE_SECONDS) == 0
    print(f"SIGTERM: {dict(crowd.ended)}, gone {time.monotonic() - began:.1f} s after the last answer")
    assert set(crowd.ended) <= {"whole", "told", "vanished", "refused", "away"} and crowd.ended["whole"]
    told = log.read_text()
    assert "Traceback" not in told and " ERROR " not in told
    assert _num_unfinished(environment) == 0

    process = start(environment, port, log)
    crowd = Crowd(port)
    asyncio.run(crowded(crowd, process, 5, signal.SIGKILL))
    process.wait()
    print(f"SIGKILL: {dict(crowd.ended)}")
    process = start(environment, port, log)
    assert call(f"{url}/v1/completions", body)["usage"]["completion_tokens"] == 8
    assert call(f"{url}/readyz")["status"] == "ok"
    stop(process)
    assert process.returncode == 0
    told = log.read_text()
    assert "Traceback" not in told and " ERROR " not in told


def _num_unfinished(environment: dict[str, str]) -> int:
    """Requests with steps on record and no end: what a queue that was not flushed would leave."""
    database = Database(environment["ADAPTIVE_SPEC_RECORDS__URL"])
    try:
        with database.engine.connect() as connection:
            ended = "SELECT request_id FROM requests"
            query = f"SELECT COUNT(DISTINCT request_id) FROM steps WHERE request_id NOT IN ({ended})"
            return int(connection.exec_driver_sql(query).scalar_one())
    finally:
        database.close()
