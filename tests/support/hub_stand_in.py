"""
A stand-in of the Hub's commit API on the loopback interface: repositories, branches, large files, a commit at a time.
"""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    """
    The state that tests look at and break.

    Attributes:
        commits (`list[dict]`): For each commit the repository, its message, its files and its deletions.
        pulls (`list[dict]`): The same of each pull request, which changes no file, with their `content`.
        files (`dict[str, dict[str, bytes]]`): Content of each repository; of another branch under `repo@branch`.
        objects (`dict[str, bytes]`): Large files by their sha256.
        private (`dict[str, bool]`): Of each repository.
        drop (`int`): Uploads of large files still to be cut off half-way.
        failing_commits (`set[int]`): Which attempts to commit fail, counted from 1.
        attempts (`int`): Commits that were begun.
        heads (`dict[str, str]`): The newest commit of each branch besides the main ones.
        reader (`bool`): The token may read only.
        uploads (`int`): Uploads of large files that were begun.
        sent (`dict[str, int]`): Bytes of each file that were downloaded.
    """

    def __init__(self):
        self.commits = []
        self.files = {}
        self.objects = {}
        self.private = {}
        self.drop = 0
        self.failing_commits = set()
        self.attempts = 0
        self.heads = {}
        self.reader = False
        self.uploads = 0
        self.sent = {}
        self.pulls = []
        self.token = "hf_right"

    def sha(self, key="") -> str:
        """Of everything in the main branches: tests change files by themselves, too. Or the head of another branch."""
        if key in self.heads:
            return self.heads[key]
        files = {name: content for name, content in self.files.items() if "@" not in name}
        return hashlib.sha1(repr([len(self.commits), files]).encode()).hexdigest()

    def key(self, repo, revision) -> str:
        """Under which name of `files` a branch is, or the branch whose head is this commit; else the main one."""
        branches = [branch for branch in self.heads if branch.startswith(f"{repo}@")]
        names = [branch for branch in branches if branch == f"{repo}@{revision}"]
        heads = [branch for branch in branches if self.heads[branch] == revision]
        return [*names, *heads, repo][0]

    def has(self, repo, revision) -> bool:
        """Whether there is a branch or a commit of this name: a sha1, which is not compared."""
        return revision in (None, "main") or len(revision) == 40 or f"{repo}@{revision}" in self.heads


def is_large(name: str) -> bool:
    """Whether the Hub stores a file of this name by its sha256, apart from the commits."""
    return name.endswith(".safetensors")


