"""`dflash eval --server`, against small servers that count as vLLM, SGLang, llama.cpp and `dflash serve` do."""

import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dflash_hf.cli import main
from dflash_hf.evaluation.server_eval import evaluate_server
from dflash_hf.synthetic.chat_client import ChatClient


TOKENS = 12  # of each answer: the first, and three verifications that commit 4, 1 and 6 tokens
LENGTHS = (4, 1, 6)
DRAFTED = 7  # in each verification


class StandIn:
    """
    A server that answers every conversation alike, and counts in one dialect.

    Args:
        dialect (`str`): Who counts.
        drafts (`bool`): Whether it has a drafter.
        old (`bool`): Of SGLang: a version that ignores `return_meta_info`.
    """

    def __init__(self, dialect, drafts=True, old=False):
        self.dialect = dialect
        self.drafts = drafts
        self.old = old
        self.bodies = []
        self.lock = threading.Lock()
        self.answers = 1000  # of others before
        self.start = "1.7e+09"

    def page(self, path):
        if path == "/v1/models":
            return json.dumps({"object": "list", "data": [{"id": "some/model"}]})
        if path == "/metrics" and self.dialect == "vllm":
            return self.metrics()
        if path == "/server_info" and self.dialect == "sglang":
            return json.dumps({"internal_states": [{"avg_spec_accept_length": 3.5 if self.drafts else None}]})
        if path == "/props" and self.dialect == "llama.cpp":
            return json.dumps({"build_info": "b8681", "total_slots": 4})
        return None

    def metrics(self):
        """Of two engines behind one address."""
        name = "vllm:spec_decode_num"
        lines = ["# TYPE vllm:num_requests_running gauge", 'vllm:num_requests_running{engine="0"} 0.0']
        if self.drafts:
            for engine, answers in (("0", 500), ("1", self.answers - 500)):
                label = f'engine="{engine}",model_name="some/model"'
                lines += [
                    f"# HELP {name}_drafts_total Number of spec decoding drafts.",
                    f"{name}_drafts_total{{{label}}} {3.0 * answers}",
                    f"{name}_drafts_created{{{label}}} {self.start}",
                    f"{name}_draft_tokens_total{{{label}}} {21.0 * answers}",
                    f"{name}_accepted_tokens_total{{{label}}} {8.0 * answers}",
                ]
                for at in range(DRAFTED):
                    count = sum(length - 1 > at for length in LENGTHS) * answers
                    lines.append(f'{name}_accepted_tokens_per_pos_total{{{label},position="{at}"}} {float(count)}')
        return "\n".join(lines) + "\n"

    def answer(self, body):
        with self.lock:
            self.bodies.append(body)
            self.answers += 1
        usage = {"prompt_tokens": 5, "completion_tokens": TOKENS, "total_tokens": 5 + TOKENS}
        choice = {"index": 0, "message": {"role": "assistant", "content": "abc"}, "finish_reason": "stop"}
        answer = {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }
        if self.dialect == "sglang" and body.get("return_meta_info") and not self.old:
            choice["meta_info"] = {"completion_tokens": TOKENS}
            if self.drafts:
                choice["meta_info"] |= {"spec_verify_ct": 3, "spec_accept_token_num": 8, "spec_draft_token_num": 21}
        if self.dialect == "llama.cpp":
            answer["timings"] = {"predicted_n": TOKENS, "predicted_ms": 5.0}
            if self.drafts:
                answer["timings"] |= {"draft_n": 21, "draft_n_accepted": 8}
        if self.dialect == "dflash":
            accepted = 8 if self.drafts else 0
            details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": 21 - accepted}
            if self.drafts:
                details |= {"verifications": 3, "verified_tokens": 11}
            usage["completion_tokens_details"] = details
        return answer


