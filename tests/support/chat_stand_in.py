"""A chat server on the loopback interface that answers by a function."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def chat_server(reply):
    """
    `reply(body)` gives the answer's text, its message, or `(status, text)`, where the text of a redirect is its
    address; `None` closes the connection without an answer.

    Yields the address and the list of bodies received so far.
    """
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body["path"] = self.path
            body["key"] = self.headers.get("Authorization")
            received.append(body)
            answer = reply(body)
            if answer is None:
                self.connection.close()
                return
            status, text = answer if isinstance(answer, tuple) else (200, None)
            if text is None:
                message = answer if isinstance(answer, dict) else {"role": "assistant", "content": answer}
                choice = {"message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
                text = json.dumps({"choices": [choice]})
            self.send_response(status)
            if status in range(300, 400):
                self.send_header("Location", text)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        server.server_close()
