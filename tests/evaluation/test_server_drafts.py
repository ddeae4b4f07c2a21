"""`dflash eval --server`, against a stand-in that streams what llama.cpp's server streams."""

import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dflash_hf.cli import main
from dflash_hf.evaluation.measure import EvalReport


class Server(BaseHTTPRequestHandler):
    """Says `abcdef`; drafts three tokens at a time, of which two, none and one are right."""

    drafts, timings, status, asked = True, True, 200, []
    steps = ((0, 0, "a"), (3, 2, "b"), (3, 2, "c"), (3, 2, "d"), (6, 2, "e"), (9, 3, "f"), (9, 3, "g"))

    def log_message(self, *args):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked.append({**body, "authorization": self.headers["Authorization"]})
        self.send_response(self.status)
        self.end_headers()
        if self.status != 200:
            self.wfile.write(b'{"error": "no such model"}')
            return
        for number, (drafted, accepted, text) in enumerate(self.steps, start=1):
            timings = {"predicted_n": number, "prompt_ms": 500.0, "predicted_ms": 500.0 if self.drafts else 1500.0}
            if self.drafts and drafted:
                timings |= {"draft_n": drafted, "draft_n_accepted": accepted}
            event = {"choices": [{"delta": {"content": text}}], **({"timings": timings} if self.timings else {})}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


@contextmanager
def serving(**changes):
    handler = type("Changed", (Server,), {"asked": [], **changes})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", handler.asked
        finally:
            server.shutdown()


def test_a_report_like_any_other(tmp_path, capsys):
    rows = [{"turns": ["one", "two"]}, {"messages": [{"role": "user", "content": "three"}]}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--data", str(tmp_path / "data.jsonl"), "--max-new-tokens", "9", "--output", str(tmp_path / "out")]
    with serving() as (drafted, asked), serving(drafts=False) as (alone, _):
        assert main(["eval", "--server", f"{drafted}/v1/", "--alone", alone, *words]) == 0
    assert [one["messages"][-1]["content"] for one in asked] == ["one", "two", "three"]
    assert [one["role"] for one in asked[1]["messages"]] == ["user", "assistant", "user"]
    assert asked[1]["messages"][1]["content"] == "abcdefg"
    assert {(one["temperature"], one["max_tokens"], one["stream"]) for one in asked} == {(0, 9, True)}
    report = EvalReport.from_json((tmp_path / "out" / "eval_report.json").read_text())
    assert report.acceptance_lengths == [[3, 1, 2]] * 3 and report.tau == 2 and report.block_size == 4
    assert report.methods["dflash"].speedup == 2 and report.lossless
    assert report.setting["dataset"] == "data.jsonl"
    out = capsys.readouterr().out
    assert "2.00 tokens per verification over 9" in out and "2.00x" in out and "3 of 3 texts" in out
    path = tmp_path / "out" / "eval_report.json"
    assert main(["eval", "--compare", str(path), str(path)]) == 0
    assert "the same prompts: tau +0.000" in capsys.readouterr().out
    old = json.loads(path.read_text())
    del old["setting"]["prompts_digest"]  # earlier reports of servers have none, so that nobody knows
    path.write_text(json.dumps(old))
    assert main(["eval", "--compare", str(path), str(path)]) == 0
    assert "the same prompts" not in capsys.readouterr().out


def test_one_server(tmp_path, capsys):
    (tmp_path / "data.txt").write_text("one\n")
    with serving() as (drafted, _):
        words = ["eval", "--server", drafted, "--data", str(tmp_path / "data.txt"), "--output", str(tmp_path)]
        assert main(words) == 0
    assert "alone " not in capsys.readouterr().out
    report = tmp_path / "eval_report.json"
    summary = json.loads(report.read_text())["summary"]
    assert [summary[name] for name in ("speedup", "lossless", "verdict")] == [None] * 3  # nothing was compared
    assert main(["eval", "--compare", str(report), str(report)]) == 0


@pytest.mark.parametrize(
    "steps, forwards",
    [
        (Server.steps, 4),
        (((0, 0, "a"), (3, 2, "b"), (3, 2, "c"), (3, 2, "d"), *[(3, 2, c) for c in "efghijk"]), 9),  # 7 undrafted
        (((0, 0, "a"), (3, 3, "b"), (3, 3, "c")), 2),  # the answer ends within the block
    ],
)
def test_rounds_without_a_draft_are_forwards_too(steps, forwards, tmp_path):
    """11 tokens of 9 forwards were reported as 5.5 tokens per forward."""
    (tmp_path / "data.txt").write_text("one\n")
    with serving(steps=steps) as (url, _):
        assert main(["eval", "--server", url, "--data", str(tmp_path / "data.txt"), "--output", str(tmp_path)]) == 0
    report = EvalReport.from_json((tmp_path / "eval_report.json").read_text())
    assert report.methods["dflash"].target_forwards == forwards


def test_a_password_does_not_reach_the_report(tmp_path, monkeypatch):
    (tmp_path / "data.txt").write_text("one\n")
    with serving() as (proxy, _):
        monkeypatch.setenv("http_proxy", proxy)
        words = ["--data", str(tmp_path / "data.txt"), "--output", str(tmp_path)]
        assert main(["eval", "--server", "http://me:secret@somewhere.test:80", *words]) == 0
    text = (tmp_path / "eval_report.json").read_text()
    assert "secret" not in text and "http://somewhere.test:80" in text


@pytest.mark.parametrize(
    "url, message",
    [
        ("http://me:secret@127.0.0.1:9", "http://127.0.0.1:9 gave no usable answer"),
        ("http://me:secret@127.0.0.1/v1", "http://127.0.0.1 gave no usable answer"),
        ("http://me:secret@[::1]:9/v1", "http://[::1]:9 gave no usable answer"),
        ("http://127.0.0.1:9/v1?token=secret", "server='***' must be an address such as"),
        ("http://127.0.0.1:9/v1?to=a@b&token=secret", "server='***' must be an address such as"),
        ("http://me:sec/secret@127.0.0.1:9", "server='***' must be an address such as"),
        ("http://me:secret@127.0.0.1:secret", "server='***' must be an address such as"),
        ("http://[secret", "server='***' must be an address such as"),
        ("http://me:secret", "server='***' must be an address such as"),
        ("me:secret@127.0.0.1:9", "server='***' must be an address such as"),
    ],
)
def test_a_password_does_not_reach_an_error(url, message, tmp_path, capsys, monkeypatch):
    """Without a port, `http.client` took `secret@127.0.0.1` for one, and named it."""
    monkeypatch.setattr("http.client.HTTPConnection.default_port", 9)  # the discard port: closed
    (tmp_path / "data.txt").write_text("one\n")
    words = ["--data", str(tmp_path / "data.txt")]
    assert main(["eval", "--server", url, *words]) == 1
    error = capsys.readouterr().err
    assert message in error and "secret" not in error
    words += ["--target", "served", "--output", str(tmp_path / "out.jsonl"), "--retries", "0"]
    (tmp_path / "data.jsonl").write_text('{"prompt": "one"}\n')
    words[1] = str(tmp_path / "data.jsonl")
    assert main(["regenerate", "--server", url, *words]) == 1
    assert "secret" not in capsys.readouterr().err


def test_a_password_is_sent():
    """It was part of the host's name, which nobody has."""
    with serving() as (url, asked):
        url = url.replace("//", "//me:se%40cret@")
        assert main(["eval", "--server", url, "--data", "json", "--prompts", "1"]) == 0
    assert asked[0]["authorization"] == "Basic bWU6c2VAY3JldA=="  # me:se@cret


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"drafts": False}, "does not draft"),
        ({"timings": False}, "reports no timings"),
        ({"status": 404}, 'answers 404: {"error": "no such model"}'),
    ],
)
def test_a_server_that_does_not_tell(changes, message, tmp_path, capsys):
    (tmp_path / "data.txt").write_text("one\n")
    with serving(**changes) as (url, _):
        assert main(["eval", "--server", url, "--data", str(tmp_path / "data.txt")]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "gave no usable answer (SSH-2.0-OpenSSH"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n100\r\ndata: {}\n\n", "gave no usable answer"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": {"message": "Compute error."}}\n\n', "Compute error."),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"timings": {"predicted_n": 3}}\n\n', "reports no timings"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"timings": null, "error": null}\n\n', "reports no timings"),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 100\r\n\r\nloading", "answers 500: loading."),
    ],
)
def test_answers_that_are_none(answer, message, tmp_path, capsys):
    """They were reported as defects of this package, or as another server."""
    (tmp_path / "data.txt").write_text("one\n")

    def reply():
        connection, _ = listener.accept()
        connection.recv(65536)
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):  # the request may come in two parts; unread, it would reset the connection
            pass
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=reply, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert main(["eval", "--server", url, "--data", str(tmp_path / "data.txt")]) == 1
    error = capsys.readouterr().err
    assert message in error and "bug report" not in error


