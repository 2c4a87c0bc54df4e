import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from angpt.training.run import Run
from tests.command import call
from tests.inference.conftest import byte_model, write_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return write_run(tmp_path / "mine", byte_model())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_until_it_is_told_to_stop(
    run: Run, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "angpt", "serve", str(run.path), "--port", "0", "--batch", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stdout.readline().startswith("mine: 64 tokens of context, torch.float32 on cpu, up to 2 texts")
        address = re.match("http://127.0.0.1:[0-9]+/v1/completions", process.stdout.readline())
        assert address is not None, process.stderr.read()
        body = json.dumps({"model": "mine", "prompt": "x", "temperature": 0, "max_tokens": 20}).encode()
        request = urllib.request.Request(address[0], body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            text = json.load(response)["choices"][0]["text"]
        assert call(capsys, "generate", run.path, "x", "--temperature", 0, "--tokens", 20)[1] == f"x{text}\n"
        process.send_signal(number)
        assert (process.wait(60), process.stderr.read()) == (0, "")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("nowhere",), "nowhere: does not exist"),
        (("{run}", "--batch", "0"), "batch must be at least 1"),
        (("{run}", "--max-length", "0"), "max_length must be at least 1"),
        (("{run}", "--port", "99999"), "cannot listen on 127.0.0.1, port 99999"),
        (("{run}", "--host", "256.0.0.1"), "cannot listen on 256.0.0.1, port 8000"),
    ],
)
def test_mistakes_exit_with_2_and_one_line(
    run: Run, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str
) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    code, out, err = call(capsys, "serve", *(a.format(run=run.path) for a in args))
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_server_whose_model_hangs(run: Run, number: signal.Signals) -> None:
    code = "import time, sys; from angpt.serving.batch import Batch; from angpt.cli.main import main; "
    code += "Batch.step = lambda self: (print('hangs', flush=True), time.sleep(600)); main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "serve", str(run.path), "--port", "0", "--grace", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        port = int(re.findall(":([0-9]+)/", process.stdout.readline())[0])
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            body = '{"prompt": "x", "temperature": 0}'  # a sampled first token could end the text before any step
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json"
            client.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
            assert process.stdout.readline() == "hangs\n"
            process.send_signal(number)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(3)
            process.send_signal(number)
            assert process.wait(60) == -number
    finally:
        process.kill()
        process.communicate()