def blob(name: str, content: bytes) -> dict:
    """What the Hub knows of a file's content."""
    facts = {"size": len(content), "blobId": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()}
    if is_large(name):
        sha = hashlib.sha256(content).hexdigest()
        facts["lfs"] = {"size": len(content), "sha256": sha, "oid": sha, "pointerSize": 134}
    return facts


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of huggingface_hub from the state of a [`Hub`], and changes it."""

    hub: Hub
    timeout = 20
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, body=None, status=200, **headers):
        content = json.dumps(body if body is not None else {}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().strip(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def refused(self, writing: bool) -> bool:
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self.answer({"error": "Invalid credentials in Authorization header"}, 401)
            return True
        if writing and self.hub.reader:
            self.answer({"error": "Forbidden"}, 403, X_Error_Message="You don't have the rights to write here")
            return True
        return False

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        if self.refused(writing=False):
            return
        path = self.path.split("?")[0]
        if path == "/api/whoami-v2":
            self.answer({"type": "user", "name": "someone"})
            return
        match = re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/([\w.-]+)/(.+)", path)
        if match:
            self.resolve(self.hub.key(match[1], match[2]), match[3])
            return
        match = re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(?:/(revision|tree)/([\w.-]+))?", path)
        if match is None or match[1] not in self.hub.files:
            self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
            return
        if not self.hub.has(match[1], match[3]):
            self.answer({"error": "Revision not found"}, 404, X_Error_Code="RevisionNotFound")
            return
        key = self.hub.key(match[1], match[3])
        content = self.hub.files[key]
        blobs = {name: blob(name, data) for name, data in sorted(content.items())}
        if match[2] == "tree":
            tree = [{"type": "file", "path": name, "oid": facts["blobId"], **facts} for name, facts in blobs.items()]
            self.answer(tree)
            return
        names = [{"rfilename": name, **facts} for name, facts in blobs.items()]
        private = self.hub.private.get(match[1], False)
        self.answer({"id": match[1], "sha": self.hub.sha(key), "siblings": names, "private": private})

    def resolve(self, repo, name):
        content = self.hub.files.get(repo, {}).get(name)
        if content is None:
            missing = "EntryNotFound" if repo in self.hub.files else "RepoNotFound"
            self.answer({"error": "not found"}, 404, X_Error_Code=missing)
            return
        etag = hashlib.sha256(content).hexdigest()
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if span:
            content = content[int(span[1]) : int(span[2]) + 1]
        self.send_response(206 if span else 200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", self.hub.sha())
        self.send_header("ETag", f'"{etag}"')
        self.end_headers()
        if self.command == "GET":
            self.hub.sent[name] = self.hub.sent.get(name, 0) + len(content)
            self.wfile.write(content)

    def do_PUT(self):
        name = self.path.rsplit("/", 1)[1]
        self.hub.uploads += 1
        if self.hub.drop:
            self.hub.drop -= 1
            self.rfile.read(64)
            self.close_connection = True
            self.connection.close()
            return
        content = self.body()
        assert hashlib.sha256(content).hexdigest() == name
        self.hub.objects[name] = content
        self.answer()

    def do_POST(self):
        content = self.body()
        path = self.path.split("?")[0]
        if path == "/api/validate-yaml":  # the Hub asks no token for it
            self.answer({"errors": [], "warnings": []})
            return
        if self.refused(writing=True):
            return
        preupload = re.fullmatch(r"/api/models/(.+)/preupload/([\w.-]+)", path)
        commit = re.fullmatch(r"/api/models/(.+)/commit/([\w.-]+)", path)
        branch = re.fullmatch(r"/api/models/(.+)/branch/([\w.-]+)", path)
        if path == "/api/repos/create":
            request = json.loads(content)
            repo = "/".join(filter(None, (request.get("organization"), request["name"])))
            if repo in self.hub.files:
                url = f"http://{self.headers['Host']}/{repo}"
                self.answer({"error": "You already created this model repo", "url": url, "id": repo}, 409)
            else:
                self.hub.files[repo] = {".gitattributes": b""}
                private = request.get("private") is True or request.get("visibility") == "private"
                self.hub.private[repo] = private
                self.answer({"url": f"http://{self.headers['Host']}/{repo}", "name": repo, "id": repo})
        elif branch:
            name = f"{branch[1]}@{branch[2]}"
            self.hub.files[name] = dict(self.hub.files[branch[1]])
            self.hub.heads[name] = self.hub.sha()
            self.answer()
        elif preupload:
            self.preupload(self.hub.key(preupload[1], preupload[2]), json.loads(content))
        elif re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            self.batch(json.loads(content))
        elif path == "/verify":
            self.answer()
        elif commit:
            self.hub.attempts += 1
            if self.hub.attempts in self.hub.failing_commits:
                self.answer({"error": "Internal error"}, 500, X_Error_Message="We're working hard to fix this")
                return
            repo = self.hub.key(commit[1], commit[2])
            self.commit(repo, [json.loads(line) for line in content.splitlines() if line])
        else:
            self.answer({"error": f"no {path}"}, 404)

    def preupload(self, repo, request):
        files = []
        for file in request["files"]:
            large = is_large(file["path"])
            entry = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            stored = self.hub.files[repo].get(file["path"])
            if stored is not None:
                facts = blob(file["path"], stored)
                entry["oid"] = facts["lfs"]["sha256"] if large else facts["blobId"]
            files.append(entry)
        self.answer({"files": files})

    def batch(self, request):
        objects = []
        for file in request["objects"]:
            entry = {"oid": file["oid"], "size": file["size"]}
            if file["oid"] not in self.hub.objects:
                base = f"http://{self.headers['Host']}"
                entry["actions"] = {
                    "upload": {"href": f"{base}/lfs/{file['oid']}"},
                    "verify": {"href": f"{base}/verify"},
                }
            objects.append(entry)
        self.answer({"transfer": "basic", "objects": objects})

    def commit(self, repo, lines):
        added = {}
        deleted = []
        message = None
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
                if value.get("parentCommit", self.hub.sha(repo)) != self.hub.sha(repo):
                    return self.answer({"error": "A commit has happened since. Please refresh and try again."}, 412)
            elif line["key"] == "file":
                added[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                added[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                deleted.append(value["path"])
        if "create_pr=1" in self.path:
            pull = {"repo": repo, "message": message, "added": sorted(added), "deleted": deleted, "content": added}
            self.hub.pulls.append(pull)
            url = f"http://{self.headers['Host']}/{repo}"
            sha = {"commitUrl": f"{url}/commit/pr", "commitOid": self.hub.sha()}
            return self.answer({**sha, "pullRequestUrl": f"{url}/discussions/{len(self.hub.pulls)}"})
        self.hub.files[repo].update(added)
        for name in deleted:
            del self.hub.files[repo][name]
        self.hub.commits.append({"repo": repo, "message": message, "added": sorted(added), "deleted": deleted})
        if repo in self.hub.heads:
            self.hub.heads[repo] = hashlib.sha1(f"{repo} {len(self.hub.commits)}".encode()).hexdigest()
        sha = self.hub.sha(repo)
        self.answer({"commitUrl": f"http://{self.headers['Host']}/{repo}/commit/{sha}", "commitOid": sha})


class Session:
    """huggingface_hub 1 has cards judged by huggingface.co, whatever the endpoint is."""

    def __init__(self, address):
        self.address = address

    def post(self, url, **more):
        from huggingface_hub import get_session

        return get_session().post(url.replace("https://huggingface.co", self.address), **more)


@contextmanager
def stand_in(monkeypatch):
    """Run a [`Hub`] and send huggingface_hub there."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    from huggingface_hub import close_session

    try:
        address = f"http://127.0.0.1:{server.server_port}"
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", address)
        monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)  # keeps the first address it used
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.repocard.get_session", lambda: Session(address))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between retries
        close_session()
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
        close_session()
