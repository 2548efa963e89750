"""A Google Cloud Storage of one's own: as much of its JSON API as gcsfs, google-cloud-storage and TensorStore speak.

Objects are whole or not there, there are no folders, nothing can be renamed or added to: what a local disk hides.
"""

import base64
import functools
import hashlib
import itertools
import json
import os
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


class FakeGcs:
    """Serves on a free port of this machine. `objects`: (bucket, name) -> (content, generation);
    buckets need no making."""

    def __init__(self):
        self.objects, self.generations, self.lock = {}, itertools.count(1), threading.Lock()
        self.refuse = None  # a function (method, name or prefix) -> bool: which requests are answered with `status`
        self.status = 403
        self.uploads = {}
        fake = self

        class Handler(_Handler):
            store = fake

        self.server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def names(self, bucket):
        return sorted(name for b, name in self.objects if b == bucket)

    def put(self, bucket, name, content):
        with self.lock:
            self.objects[bucket, name] = (content, next(self.generations))


@functools.cache
def serve():
    """The one of this process, which all that speaks to Google's is led to, from the first test that asks for it on.

    For good: TensorStore's threads read the environment at any time,
    and a variable that goes meanwhile may end the process.
    """
    fake = FakeGcs()
    os.environ |= {
        "STORAGE_EMULATOR_HOST": fake.url,  # gcsfs, google-cloud-storage
        "TENSORSTORE_GCS_HTTP_URL": fake.url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",  # TensorStore looks for no account
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # asks an address that emulators do not have
    }
    return fake


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], ConnectionError):  # clients hang up as they please
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body together, or each waits for the other's receipt

    def log_message(self, *args):
        pass

    def body(self):
        if self.headers.get("Transfer-Encoding", "") == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status, content=b"", **headers):
        if isinstance(content, dict):
            content, headers = json.dumps(content).encode(), {"Content-Type": "application/json"} | headers
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def error(self, status, reason):
        self.answer(status, {"error": {"code": status, "message": reason, "errors": [{"message": reason}]}})

    def described(self, bucket, name):
        content, generation = self.store.objects[bucket, name]
        digest = base64.b64encode(hashlib.md5(content).digest()).decode()
        return {
            "kind": "storage#object", "id": f"{bucket}/{name}/{generation}", "name": name, "bucket": bucket,
            "generation": str(generation), "metageneration": "1", "size": str(len(content)), "md5Hash": digest,
            "contentType": "application/octet-stream", "storageClass": "STANDARD",
            "timeCreated": "2026-01-01T00:00:00.000Z", "updated": "2026-01-01T00:00:00.000Z",
        }  # fmt: skip

    def handle_request(self):
        data = self.body()
        url = urlsplit(self.path)
        query = {k: v[0] for k, v in parse_qs(url.query, keep_blank_values=True).items()}
        found = re.fullmatch(r"/(upload/|download/)?(?:storage/v1/)?b/([^/]+)(?:/o(?:/(.*))?)?/?", url.path)
        if not found:
            return self.error(404, f"no such address: {url.path}")
        kind, bucket, rest = (found[1] or "").rstrip("/"), unquote(found[2]), found[3]
        rewrite = re.fullmatch(r"(.+)/(?:rewriteTo|copyTo)/b/([^/]+)/o/(.+)", rest or "")
        name = unquote(rewrite[1] if rewrite else rest or "")
        meant = (name or query.get("name") or query.get("prefix", "")).rstrip("/")
        if self.store.refuse is not None and self.store.refuse(self.command, meant):
            return self.error(self.store.status, "the storage says no")
        with self.store.lock:
            if kind == "upload":
                return self.upload(bucket, query, data)
            if rewrite:
                return self.copy(bucket, name, unquote(rewrite[2]), unquote(rewrite[3]))
            if rest is None and "/o" not in url.path[-2:]:
                return self.answer(200, {"kind": "storage#bucket", "name": bucket, "id": bucket, "location": "HERE"})
            if rest is None:
                return self.list(bucket, query)
            return self.one(bucket, name, query, media=kind == "download" or query.get("alt") == "media")

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = handle_request

    def list(self, bucket, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        first, end = query.get("startOffset", ""), query.get("endOffset")
        items, prefixes = [], set()
        for name in self.store.names(bucket):
            if not name.startswith(prefix) or name < first or (end and name >= end):
                continue
            below = name[len(prefix) :]
            if delimiter and delimiter in below.rstrip(delimiter if query.get("includeTrailingDelimiter") else ""):
                prefixes.add(prefix + below.partition(delimiter)[0] + delimiter)
            else:
                items.append(self.described(bucket, name))
        self.answer(200, {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)})

    def one(self, bucket, name, query, *, media):
        if (bucket, name) not in self.store.objects:
            return self.error(404, f"No such object: {bucket}/{name}")
        content, generation = self.store.objects[bucket, name]
        if "ifGenerationMatch" in query and query["ifGenerationMatch"] != str(generation):
            return self.error(412, "another generation")
        if self.command == "DELETE":
            del self.store.objects[bucket, name]
            return self.answer(204)
        if query.get("ifGenerationNotMatch") == str(generation):
            return self.answer(304)
        if not media:
            return self.answer(200, self.described(bucket, name))
        told = {"X_Goog_Generation": str(generation), "Content_Type": "application/octet-stream"}
        if asked := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            low = int(asked[1]) if asked[1] else max(len(content) - int(asked[2]), 0)
            high = min(int(asked[2]), len(content) - 1) if asked[1] and asked[2] else len(content) - 1
            if low >= len(content):
                return self.error(416, "nothing there")
            return self.answer(206, content[low : high + 1], Content_Range=f"bytes {low}-{high}/{len(content)}", **told)
        self.answer(200, content, **told)

    def copy(self, bucket, name, other, target):
        if (bucket, name) not in self.store.objects:
            return self.error(404, f"No such object: {bucket}/{name}")
        self.store.objects[other, target] = (self.store.objects[bucket, name][0], next(self.store.generations))
        self.answer(200, {"kind": "storage#rewriteResponse", "done": True, "resource": self.described(other, target)})

    def keep(self, bucket, name, content, query):
        generation = self.store.objects.get((bucket, name), (b"", 0))[1]
        if query.get("ifGenerationMatch", str(generation)) != str(generation):
            return self.error(412, "another generation")
        self.store.objects[bucket, name] = (content, next(self.store.generations))
        self.answer(200, self.described(bucket, name))

    def upload(self, bucket, query, data):
        if "upload_id" in query:
            return self.piece(query["upload_id"], data)
        if query.get("uploadType") == "resumable":
            name, ticket = query.get("name") or json.loads(data)["name"], str(len(self.store.uploads))
            self.store.uploads[ticket] = (bucket, name, query, bytearray())
            where = f"{self.store.url}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={ticket}"
            return self.answer(200, {}, Location=where)
        if query.get("uploadType") == "multipart":
            border = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])[1].encode()
            _, head, content, _ = data.split(b"--" + border, 3)
            blank = re.compile(rb"\r?\n\r?\n")
            told = json.loads(blank.split(head, maxsplit=1)[1])
            # The line break before a border belongs to the border.
            return self.keep(bucket, told["name"], re.sub(rb"\r?\n\Z", b"", blank.split(content, maxsplit=1)[1]), query)
        return self.keep(bucket, query["name"], data, query)

    def piece(self, ticket, data):
        bucket, name, query, content = self.store.uploads[ticket]
        content += data
        total = re.fullmatch(r"bytes .*/(\d+|\*)", self.headers.get("Content-Range", "bytes */*"))[1]
        if total != "*" and len(content) >= int(total):
            return self.keep(bucket, name, bytes(content), query)
        return self.answer(308, Range=f"bytes=0-{len(content) - 1}")