@contextmanager
def running(stand_in):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(stand_in.page(self.path))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = json.dumps(stand_in.answer(body))
            status = {"refuse": 400, "fail": 500}.get(body["messages"][-1]["content"], 200)
            self.reply(text if status == 200 else "too long", status)

        def reply(self, text, status=200):
            content = (text or "").encode()
            self.send_response(404 if text is None else status)
            self.send_header("Content-Type", "application/json" if content[:1] == b"{" else "text/plain")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("x-should-retry", "false")  # else the client waits and tries again
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"turns": ["one", "two"]}, {"messages": [{"role": "user", "content": "three"}]}, {"prompt": "four"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


EXPECTED = {
    # tau, as each server's project computes it, the verifications of an answer, and a word of the counter
    "vllm": (1 + 8 / 3, 3, "/metrics"),
    "sglang": (12 / 3, 3, "spec_verify_ct"),
    "llama.cpp": (12 / 4, 4, "timings"),
    "dflash": (11 / 3, 3, "usage.completion_tokens_details"),
}


@pytest.mark.parametrize("dialect", EXPECTED)
def test_each_server_is_read_by_its_own_counter(dialect, rows, tmp_path, capsys):
    stand_in = StandIn(dialect)
    options = [
        "--concurrency",
        "3",
        "--temperature",
        "0.5",
        "--max-new-tokens",
        "40",
        "--output",
        str(tmp_path / "out"),
    ]
    with running(stand_in) as url:
        assert main(["eval", "--server", f"{url}/v1/", "--data", str(rows), *options, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    tau, verifications, counter = EXPECTED[dialect]
    assert facts["tau"] == pytest.approx(tau) and counter in facts["counter"]
    assert facts["answers"] == 4 and facts["tokens"] == 48 and facts["tokens_per_second"] > 0
    assert facts["counts"]["verifications"] == 4 * verifications  # neither those of others before, nor the warm-up's
    assert facts["acceptance_rate"] == pytest.approx(8 / 21)
    shares = [2 / 3, 2 / 3, 2 / 3, 1 / 3, 1 / 3, 0, 0] if dialect == "vllm" else []
    assert facts["acceptance_by_position"] == pytest.approx(shares)
    saved = json.loads((tmp_path / "out" / "server_report.json").read_text(encoding="utf-8"))
    assert saved["setting"]["model"] == "some/model" and saved["setting"]["temperature"] == 0.5
    # Turns follow the server's own answers; one short request warmed it up.
    assert len(stand_in.bodies) == 5 and stand_in.bodies[0]["max_tokens"] == 16
    (second,) = [body for body in stand_in.bodies if body["messages"][-1]["content"] == "two"]
    assert [message["content"] for message in second["messages"]] == ["one", "abc", "two"]
    assert {(body["model"], body["temperature"], body["max_tokens"]) for body in stand_in.bodies[1:]} == {
        ("some/model", 0.5, 40)
    }


def test_older_sglang_is_read_by_its_mean(rows, capsys):
    with running(StandIn("sglang", old=True)) as url:
        assert main(["eval", "--server", url, "--data", str(rows)]) == 0
    printed = capsys.readouterr().out
    assert "3.50" in printed and "avg_spec_accept_length of /server_info, the mean of all requests" in printed


@pytest.mark.parametrize(
    "dialect, remedy",
    [
        ("vllm", "with a speculative configuration"),
        ("sglang", "with a speculative algorithm"),
        ("llama.cpp", "with a drafter"),
        ("dflash", "with a drafter"),
        ("other", "vLLM, SGLang and llama.cpp are known"),
    ],
)
def test_server_without_drafts_is_an_error(dialect, remedy, rows, capsys):
    with running(StandIn(dialect, drafts=False)) as url:
        assert main(["eval", "--server", url, "--data", str(rows)]) == 1
    message = capsys.readouterr().err
    assert "has counted no drafts" in message and remedy in message


@pytest.mark.parametrize(
    "answers, start, page, message",
    [
        (500, "1.7e+09", "/metrics", "counters of http://127.0.0.1:.* were set back"),
        (5000, "1.8e+09", "/metrics", "counters of http://127.0.0.1:.* were set back"),
        (1001, "1.7e+09", "/gone", r"\(vLLM\) no longer shows its counters at /metrics"),
    ],
    ids=["restart", "busy after a restart", "page"],
)
def test_lost_counters_are_an_error(answers, start, page, message, rows, monkeypatch, capsys):
    """The counts since the server's start, negative or of others, gave a plausible tau."""
    stand_in = StandIn("vllm")

    def answer_and_lose(body):
        completion = StandIn.answer(stand_in, body)
        if len(stand_in.bodies) == 4:
            stand_in.answers = answers
            stand_in.start = start
            monkeypatch.setattr(stand_in, "page", lambda path: StandIn.page(stand_in, path) if path == page else None)
        return completion

    monkeypatch.setattr(stand_in, "answer", answer_and_lose)
    with running(stand_in) as url:
        assert main(["eval", "--server", url, "--data", str(rows)]) == 1
    assert re.search(message, capsys.readouterr().err)


def test_report_names_what_a_server_leaves_out(rows, monkeypatch, capsys):
    stand_in = StandIn("llama.cpp")

    def answer(body):
        completion = StandIn.answer(stand_in, body)
        del completion["usage"]
        return completion

    monkeypatch.setattr(stand_in, "answer", answer)
    with running(stand_in) as url:
        assert main(["eval", "--server", url, "--data", str(rows)]) == 0
    printed = capsys.readouterr().out
    assert "tokens/s          not measured: answers have no usage.completion_tokens" in printed
    assert "model             some/model was requested, m answered" in printed


def test_interruption_does_not_wait_for_answers(monkeypatch):
    stand_in = StandIn("dflash")
    may_answer = threading.Event()
    answered = []

    def answer(body):
        if body["messages"][-1]["content"] == "slow":
            may_answer.wait(10)
            answered.append(body)
        return StandIn.answer(stand_in, body)

    def interrupt(outcomes):
        yield next(iter(outcomes))
        raise KeyboardInterrupt

    monkeypatch.setattr(stand_in, "answer", answer)
    conversations = [[[{"role": "user", "content": text}]] for text in ("fast", "slow")]
    with running(stand_in) as url:
        with pytest.raises(KeyboardInterrupt):
            evaluate_server(ChatClient(url, {"model": "m"}, {}), conversations, 2, interrupt)
        is_early = not answered
        may_answer.set()
    assert is_early


def test_benchmarks_are_sent_without_thinking(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"problem": "P"}) + "\n", encoding="utf-8")
    stand_in = StandIn("sglang")
    with running(stand_in) as url:
        data = ["--data", f"aime25={tmp_path / 'rows.jsonl'}"]
        assert main(["eval", "--server", url, *data]) == 0
        assert main(["eval", "--server", url, *data, "--thinking"]) == 0
    modes = [body["chat_template_kwargs"]["enable_thinking"] for body in stand_in.bodies]
    assert modes == [False, False, True, True] and stand_in.bodies[1]["max_tokens"] == 2048
    assert stand_in.bodies[1]["messages"][0]["content"].startswith("P\nPlease reason step by step")


def test_rejected_conversations_are_counted(tmp_path, capsys):
    (tmp_path / "rows.txt").write_text("one\nrefuse\n", encoding="utf-8")
    with running(StandIn("dflash")) as url:
        assert main(["eval", "--server", url, "--data", str(tmp_path / "rows.txt")]) == 1
    assert "rejected          1 conversations: the server answers 400: too long" in capsys.readouterr().out
    (tmp_path / "rows.txt").write_text("refuse\nrefuse\n", encoding="utf-8")
    with running(StandIn("dflash")) as url:
        assert main(["eval", "--server", url, "--data", str(tmp_path / "rows.txt")]) == 1
    assert "rejects all conversations: the server answers 400: too long" in capsys.readouterr().err


def test_failure_of_the_server_names_the_row(tmp_path, capsys):
    """Of 80 conversations, one at which the server always fails had to be found by hand."""
    (tmp_path / "rows.txt").write_text("one\ntwo\nfail\nfour\n", encoding="utf-8")
    with running(StandIn("dflash")) as url:
        assert main(["eval", "--server", url, "--data", str(tmp_path / "rows.txt")]) == 1
    assert re.search(r"Row 2 of the data: http://127.0.0.1:\d+ answers 500: too long", capsys.readouterr().err)


def test_options_of_a_local_pair_are_refused(rows, capsys):
    for option in (
        ["--draft", "d"],
        ["--prompt-lookup"],
        ["--tree-nodes", "9"],
        ["--no-packed"],
        ["--block-size", "4"],
    ):
        assert main(["eval", "--server", "http://127.0.0.1:9", "--data", str(rows), *option]) == 2
        assert f"leave out {option[0]}" in capsys.readouterr().err
    assert main(["eval", "--server", "http://127.0.0.1:9"]) == 2
    assert main(["eval", "--concurrency", "2", "--data", str(rows)]) == 2
    assert main(["eval", "--server", "http://127.0.0.1:9", "--data", str(rows), "--target", "m"]) == 1
    assert "http://127.0.0.1:9 does not answer" in capsys.readouterr().err