def test_a_benchmark_has_its_own_length_and_split(monkeypatch, capsys):
    """A server was asked for 256 tokens instead of 2048, and another split was ignored."""
    monkeypatch.setattr("dflash_hf.evaluation.sets.load_rows", lambda *_, **__: [{"prompt": ["Hi"]}])
    with serving() as (url, asked):
        assert main(["eval", "--server", url, "--data", "mt-bench", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["setting"]["dataset"] == "HuggingFaceH4/mt_bench_prompts"  # no report of a server named its data
    assert asked[0]["max_tokens"] == 2048
    assert main(["eval", "--server", url, "--data", "mt-bench", "--split", "test"]) == 2
    assert "--split test: --data mt-bench has a split of its own" in capsys.readouterr().err


def test_no_prompts_are_no_fault_of_the_server(tmp_path, capsys):
    (tmp_path / "data.txt").write_text("\n")
    assert main(["eval", "--server", "http://127.0.0.1:9", "--data", str(tmp_path / "data.txt")]) == 1
    assert "data.txt holds no prompts" in capsys.readouterr().err


def test_words_that_cannot_be_right(capsys):
    assert main(["eval", "--server", "http://127.0.0.1:9"]) == 2
    assert main(["eval", "--alone", "http://127.0.0.1:9"]) == 2
    words = [
        "--raw",
        "--runs",
        "9",
        "--compile",
        "--prompt-lookup",
        "--target",
        "t",
        "--dtype",
        "fp16",
        "--threads",
        "1",
    ]
    assert main(["eval", "--server", "http://127.0.0.1:9", "--data", "json", *words]) == 2
    assert (
        "leave out --target, --raw, --prompt-lookup, --compile, --threads, --runs, --dtype." in capsys.readouterr().err
    )
    assert main(["eval", "--server", "http://127.0.0.1:9", "--data", "json", "--prompts", "1"]) == 1
    assert "is the server running?" in capsys.readouterr().err
